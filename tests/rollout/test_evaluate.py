"""`python -m rollout evaluate`: what it prints, what it writes, what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from configs.entrypoint import split_flags
from configs.load import ConfigError, load
from configs.schema import EvalSet, LoraConfig, ModelConfig
from examples.countdown.make_model import make_tokenizer
from examples.countdown.make_problems import parse, write
from learner.model.lora.base import digest
from learner.saved.manifest import AdapterOf, seal
from rollout import evaluate
from rollout.engine.arguments import engine_arguments
from rollout.engine.lora.adapter_folder import shapes_in
from rollout.episodes.prompts import Prompts
from rollout.episodes.setup import RolloutSetup
from rollout.evaluation.players import ProblemSet
from rollout.rewards.workers import RewardPool
from rollout.tasks.trajectory import single_turn
from tests.harness.adapted import Adapted, make_base
from tests.harness.fakes import FakeEngine
from tests.harness.pictured import seeing_model
from tests.harness.weightless import add_weights
from tests.harness.world import plain

RUN = Path(__file__).parents[2] / "examples/countdown/quickstart.yaml"


def rows(*problems: tuple[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{numbers}={target}\n"}],
            "reward_model": {"ground_truth": {"numbers": [int(n) for n in numbers.split()], "target": target}},
        }
        for numbers, target in problems
    ]


async def test_answers_are_greedy_and_failures_are_counted(capsys: pytest.CaptureFixture[str]):
    config, tokenizer = load([str(RUN)]), make_tokenizer()
    engine = FakeEngine(lambda prompt: tokenizer.encode("<answer>1+2</answer>"))
    setup = RolloutSetup(Prompts(tokenizer, config), single_turn, RewardPool(config.reward))
    problems = rows(("1 2", 3), ("2 2", 4), ("2 1", 3), ("1 2 3 4 5 6 7 8", 9))
    sets, models = [ProblemSet("eval", EvalSet(path="e"), problems)], [Path("before"), Path("after")]
    async with setup.rewards:
        before, after = await evaluate.evaluate_models(config, setup, engine, sets, models)
    assert engine.temperatures == {0.0} and engine.loaded == [Path("before"), Path("after")]
    assert (before["model"], before["problems"], before["failed"]) == ("before", 4, 1)
    assert before["solved"] == pytest.approx(2 / 3) and before["reward"] == pytest.approx(2.1 / 3)
    assert before["reasons"] == ["prompt longer than data.max_prompt_tokens 12"]
    assert [example["reward"] for example in before["examples"]] == [1.0, 0.1]
    assert before["examples"][0]["answer"] == "<answer>1+2</answer>" and after["reward"] == before["reward"]
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [f"evaluate: loads {model}, which answers 4 problems" for model in models]
    head, *lines = shown.out.splitlines()
    assert head.split() == ["model", "problems", "reward", "solved", "failed"]
    assert [line.split() for line in lines] == [[m, "4", "0.700", "0.667", "1"] for m in ("before", "after")]


def test_the_command_line_is_folders_a_report_and_the_run_file():
    argv = ["run.yaml", "--batch.groups=4", "--models", "a", "b/c", "--out", "r.json", "more.yaml"]
    flags, rest = split_flags(argv, evaluate.PROG, **evaluate.FLAGS)
    assert (flags.models, flags.out) == ([Path("a"), Path("b/c")], Path("r.json"))
    assert rest == ["run.yaml", "--batch.groups=4", "more.yaml"]
    argv = ["--models", "a", "--run.seed=1", "run.yaml", "--models", "b", "--sampling.stop=[the end]"]
    flags, rest = split_flags(argv, evaluate.PROG, **evaluate.FLAGS)
    assert (flags.models, flags.out) == ([Path("a"), Path("b")], None)
    assert rest == ["--run.seed=1", "run.yaml", "--sampling.stop=[the end]"]


def test_missing_models_or_problems_are_refused(tmp_path: Path):
    config = load([str(RUN), f"--data.eval={tmp_path / 'eval.parquet'}"])
    with pytest.raises(ConfigError, match=r"--models: name one or more folders"):
        evaluate.chosen_sets(config, [])
    with pytest.raises(ConfigError, match=r"no config.json there"):
        evaluate.chosen_sets(config, [tmp_path])
    with pytest.raises(ConfigError, match=r"data.eval: null"):
        evaluate.chosen_sets(load([str(RUN), "--data.eval=null"]), [tmp_path])


@pytest.mark.parametrize("inside", ["adapter", "huggingface"])
def test_a_checkpoint_is_refused_with_the_folder_in_it(tmp_path: Path, inside: str):
    config = load([str(RUN), f"--data.eval={tmp_path / 'eval.parquet'}"])
    (tmp_path / "v000100" / inside).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"v000100: a checkpoint; name .*/v000100/{inside}$"):
        evaluate.chosen_sets(config, [tmp_path / "v000100"])


def save(folder: Path, **tensors: tuple[int, ...]) -> Path:
    folder.mkdir()
    weights = {name.replace("__", "."): torch.zeros(shape) for name, shape in tensors.items()}
    adapter = any("lora" in name for name in weights)
    save_file(weights, folder / ("adapter_model.safetensors" if adapter else "model.safetensors"))
    (folder / "config.json").write_text("{}")
    return folder


def adapter(folder: Path, rank: int = 4, out: int = 16, **settings: Any) -> Path:
    tensors = {"base_model__model__layers__0__q__lora_A__weight": (rank, 8)}
    save(folder, **tensors, base_model__model__layers__0__q__lora_B__weight=(out, rank))
    keys = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": str(folder.parent / "base")}
    (folder / "adapter_config.json").write_text(json.dumps(keys | settings))
    return folder


def test_an_engine_for_adapters_holds_those_that_are_evaluated(tmp_path: Path):
    base = save(tmp_path / "base", layers__0__q__weight=(16, 8))
    config = load([str(RUN), f"--model.path={base}", "--model.lora={rank: 32, targets: [q, o]}"])
    models = [base, adapter(tmp_path / "one"), adapter(tmp_path / "two", rank=9)]
    lora = evaluate.served(config, models).model.lora
    assert lora and lora.rank == 9 and lora.targets == ["q"]
    assert evaluate.served(load([str(RUN), f"--model.path={base}"]), models).model.lora == lora
    assert evaluate.served(config, [base]).model.lora is None, "whole weights take no adapter, whatever the run trains"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"base_model_name_or_path": "org/Other-7B"},
            r"wrong: an adapter of org/Other-7B; model.path is .*base",
        ),
        ({"out": 24}, r"wrong: an adapter of a model where layers.0.q is \(24, 8\), not \(16, 8\)"),
        ({"use_dora": True}, r"adapter_config.json: use_dora; only plain LoRA is served"),
        ({"peft_type": "IA3"}, r"adapter_config.json: peft_type IA3; only plain LoRA"),
        ({"r": None}, r"adapter_config.json: r is missing"),
    ],
)
def test_an_adapter_of_another_base_or_kind_is_refused(tmp_path: Path, settings: dict[str, Any], words: str):
    base = save(tmp_path / "base", layers__0__q__weight=(16, 8))
    config = load([str(RUN), f"--model.path={base}"])
    with pytest.raises(ValueError, match=words):
        evaluate.served(config, [adapter(tmp_path / "right"), adapter(tmp_path / "wrong", **settings)])


def test_an_adapter_without_its_tensors_is_refused(tmp_path: Path):
    folder = adapter(tmp_path / "one")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"one: no adapter_model.safetensors there"):
        evaluate.served(load([str(RUN), f"--model.path={tmp_path}"]), [folder])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_the_adapter_of_a_vision_language_model_fits_its_base(tmp_path: Path, kind: str):
    """Files of Qwen2.5-VL have other names for layers than transformers has."""
    base = seeing_model(tmp_path / "base", kind)
    shape = [s for file in Path(base.path).glob("*.safetensors") for n, s in shapes_in(file) if "layers.1.mlp.up_" in n]
    layer = "base_model.model.model.language_model.layers.1.mlp.up_proj"
    config = load([str(RUN), f"--model.path={base.path}"])
    for name, out in (("right", shape[0][0]), ("wrong", shape[0][0] + 1)):
        folder = adapter(tmp_path / name)
        weights = {f"{layer}.lora_A.weight": torch.zeros(4, shape[0][1]), f"{layer}.lora_B.weight": torch.zeros(out, 4)}
        save_file(weights, folder / "adapter_model.safetensors")
    assert evaluate.served(config, [tmp_path / "right"]).model.lora
    with pytest.raises(ConfigError, match=r"wrong: an adapter of a model where model.language_model.layers.1.mlp.up"):
        evaluate.served(config, [tmp_path / "wrong"])


def test_the_base_of_an_adapter_is_read_whatever_a_run_of_whole_weights_says(tmp_path: Path):
    base = save(tmp_path / "base", layers__0__q__weight=(16, 8))
    config = load([str(RUN), f"--model.path={base}", "--rollout.engine.load_format=dummy"])
    assert engine_arguments(config, 0, cpu=True)["load_format"] == "dummy"
    adapted = evaluate.served(config, [adapter(tmp_path / "one")])
    assert engine_arguments(adapted, 0, cpu=True)["load_format"] == "auto"


def test_the_base_is_known_by_where_it_is_or_by_its_name(tmp_path: Path):
    base = save(tmp_path / "base", layers__0__q__weight=(16, 8))
    moved = adapter(tmp_path / "moved", base_model_name_or_path="/elsewhere/base")
    save(tmp_path / "other", layers__0__q__weight=(16, 8))
    other = adapter(tmp_path / "another", base_model_name_or_path=str(tmp_path / "other"))
    config = load([str(RUN), f"--model.path={base}"])
    assert evaluate.served(config, [moved]).model.lora
    with pytest.raises(ConfigError, match=r"another: an adapter of .*other; model.path is"):
        evaluate.served(config, [other])
    with pytest.raises(ConfigError, match=r"other: whole weights beside adapters of .*base.*; evaluate it by itself"):
        evaluate.served(config, [moved, tmp_path / "other"])


def adapter_of_a_checkpoint(folder: Path) -> tuple[Path, Path, str]:
    """Make a base, a checkpoint with an adapter of it, and the base's digest in the checkpoint's manifest."""
    make_base(base := folder / "base")
    model = ModelConfig(path=str(base), dtype="float32", lora=LoraConfig())
    Adapted(base).save(folder / "v000001.tmp" / "adapter", 1)
    known = digest(plain(model).requires_grad_(False))
    seal(folder / "v000001.tmp", None, AdapterOf(model=model, base=known))
    return base, folder / "v000001" / "adapter", known


@pytest.mark.long
def test_a_base_that_was_renamed_is_known_by_its_digest(tmp_path: Path):
    base, adapter, _ = adapter_of_a_checkpoint(tmp_path)
    renamed = base.rename(tmp_path / "renamed")
    assert evaluate.served(load([str(RUN), f"--model.path={renamed}"]), [adapter]).model.lora


@pytest.mark.long
def test_a_base_with_another_digest_and_one_that_cannot_be_read_are_refused(tmp_path: Path):
    base, adapter, known = adapter_of_a_checkpoint(tmp_path)
    make_base(tmp_path / "other", seed=1)
    line = (
        rf"adapter: an adapter of {base} \(digest {known}\), not of weights whose digest is (?!{known})\w{{16}}; model"
    )
    with pytest.raises(ConfigError, match=line):
        evaluate.served(load([str(RUN), f"--model.path={tmp_path / 'other'}"]), [adapter])
    with pytest.raises(ValueError, match=r"^python -m learner digest: .*nowhere"):
        evaluate.served(load([str(RUN), f"--model.path={tmp_path / 'nowhere'}"]), [adapter])


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_base_and_its_adapter_answer_as_transformers_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The whole command, in a process of its own."""
    write(parse(["--out", str(tmp_path), "--count", "30", "--eval", "7"]))
    make_base(base := tmp_path / "base")
    trained = Adapted(base)
    models = [str(base), str(trained.save(tmp_path / "adapter", 1))]
    keys = {"model.path": base, "data.eval": tmp_path / "eval.parquet", "data.train": tmp_path / "train.parquet"}
    argv = [sys.executable, "-m", "rollout", "evaluate", str(RUN), *(f"--{key}={value}" for key, value in keys.items())]
    argv += ["--rollout.engine.kv_cache_memory_bytes=67108864", "--sampling.stop=[]", "--rollout.sequences=8"]
    argv += ["--rollout.engine.max_num_seqs=8", "--models", *models, "--out", str(tmp_path / "report.json")]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"VLLM_CPU_CI_ENV": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    tokenizer = make_tokenizer()
    for record, version in zip(report["models"], (0, 1), strict=True):
        for example in record["examples"]:
            prompt = tokenizer.apply_chat_template(example["problem"]["prompt"], return_dict=False)
            tokens = trained.at(version).model.generate(
                input_ids=torch.tensor([prompt]), max_new_tokens=19, do_sample=False, eos_token_id=[], pad_token_id=0
            )
            answer = tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True)
            assert example["answer"] == answer, record["model"]
    answers = [[example["answer"] for example in record["examples"]] for record in report["models"]]
    assert answers[0] != answers[1]


