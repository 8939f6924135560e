"""Each contradiction of a run file against its line; what is allowed at the very bound; the same rules nowhere else."""

import ast
import codecs
import json
import os
import re
from pathlib import Path

import pytest

from configs.architecture import is_proven
from configs.checks import (
    BUILT_IN,
    ENGINE_KEYS_ELSEWHERE,
    ENGINE_KEYS_SET,
    FILES,
    check,
    max_sample_tokens,
    refuse_paths,
)
from configs.data.sources import needs_truth
from configs.help import keys
from configs.load import ConfigError, load
from configs.model_facts import ModelFacts, model_facts
from configs.schema import Config

ROOT = Path(__file__).parents[2]
NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


def refused(*overrides: str, **facts: object) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config(*overrides), **{"files": (), **facts})  # type: ignore[arg-type]
    return list(error.value.problems)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["rollout.engine.max_model_len=2047"],
            "rollout.engine.max_model_len: 2047 is less than data.max_prompt_tokens 1024 + sampling.max_tokens 1024 = "
            "2048; "
            "set it to 2048 or more, or shorten those",
        ),
        (
            ["data.max_prompt_tokens=1", "sampling.max_tokens=1"],
            "sampling.max_tokens: 1: data.max_prompt_tokens 1 + sampling.max_tokens 1 = 2, and the weights' probe "
            "takes texts of samples of 3 tokens or more; raise it, or set weights.probe_every to 0",
        ),
        (
            ["learner.tokens_per_microbatch=2047"],
            "learner.tokens_per_microbatch: 2047 is less than data.max_prompt_tokens 1024 + sampling.max_tokens 1024 = "
            "2048, "
            "the longest sample; set it to 2048 or more",
        ),
        (
            ["rollout.chat.template_kwargs={tools: 1}"],
            "rollout.chat.template_kwargs.tools: Headrace gives the template this argument; remove it",
        ),
        (
            ["reward.function=task"],
            "reward.function: task, but rollout.task single_turn scores nothing; name a task of your own that returns "
            "a score, or a reward function",
        ),
        (
            ["rollout.chat.port=5800", "rollout.servers=2"],
            "rollout.chat.port: 5800 for 2 servers; set it to 0, each then takes a free one, or rollout.servers to 1",
        ),
        (
            ["reward.function=[{function: task}, {function: math}]"],
            "reward.function: task stands alone; remove it from the list, its score is the metric task_score",
        ),
        (
            ["reward.function=[{function: math, weight: 0}]"],
            "reward.function: every weight is 0, so all rewards are equal; give one of them another weight",
        ),
        (
            ["rollout.task=agent"],
            "rollout.agent.command: empty, but rollout.task is agent; set both, or neither",
        ),
        (
            ["rollout.agent.command=[node, agent.js]"],
            "rollout.agent.command: node agent.js, but rollout.task is single_turn; set both, or neither",
        ),
        (
            ["rollout.task=environment", "rollout.environment.id=wordle"],
            "rollout.environment.python: null, but rollout.task is environment; set both, or neither",
        ),
        (
            ["rollout.environment.id=wordle"],
            "rollout.environment.id: wordle, but rollout.task is single_turn; set both, or neither",
        ),
        (
            ["rollout.chat.host=0.0.0.0"],
            "rollout.chat.host: 0.0.0.0 is no address that agents can call; set rollout.chat.public_url",
        ),
        (
            ["rollout.chat.max_tokens=10000000", "batch.groups=1"],
            "buffer.max_message_mib: 256 is less than a group of batch.samples 8 x 10000000 tokens can take, 992 MiB; "
            "set it to 992 or more",
        ),
        (
            ["rollout.max_sample_tokens=2047"],
            "rollout.max_sample_tokens: 2047 is less than data.max_prompt_tokens 1024 + sampling.max_tokens 1024 = "
            "2048; set it to 2048 or more, or shorten those",
        ),
        (
            ["rollout.max_sample_tokens=8000", "rollout.engine.max_model_len=4096"],
            "rollout.engine.max_model_len: 4096 is less than rollout.max_sample_tokens 8000; "
            "set it to 8000 or more, or shorten those",
        ),
        (
            ["rollout.task=tool.py:play", "rollout.engine.max_model_len=16384", "learner.tokens_per_microbatch=8192"],
            "learner.tokens_per_microbatch: 8192 is less than rollout.engine.max_model_len 16384, the longest sample; "
            "set it to 16384 or more",
        ),
        (
            ["data.min_pixels=2000", "data.max_pixels=1000"],
            "data.min_pixels: 2000 is more than data.max_pixels 1000; lower it or raise data.max_pixels",
        ),
        (
            ["learner.ranks=9", "batch.groups=4", "batch.samples=2"],
            "learner.ranks: 9 is more than batch.groups 4 x batch.samples 2 = 8 samples, a rank would get nothing; "
            "raise batch.groups or lower learner.ranks",
        ),
        (
            ["learner.ranks=8", "learner.nodes=3"],
            "learner.nodes: 3 does not divide learner.ranks 8; each has as many: "
            "set learner.ranks to 9, or other nodes",
        ),
        (
            ["learner.ranks=8", "learner.nodes=2", "learner.shard=3"],
            "learner.shard: 3 does not divide learner.ranks 8; set it to a number that does",
        ),
        (
            ["learner.ranks=12", "learner.nodes=2", "learner.shard=4"],
            "learner.shard: 4, so copies of the model would lie across the nodes, which have 6 ranks each; "
            "set it to a divisor or multiple of that",
        ),
        (
            ["learner.ranks=8", "learner.nodes=2", "learner.shard=8", "learner.checkpoint_on=first_node"],
            "learner.checkpoint_on: first_node has 4 ranks, a copy of learner.shard 8 does not lie on it; "
            "set checkpoint_on: shared, or lower learner.shard",
        ),
        (
            ["batch.target_staleness=5"],
            "batch.target_staleness: 5 is more than batch.max_staleness 4; lower it to 4 or raise the bound",
        ),
        (
            ["algorithm.constant_length=7"],
            "algorithm.constant_length: 7 has no effect with algorithm.aggregation token; "
            "set algorithm.aggregation: constant or constant_length: null",
        ),
        (
            ["algorithm.loss=gspo", "algorithm.aggregation=prompt"],
            "algorithm.aggregation: prompt has no effect with algorithm.loss gspo, a mean over samples by definition; "
            "set algorithm.aggregation: sequence or another loss",
        ),
        (
            ["algorithm.turn_discount=0.9", "algorithm.advantage=group_std"],
            "algorithm.turn_discount: 0.9 needs a baseline that is a mean of returns, which algorithm.advantage "
            "group_std is not; set algorithm.advantage: group_mean or leave_one_out, or turn_discount: null",
        ),
        (
            ["algorithm.overlong=soft", "algorithm.overlong_buffer=1024"],
            "algorithm.overlong_buffer: 1024 is not below sampling.max_tokens 1024, every answer would be punished; "
            "lower it or raise sampling.max_tokens",
        ),
        (
            ["learner.attention=flash", "learner.device=cpu"],
            "learner.attention: flash needs a GPU, but learner.device is cpu; set learner.attention: auto",
        ),
        (
            ["learner.attention=varlen", "model.dtype=float32"],
            "learner.attention: varlen computes in bfloat16, but model.dtype is float32; set learner.attention: sdpa",
        ),
        (
            ["learner.attention=flash4", "learner.device=cpu"],
            "learner.attention: flash4 needs a GPU, but learner.device is cpu; set learner.attention: auto",
        ),
        (
            ["learner.attention=flash4", "model.dtype=float32"],
            "learner.attention: flash4 computes in bfloat16, but model.dtype is float32; set learner.attention: sdpa",
        ),
        (
            ["rollout.engine.dtype=half"],
            "rollout.engine.dtype: half contradicts model.dtype bfloat16; remove it and set model.dtype",
        ),
        (
            ["rollout.engine.quantization=awq"],
            "rollout.engine.quantization: awq does not quantise each policy as it is loaded; "
            "set one of fp8, fp8_per_tensor",
        ),
        (
            ["rollout.engine.quantization=fp8", "rollout.device=cpu"],
            "rollout.engine.quantization: fp8 needs a GPU, but rollout.device is cpu; remove the key",
        ),
        (
            ["rollout.engine.quantization=fp8_per_tensor", "model.dtype=float32"],
            "rollout.engine.quantization: fp8_per_tensor quantises bfloat16, but model.dtype is float32; "
            "set model.dtype: bfloat16 or remove the key",
        ),
        (
            ["rollout.engine.skip_tokenizer_init=true"],
            "rollout.engine.skip_tokenizer_init: Headrace sets it; remove the key",
        ),
        (
            ["weights.host=0.0.0.0"],
            "weights.host: 0.0.0.0 is no address that servers can connect to; name one of this machine",
        ),
        (
            ["reward.function=countdwon"],
            "reward.function: 'countdwon' is neither one of countdown, math, math_verify, exact_match, regex, length, "
            "judge, reward_model, reasoning_gym, task nor path/to/file.py:function",
        ),
        (
            ["rollout.task=task.txt:task"],
            "rollout.task: 'task.txt:task' is neither one of single_turn, agent, environment nor "
            "path/to/file.py:function",
        ),
        (
            ["rollout.engine.tensor_parallel_size=2"],
            "rollout.engine.tensor_parallel_size: 2 contradicts rollout.tensor_parallel 1; "
            "remove it and set rollout.tensor_parallel",
        ),
        (
            ["buffer.address=tcp://127.0.0.1:65536"],
            "buffer.address: tcp://127.0.0.1:65536 has no port between 1 and 65535; choose another",
        ),
        (
            ["buffer.max_message_mib=1", "batch.samples=64"],
            "buffer.max_message_mib: 1 is less than a group of batch.samples 64 x 2048 tokens can take, 2 MiB; "
            "set it to 2 or more",
        ),
        (
            ["buffer.max_gib=0.01", "batch.groups=64"],
            "buffer.max_gib: 0.01 is less than one batch of 64 x 8 samples of 2048 tokens can take, 0.0 GiB, "
            "so it could never fill; set it to 1 or more",
        ),
    ],
)
def test_contradictions(overrides: list[str], line: str) -> None:
    assert refused(*overrides) == [line]


def test_contradictions_are_told_all_at_once() -> None:
    assert (
        len(refused("batch.target_staleness=9", "rollout.engine.dtype=half", further=["data.train: no column x"])) == 3
    )
    assert refused(further=["data.train: no column x"]) == ["data.train: no column x"]


def test_what_fits_exactly_is_allowed() -> None:
    same = ["rollout.engine={max_model_len: 2048, dtype: bfloat16}", "learner.tokens_per_microbatch=2048"]
    check(config(*same, "learner.ranks=256", "batch.target_staleness=4"), files=())
    check(config("algorithm.aggregation=constant", "algorithm.constant_length=7", "learner.device=cpu"), files=())
    check(config("algorithm.turn_discount=0", "algorithm.advantage=leave_one_out"), files=())
    for aggregation in ("token", "sequence"):
        check(config("algorithm.loss=gspo", f"algorithm.aggregation={aggregation}"), files=())


def test_the_longest_sample_is_one_turn_or_what_a_task_may_fill() -> None:
    engine, task = "rollout.engine.max_model_len=4096", "rollout.task=tool.py:play"
    assert max_sample_tokens(config(engine)) == max_sample_tokens(config(task)) == 2048
    assert max_sample_tokens(config(engine, task)) == 4096
    assert max_sample_tokens(config(engine, task, "rollout.max_sample_tokens=3000")) == 3000
    assert max_sample_tokens(config("rollout.engine.max_model_len=64", task)) == 2048