def test_the_rows_are_the_eval_file_s(tmp_path: Path):
    write(parse(["--out", str(tmp_path), "--count", "30", "--eval", "7"]))
    (add_weights(tmp_path) / "config.json").write_text("{}")
    (given,) = evaluate.chosen_sets(load([str(RUN), f"--data.eval={tmp_path / 'eval.parquet'}"]), [tmp_path])
    assert (given.name, len(given.rows), given.given.samples) == ("eval", 7, 1)


def test_a_missing_eval_file_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        evaluate.main(
            [str(RUN), f"--data.eval={tmp_path / 'none.parquet'}", f"--model.path={tmp_path}", "--models", "a"]
        )
    assert caught.value.code == 2
    assert f"data.eval: {tmp_path / 'none.parquet'}: no such file" in capsys.readouterr().err


async def test_named_sets_get_a_line_each_and_columns_for_what_they_ask(capsys: pytest.CaptureFixture[str]):
    config, tokenizer = load([str(RUN)]), make_tokenizer()
    engine = FakeEngine(lambda prompt: tokenizer.encode("<answer>1+2</answer>"))
    setup = RolloutSetup(Prompts(tokenizer, config), single_turn, RewardPool(config.reward))
    problems = rows(("1 2", 3), ("2 2", 4))
    sets = [
        ProblemSet("few", EvalSet(path="e", samples=3, k=[1, 2], temperature=0.5), problems),
        ProblemSet("all", EvalSet(path="f"), problems[:1]),
    ]
    async with setup.rewards:
        few, every = await evaluate.evaluate_models(config, setup, engine, sets, [Path("m")])
    assert engine.temperatures == {0.5, 0.0}
    assert (few["set"], few["samples"], few["solved"], few["mean@3"]) == ("few", 3, 0.5, 0.5)
    assert few["pass@1"] == few["pass@2"] == few["pass^2"] == 0.5 and every["solved"] == 1.0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "set", "problems", "reward", "solved", "failed", "pass@1", "pass@2", "pass^2"]
    assert lines[0].split() == ["m", "few", "2", "0.550", "0.500", "0", "0.500", "0.500", "0.500"]
    assert lines[1].split() == ["m", "all", "1", "1.000", "1.000", "0"]


def test_sets_are_chosen_by_name(tmp_path: Path):
    write(parse(["--out", str(tmp_path), "--count", "30", "--eval", "7"]))
    (add_weights(tmp_path) / "config.json").write_text("{}")
    given = [f"--data.eval.{name}.path={tmp_path / 'eval.parquet'}" for name in ("one", "two")]
    config = load([str(RUN), *given])
    assert [each.name for each in evaluate.chosen_sets(config, [tmp_path])] == ["eval", "one", "two"][1:]
    assert [each.name for each in evaluate.chosen_sets(config, [tmp_path], ["two"])] == ["two"]
    with pytest.raises(ConfigError, match=r"--sets three: data.eval has one, two"):
        evaluate.chosen_sets(config, [tmp_path], ["two", "three"])