def test_epochs_must_reach_as_far_as_the_versions() -> None:
    epochs = ["data.epochs=2", "run.versions=100", "batch.groups=10"]
    assert refused(*epochs, problems=499) == [
        "data.epochs: 2 x 499 problems = 998 groups, but run.versions 100 x batch.groups 10 = 1000; "
        "set data.epochs: 3 (or null) or run.versions: 99"
    ]
    check(config(*epochs), files=(), problems=500)
    check(config(*epochs), files=())
    assert refused(problems=0) == ["data.train: d.parquet has no problems; name a file that has"]


def test_a_model_too_small_for_the_run(model: Path) -> None:
    small = [
        f"model.path={model}",
        "data.max_prompt_tokens=113",
        "sampling.max_tokens=400",
        "rollout.tensor_parallel=4",
    ]
    positions, heads = refused(*small)
    assert positions.startswith(f"model.path: {model} has 512 positions, less than data.max_prompt_tokens 113 +")
    assert heads == f"rollout.tensor_parallel: 4 does not divide the 6 attention heads of {model}; set it to 3"


def test_heads_of_keys_and_values_bound_a_server_s_gpus_too(model: Path) -> None:
    """vLLM gives each GPU whole heads, or several GPUs the same one."""
    shape = {"num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 2, "hidden_size": 56}
    (model / "config.json").write_text(json.dumps(shape))
    for size in (1, 2, 4, 28):
        check(config(f"model.path={model}", f"rollout.tensor_parallel={size}"), files=())
    for size in (7, 14):
        (line,) = refused(f"model.path={model}", f"rollout.tensor_parallel={size}")
        wrong = f"{size} is neither a divisor nor a multiple of the 4 heads of keys and values of {model}"
        assert line == f"rollout.tensor_parallel: {wrong}; set it to 4"


@pytest.mark.parametrize("key", ["data.chat_template", "data.format_prompt"])
def test_a_template_that_is_no_text_is_refused_by_its_key_and_file(tmp_path: Path, key: str) -> None:
    """A chat template once gave the bare words of the decoder."""
    (tmp_path / "t.jinja").write_bytes(b"{{ content }} \xff")
    (line,) = refused(f"{key}={tmp_path}/t.jinja", files=(key,))
    assert line.startswith(f"{key}: {tmp_path}/t.jinja: cannot be read as text: 'utf-8' codec can't decode byte 0xff")
    assert line.endswith("; write it as UTF-8")


def test_missing_files_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "reward.py").write_text("from x import y\n\ndef score(): ...\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "file").write_text("")
    lines = refused(
        *("model.path=empty", "data.eval=empty", "data.format_prompt=none.jinja", "reward.function=reward.py:missing"),
        *("rollout.task=broken.py:task", "data.chat_template=none", "data.image_dir=file"),
        files=FILES,
    )
    assert lines[:4] == [
        "model.path: empty: has no config.json; name a folder in Hugging Face format",
        f"data.train: d.parquet: no such file (from {tmp_path}); correct the path",
        "data.eval: empty: a folder without data files (.parquet, .jsonl, .ndjson, .json, .csv, .tsv); "
        "name another, or a file",
        f"data.format_prompt: none.jinja: no such file (from {tmp_path}); correct the path",
    ]
    assert lines[4] == f"data.image_dir: file: no such folder (from {tmp_path}); correct the path"
    assert lines[5] == "reward.function: reward.py has no function missing; it has score"
    assert lines[6].startswith("rollout.task: broken.py: not Python: ")
    assert len(lines) == 7
    assert refused("reward.function=x.py", files=("reward.function",)) == [
        "reward.function: 'x.py' is neither one of countdown, math, math_verify, exact_match, regex, length, judge, "
        "reward_model, reasoning_gym, task nor path/to/file.py:function"
    ]
    for key in ("algorithm.loss", "algorithm.advantage"):
        assert (
            refused(f"{key}=reward.py:missing", files=FILES)[-1]
            == f"{key}: reward.py has no function missing; it has score"
        )
        assert refused(f"{key}=no.py:f", files=FILES)[-1] == f"{key}: no.py: no such file (from {tmp_path}); correct it"
        with pytest.raises(ConfigError, match=f'{key}: "grpo" is not one of .* or text like path/to/file.py:function'):
            config(f"{key}=grpo")
    for fine in ("reward.py:score", "reward.py:y", "countdown"):
        check(config(f"reward.function={fine}"), files=("reward.function",))


@pytest.mark.parametrize(
    ("path", "is_folder"),
    [("Qwen/Qwen2.5-1.5B", False), ("gpt2", False), ("./m", True), ("/m", True), ("a/b/c", True), ("here/m", True)],
)
def test_a_missing_folder_is_told_from_a_hub_name(
    path: str, is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    if is_folder:
        assert refused(f"model.path={path}", files=("model.path",))[0].startswith(f"model.path: {path}: no such folder")
    else:
        check(config(f"model.path={path}"), files=("model.path",))


@pytest.mark.parametrize("name", ENGINE_KEYS_ELSEWHERE)
def test_an_engine_key_that_repeats_its_own_key_is_allowed(name: str) -> None:
    given = "model.trust_remote_code=true", "rollout.tensor_parallel=2", "run.seed=7"
    run = config(*given)
    section, key = ENGINE_KEYS_ELSEWHERE[name].split(".")
    value = getattr(getattr(run, section), key)
    check(config(*given, f"rollout.engine.{name}={json.dumps(value)}"), files=())
    (line,) = refused(*given, f"rollout.engine.{name}=other")
    assert line.startswith(f"rollout.engine.{name}: other contradicts {ENGINE_KEYS_ELSEWHERE[name]} {value}; remove it")


def test_engine_keys_name_keys_of_the_run_file() -> None:
    assert set(ENGINE_KEYS_ELSEWHERE.values()) <= set(keys())
    assert not set(ENGINE_KEYS_ELSEWHERE) & set(ENGINE_KEYS_SET)


@pytest.mark.parametrize(
    "source",
    [
        codecs.BOM_UTF8 + b"def score(solution_str): return 1\r\n",
        "# -*- coding: latin-1 -*-\ndef score(solution_str): return '\xe9' in solution_str\n".encode("latin-1"),
        b"from my_rewards.of_math import *\n",
        b"def __getattr__(name): return lambda solution_str: 1.0\n",
        b"globals()['score'] = lambda solution_str: 1.0\n",
    ],
    ids=["byte order mark", "latin-1", "star", "getattr", "globals"],
)
def test_what_python_can_import_is_not_refused_by_its_text(source: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(source)
    check(config(f"reward.function={tmp_path}/mine.py:score"), files=("reward.function",))


def test_a_prompt_alone_is_enough_for_a_reward_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(codecs.BOM_UTF8 + b"def score(solution_str): return 1\n")
    assert not needs_truth(config(f"reward.function={tmp_path}/mine.py:score"))


def test_a_broken_template_is_refused_with_its_line(tmp_path: Path) -> None:
    template = tmp_path / "prompt.jinja"
    override = f"data.format_prompt={template}"
    for text, line in (("{{ content | trim }}\n{% if %}", 2), ("{{ content | nosuchfilter }}", 1)):
        template.write_text(text)
        (problem,) = refused(override, files=("data.format_prompt",))
        assert problem.startswith(f"data.format_prompt: {template}:{line}: ")
    template.write_text("Think. {{ problem }}")
    (problem,) = refused(override, files=("data.format_prompt",))
    assert problem.endswith("prompt.jinja: it does not name content, so no prompt has its problem; write {{ content }}")
    template.write_bytes(b"\xe9")
    (problem,) = refused(override, files=("data.format_prompt",))
    assert problem.startswith(f"data.format_prompt: {template}: cannot be read as text: ")
    for mark in (b"", codecs.BOM_UTF8):
        template.write_bytes(mark + b"{{ content | trim }}")
        check(config(override), files=("data.format_prompt",))
    template.write_text("{% if %}")
    check(config(override), files=())


def test_programs_that_are_not_here_are_named(tmp_path: Path) -> None:
    agent = ("rollout.task=agent", "rollout.agent.command=[no-such-program, x]")
    (line,) = refused(*agent, files=("rollout.agent.command",))
    assert line.startswith("rollout.agent.command: no-such-program: no such program here (from ")
    python = tmp_path / "bin/python"
    environment = ("rollout.task=environment", "rollout.environment.id=wordle", f"rollout.environment.python={python}")
    (line,) = refused(*environment, files=("rollout.environment.python",))
    assert line.startswith(f"rollout.environment.python: {python}: no such program (from ")
    check(config(*agent), files=())
    check(config(*environment), files=())


@pytest.mark.parametrize(
    "text", ["{{ 'a' * 99999999999 }}", "{{ 'a'|center(99999999999) }}", "{% set x = 9 ** 99999999 %}"]
)
def test_a_template_is_parsed_and_nothing_of_it_computed(text: str, tmp_path: Path) -> None:
    """Jinja computes constants when it compiles a template."""
    (tmp_path / "prompt.jinja").write_text("{{ content }}" + text)
    check(config(f"data.format_prompt={tmp_path}/prompt.jinja"), files=("data.format_prompt",))


def test_a_chat_template_is_a_file_or_none(tmp_path: Path) -> None:
    absent = tmp_path / "absent.jinja"
    (problem,) = refused(f"data.chat_template={absent}", files=("data.chat_template",))
    assert problem == f"data.chat_template: {absent}: no such file (from {Path.cwd()}); correct the path"
    assert config("data.chat_template=none").data.chat_template == "none"
    check(config("data.chat_template=none"), files=("data.chat_template",))


def test_built_in_names_are_those_of_the_registries() -> None:
    registries = dict(registry for file in (ROOT / "rollout").rglob("*.py") for registry in dict_literals(file))
    assert set(BUILT_IN["reward.function"]) == registries["REWARDS"] | {"task"}
    assert set(BUILT_IN["rollout.task"]) == registries["TASKS"] | {"agent", "environment"}


def dict_literals(file: Path) -> list[tuple[str, set[str]]]:
    """Name and keys of each dict literal with constant keys that `file` assigns at its top level."""
    found = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Dict):
            found.append((target.id, {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}))
    return found


ORIGINAL = {"original_max_position_embeddings": 256}
ROPES: dict[str, tuple[dict[str, object], int]] = {
    "none": ({}, 512),
    "default": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 512),
    "linear, transformers 4": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
    "linear, transformers 4.45": ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 2048),
    "linear, transformers 5": ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 2048),
    "yarn, transformers 4": ({"rope_scaling": {"type": "yarn", "factor": 4.0, **ORIGINAL}}, 512),
    "yarn, transformers 5": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}}, 512),
    "yarn, with fewer angles than positions": ({"rope_scaling": {"type": "yarn", "factor": 1.5, **ORIGINAL}}, 384),
    "yarn of images, with a larger table": (
        {"rope_scaling": {"type": "yarn", "factor": 1.5, "mrope_section": [16, 24, 24], **ORIGINAL}},
        512,
    ),
    "llama3": ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, **ORIGINAL}}, 512),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 512),
    "by type of layer": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        1024,
    ),
    "of a text config": ({"text_config": {"max_position_embeddings": 8, "rope_scaling": {"factor": 2.0}}}, 16),
    "beside another length": ({"model_max_length": 128}, 128),
    "beside another length, scaled": ({"max_seq_length": 128, "rope_scaling": {"type": "linear", "factor": 2.0}}, 256),
    "under another name": ({"max_position_embeddings": None, "n_positions": 64}, 64),
    "gemma3, which writes the product": (
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        512,
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_positions_are_read_from_configs_of_transformers_4_and_5(name: str, model: Path) -> None:
    """Counts as vLLM 0.32 does, which does not start for a longer sample; with yarn it may read behind its table."""
    given, positions = ROPES[name]
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512, **given}))
    assert model_facts(str(model)).positions == positions
    fits = ["data.max_prompt_tokens=8", f"sampling.max_tokens={positions - 8}"]
    assert not [line for line in all_of(model, *fits) if "positions" in line]
    (line,) = [line for line in all_of(model, fits[0], f"sampling.max_tokens={positions - 7}") if "positions" in line]
    assert line.startswith(f"model.path: {model} has {positions} positions, less than ")


def test_a_llama_whose_window_transformers_ignores_is_not_proven() -> None:
    assert is_proven({"model_type": "llama", "sliding_window": None})
    assert not is_proven({"model_type": "llama", "sliding_window": 512})


ARCHITECTURES: dict[str, tuple[dict[str, object], str]] = {
    "hybrid": (
        {"layer_types": ["chunked_attention", "full_attention"]},
        "it has layers of type chunked_attention, but",
    ),
    "blocks": ({"layers_block_type": ["rwkv", "full_attention"]}, "it has layers of type rwkv, but"),
    "compressed tensors": ({"compression_config": {"format": "int"}}, "its weights are quantised (unknown)"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised (fp8)"),
    "mxfp4 in a text config": (
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
        "its weights are quantised (mxfp4)",
    ),
    "longrope": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        "its rotary embedding is of type longrope",
    ),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic"}}, "its rotary embedding is of type dynamic"),
    "of one type of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}},
        "its rotary embedding is of type dynamic",
    ),
    "unknown rope": ({"rope_scaling": {"type": "su"}}, "its rotary embedding is of type su"),
    "classifier": ({"architectures": ["Qwen2ForSequenceClassification"]}, "its architecture is Qwen2ForSequence"),
    "no head": ({"architectures": ["Qwen2Model"]}, "its architecture is Qwen2Model, which has no head"),
    "encoder and decoder": ({"is_encoder_decoder": True}, "it is an encoder with a decoder"),
    "dual chunk attention": ({"dual_chunk_attention_config": {"chunk_size": 8}}, "it has dual chunk attention"),
    "a size that is text": ({"num_hidden_layers": "24"}, 'num_hidden_layers in its config.json is "24", not a whole'),
    "a size that is true": ({"text_config": {"hidden_size": True}}, "hidden_size in its config.json is true, not a"),
    "a factor that is text": ({"rope_scaling": {"factor": "4"}}, 'the factor of its rotary embedding is "4", not a'),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_that_would_be_trained_wrongly_are_refused_by_their_config(name: str, model: Path) -> None:
    given, words = ARCHITECTURES[name]
    (model / "config.json").write_text(json.dumps({"model_type": "invented", **given}))
    (line,) = all_of(model)
    assert line.startswith(f"model.path: {model} (invented): {words}") and re.search(
        "; (take|dequantise|remove|correct)", line
    )


@pytest.mark.parametrize("place", ["file", "file/below", "link", "runs"])
def test_a_run_s_folder_that_can_be_none_is_refused_before_anything_looks_into_it(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/run").touch()  # `run.name` is run
    taken = tmp_path / {"file/below": "file", "runs": "runs/run"}.get(place, place)
    with pytest.raises(ConfigError) as error:
        refuse_paths(load([*NEEDED, f"--run.folder={tmp_path / place}", "--run.name=run"]))
    assert error.value.problems == (f"run.folder: {tmp_path / place}: {taken} is no folder; name another one",)
    refuse_paths(load([*NEEDED, f"--run.folder={tmp_path / 'new/one'}"]))


@pytest.mark.parametrize("key", ["model.path", "data.train", "data.chat_template", "run.folder", "reward.model"])
def test_a_path_that_the_system_cannot_look_at_is_one_line(key: str, tmp_path: Path) -> None:
    long, circle = tmp_path / ("x" * 300), tmp_path / "circle"
    circle.symlink_to(circle)
    (line,) = refused(f"{key}={long}")
    assert line.startswith(f"{key}: {long}") and line.endswith(": File name too long; correct the path")
    (line,) = refused(f"{key}={circle}")
    assert line.startswith(f"{key}: {circle}") and "Too many levels of symbolic links" in line


@pytest.mark.parametrize(
    "key",
    ["data.train", "data.chat_template", "reward.function", "rollout.task", "algorithm.loss", "algorithm.advantage"],
)
def test_a_pipe_or_device_is_refused_unread(key: str, tmp_path: Path) -> None:
    """To read one may take for ever."""
    os.mkfifo(pipe := tmp_path / "pipe.py")
    for path in (pipe, Path("/dev/zero")):
        if key.startswith("algorithm") and path.suffix != ".py":  # refused by its form
            continue
        function = ":play" if key.partition(".")[0] in ("reward", "rollout", "algorithm") else ""
        (line,) = refused(f"{key}={path}{function}")
        assert line == f"{key}: {path}: neither a file nor a folder, but a device, pipe or socket; name another"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_model_s_folder_is_not_read(name: str, model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert model_facts(str(model)) == ModelFacts()


@pytest.mark.parametrize("text", ["[]", "3", '"a"', "null"])
def test_a_config_that_is_no_object_is_refused(text: str, model: Path) -> None:
    (model / "config.json").write_text(text)
    (line,) = all_of(model)
    assert line == f"model.path: {model}: config.json holds no JSON object; download the model again"


def test_full_and_sliding_attention_are_accepted(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"layer_types": ["sliding_attention", "full_attention"]}))
    assert all_of(model) == []


def all_of(model: Path, *overrides: str) -> list[str]:
    """Return every refusal of a run of `model`. Only the model's folder must exist."""
    try:
        check(config(f"model.path={model}", *overrides), files=("model.path",))
    except ConfigError as error:
        return list(error.problems)
    return []
