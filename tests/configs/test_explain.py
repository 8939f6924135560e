"""The arithmetic of a run against numbers worked out by hand, and the command line that prints it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.__main__ import count_rows, main
from configs.checks import check
from configs.explain import explain
from configs.flow.kv_room import gpu_bytes
from configs.flow.sequences import open_groups
from configs.flow.simulation import expected
from configs.load import load
from configs.model_facts import ModelFacts, model_facts
from configs.publishing import (
    choice,
    contradictions,
    copies_over,
    most_parameters,
    publishes_rows,
    shards_of,
    unpublishable,
)
from configs.schema import Config

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


def test_the_arithmetic_of_a_run(model: Path) -> None:
    run = config(
        *(f"model.path={model}", "run.versions=50", "batch.groups=12", "batch.samples=4", "batch.max_staleness=3"),
        *("data.max_prompt_tokens=100", "sampling.max_tokens=400", "learner.ranks=2", "learner.device=cuda"),
        *("learner.tokens_per_microbatch=1000", "rollout.servers=3", "rollout.tensor_parallel=2"),
        *("rollout.sequences=12", "rollout.device=cuda", "learner.export_every=20"),
    )
    text = "\n".join(explain(run, problems=100))
    assert "12 groups x 4 samples = 48 samples; at most 24,000 tokens (100 of prompt + 400 of answer each)" in text
    assert "19,200 of them sampled" in text
    assert "100 problems make 8.3 batches per epoch; the run trains 600 groups = 6.00 epochs" in text
    assert "(3 + 1) x 12 = 48 groups may be open at once" in text
    assert "sequences: 3 x 12 = 36 at a time, rollout.sequences, as far as the KV cache holds them" in text
    assert "of 36 sequences run at a time, limited by the places; mean age" in text
    assert "assumed for that: answers of 100 tokens in the mean, 0.25 of the longest" in text
    assert "GPUs: learner 2 ranks + 3 servers x tensor parallel 2 = 8" in text
    assert "a rank trains about 24 samples per version, packed into forward passes, 12 of 1,000 tokens if" in text
    assert "1.1 k parameters x (3 x 14 + 2 bytes) = 48.4 kB of disk" in text
    assert "note:" not in text


@pytest.mark.parametrize("wrong", [["ranks=1", "nodes=2"], ["ranks=3", "nodes=2"], ["ranks=2", "nodes=2", "shard=3"]])
def test_nodes_that_are_refused_are_not_explained(wrong: list[str]) -> None:
    assert "copies of the model" not in "\n".join(explain(config(*(f"learner.{word}" for word in wrong))))


def test_a_learner_of_several_nodes() -> None:
    run = config("learner.ranks=16", "learner.nodes=2", "learner.shard=4")
    text = "\n".join(explain(run))
    assert "learner: 16 ranks on 2 nodes: 4 copies of the model over 4 ranks each, their gradients reduced once" in text
    assert "checkpoints: all 2 nodes must share the folder runs/run" in text
    far = "ranks on other machines than the buffer cannot reach buffer.address ipc://buffer"
    assert f"note: learner.nodes 2: {far}" in text
    whole = config("learner.ranks=16", "learner.nodes=2", "learner.shard=16", "buffer.address=tcp://10.0.0.1:5600")
    text = "\n".join(explain(whole))
    assert "learner: 16 ranks on 2 nodes: one copy of the model over 16 ranks" in text and "note: learner" not in text
    alone = config("learner.ranks=16", "learner.nodes=2", "learner.checkpoint_on=first_node")
    assert "on the first node's disk, and lost with that machine" in "\n".join(explain(alone))


def test_what_the_buffer_takes_is_told() -> None:
    text = "\n".join(explain(config("rollout.servers=2048", "learner.ranks=256", "batch.groups=256"), problems=10**6))
    assert "the buffer's process: 2,408 open files, of which 2,312 are connections; 1.1 " in text
    assert "GiB of memory at most, besides the text of the problems" in text


def test_a_task_of_several_turns_fills_its_samples(model: Path) -> None:
    task = ("rollout.task=my/tool.py:play", "rollout.max_sample_tokens=4096")
    run = config(f"model.path={model}", *task, "batch.groups=2")
    text = "\n".join(explain(run, problems=100))
    assert "16 samples; at most 65,536 tokens (4,096 each: prompt, all turns and what the task gives)" in text


def test_a_model_that_sees(model: Path) -> None:
    """The tower by the names of its weights, those of older releases too."""
    assert not any(line.startswith("images:") for line in explain(config(f"model.path={model}")))
    names = {"model.visual.merger.weight": [500, 2], "visual.blocks.0.weight": [500], "model.norm.weight": [7]}
    header = json.dumps({name: {"shape": shape} for name, shape in names.items()}).encode()
    for file in model.glob("*.safetensors"):
        file.unlink()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {}}))
    run = config(f"model.path={model}", "model.freeze=[vision]", "data.max_images=2")
    assert model_facts(str(model)).tower == 1500 and model_facts(str(model)).parameters == 1507
    (line,) = (line for line in explain(run) if line.startswith("images:"))
    assert "at most 2 a sample, each at most 1,048,576 pixels; its tower has 1.5 k of the parameters" in line
    assert "of which model.freeze leaves out: vision: 3 kB on each server and 6 kB of the learner's state" in line
    free, adapted = (config(f"model.path={model}", *words) for words in ([], ["model.lora.rank=8"]))
    sizes = "3 kB on each server and {} kB of the learner's state, besides its activations"
    for run, state in ((free, 24), (adapted, 3)):
        assert sizes.format(state) in "\n".join(explain(run))
    alone = list(explain(config(f"model.path={model}", "model.text_alone=true")))
    assert not any(line.startswith("images:") for line in alone)
    assert any(line.startswith("text alone: 1.5 k of the parameters are idle") for line in alone)


def test_a_model_that_is_trained_on_text_alone(model: Path) -> None:
    names = {"vision_tower.weight": [500_000], "projector.weight": [250_000], "language_model.norm.weight": [7]}
    header = json.dumps({name: {"shape": shape} for name, shape in names.items()}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for file in model.glob("model-*.safetensors"):
        file.unlink()
    (model / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": {}, "vision_config": {}}))
    lines = list(explain(config(f"model.path={model}")))
    (line,) = (line for line in lines if line.startswith("text alone:"))
    assert "750 k of the parameters are idle" in line and "3 MB of the learner's state" in line
    assert not any(line.startswith("images:") for line in lines)


def test_a_microbatch_holds_whole_samples() -> None:
    """256 samples of 2,048 tokens, 3 per pass: 86 passes, although the tokens alone would fit into 75."""
    assert any("86 of 7,000 tokens" in line for line in explain(config("learner.tokens_per_microbatch=7000")))


def test_target_staleness_decides_what_may_be_open() -> None:
    run = config("batch.groups=10", "batch.max_staleness=4", "batch.target_staleness=1", "rollout.sequences=480")
    assert open_groups(run) == 20 and expected(run, 1).age <= 1
    assert any(line.startswith("note: the bound on age leaves") for line in explain(run))


LONG_TAIL = ("batch.groups=16", "batch.samples=16", "sampling.max_tokens=4096", "rollout.device=cuda")


def test_a_bound_that_empties_the_servers_is_noted_with_a_remedy_that_helps() -> None:
    """The long tail that was simulated apart from this: fill 0.67 at staleness 4, 0.14 at 0, 0.96 at 8."""
    full = config(*LONG_TAIL, "rollout.sequences=512")
    (note,) = [line for line in explain(full) if "bound on age leaves" in line]
    assert "the 80 open groups" in note
    assert "raise batch.max_staleness (8) or batch.groups (32), or set rollout.sequences to 256" in note
    assert expected(full, 0).running / 512 == pytest.approx(0.14, abs=0.01)
    assert expected(full, 4).running / 512 == pytest.approx(0.67, abs=0.03)
    assert 2.2 < expected(full, 4).speed / expected(full, 0).speed < 2.7
    for remedy in ("batch.max_staleness=8", "batch.groups=32", "rollout.sequences=256"):
        remedied = config(*LONG_TAIL, "rollout.sequences=512", remedy)
        assert not any("bound on age leaves" in line for line in explain(remedied))


@pytest.mark.parametrize("keys", [(), ("batch.groups=8", "batch.samples=8"), ("batch.max_staleness=1",)])
def test_fewer_sequences_that_are_said_to_be_as_fast_are(keys: tuple[str, ...]) -> None:
    full = config(*LONG_TAIL, "rollout.sequences=512", *keys)
    (note,) = [line for line in explain(full) if "bound on age leaves" in line]
    fewer = int(note.partition("set rollout.sequences to ")[2].partition(",")[0])
    bound = full.batch.max_staleness
    assert fewer < 512 and expected(full, bound, fewer).speed > 0.95 * expected(full, bound).speed


def test_vllm_runs_no_more_than_its_own_bound_on_any_device() -> None:
    """An engine key that is below the number of places leaves sequences waiting in vLLM, on a CPU too."""
    run = config("rollout.device=cpu", "rollout.sequences=600", "rollout.engine.max_num_seqs=64")
    text = "\n".join(explain(run))
    assert "of 64 sequences run at a time, limited by rollout.engine.max_num_seqs" in text
    assert "note: rollout.engine.max_num_seqs 64 is below rollout.sequences 600: the other 536 wait inside vLLM" in text


def test_auto_says_with_how_many_it_begins_and_where_it_ends() -> None:
    auto = "256 a server and adds some while the learner waits"
    text = "\n".join(explain(config(*LONG_TAIL)))
    assert "1 x 512 = 512 at a time, at most: rollout.sequences auto begins with " + auto in text
    assert "limited by the bound on age (batch.max_staleness, batch.groups); mean age 4.0" in text


SIZED = {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 1536}
"""KV cache of Qwen2.5-1.5B: 2 x 28 x 2 x 128 numbers a token, 28,672 bytes in bfloat16."""


def sized(model: Path, *words: str, **shape: Any) -> Config:
    """A run of samples of 125 tokens in the mean, of a model of that shape and of 1,100 parameters."""
    (model / "config.json").write_text(json.dumps(SIZED | shape))
    lengths = ("data.max_prompt_tokens=100", "sampling.max_tokens=400", "rollout.sequences=512")
    return config(f"model.path={model}", "rollout.device=cuda", *lengths, *words)


def kept(config: Config, gpu_bytes: int | None = None) -> str:
    (line,) = [line for line in explain(config, gpu_bytes=gpu_bytes) if line.startswith("KV cache of a server: ")]
    return line.removeprefix("KV cache of a server: ")


GIVEN = "rollout.engine.kv_cache_memory_bytes=1000000000"


def test_the_kv_cache_limits_what_runs(model: Path) -> None:
    """1 GB / (28,672 x 133) = 262 sequences: half a block is left of each."""
    run = sized(model, GIVEN, "batch.groups=512", "batch.max_staleness=8")
    assert kept(run) == "262 sequences of 125 tokens, by rollout.engine.kv_cache_memory_bytes 1000000000"
    text = "\n".join(explain(run))
    assert "of 262 sequences run at a time, limited by the KV cache" in text and "note: the bound on age" not in text
    roomy = sized(model, GIVEN.replace("1000", "9000"), "batch.groups=512", "batch.max_staleness=8")
    assert "of 512 sequences run at a time, limited by the places" in "\n".join(explain(roomy))


@pytest.mark.parametrize(
    ("words", "shape", "room"),
    [
        (["rollout.tensor_parallel=2"], {}, 524),
        (["rollout.tensor_parallel=8"], {}, 524),  # there are two heads
        (["model.dtype=float32"], {}, 131),
        (["rollout.engine.kv_cache_dtype=fp8"], {}, 524),
        ([], {"head_dim": 256}, 131),
        ([], {"num_key_value_heads": None}, 43),
    ],
)
def test_what_a_token_takes_of_the_kv_cache(model: Path, words: list[str], shape: dict[str, Any], room: int) -> None:
    assert kept(sized(model, GIVEN, *words, **shape)).startswith(f"{room} sequences")


@pytest.mark.parametrize("shape", [{"layer_types": ["sliding_attention", "full_attention"]}, {"kv_lora_rank": 512}])
def test_a_model_that_keeps_less_of_a_token_is_not_estimated(model: Path, shape: dict[str, Any]) -> None:
    assert kept(sized(model, GIVEN, **shape)).startswith(f"not known, because model.path {model} tells nothing")


def test_without_weights_the_kv_cache_is_not_known(model: Path) -> None:
    run = sized(model, GIVEN)
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert kept(run) == f"not known, because no weights of {model} are here"


def test_facts_of_a_folder_are_read_once_and_again_when_it_changes(model: Path) -> None:
    facts = model_facts(str(model))
    assert model_facts(str(model)) is facts and facts.heads == 6
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 12}))
    assert model_facts(str(model)).heads == 12


def test_the_kv_cache_by_the_gpu_of_this_machine(model: Path) -> None:
    run = sized(model, "rollout.engine.gpu_memory_utilization=0.5")
    said = kept(run, gpu_bytes=2 * 10**9)
    assert said.startswith("262 sequences of 125 tokens, by a GPU as this machine's, 2 GB x 0.5, less 2.2e-06 GB of we")
    unknown = "not known: this machine has no GPU, and the run file no rollout.engine.kv_cache_memory_bytes"
    assert kept(run) == unknown
    assert kept(sized(model, "rollout.device=auto")) == f"{unknown}; on a CPU it is 256 MiB"
    assert kept(sized(model, "rollout.device=cpu")) == "70 sequences of 125 tokens, by 256 MiB on a CPU"


def test_gpus_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_bytes() is None
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 143771\necho 81559\n")
    driver.chmod(0o755)
    assert gpu_bytes() == 81559 << 20


@given(
    groups=st.integers(1, 40),
    samples=st.integers(2, 16),
    sequences=st.integers(1, 600),
    servers=st.integers(1, 8),
    staleness=st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_what_is_expected_keeps_the_bounds(
    groups: int, samples: int, sequences: int, servers: int, staleness: int
) -> None:
    keys = (f"batch.groups={groups}", f"batch.samples={samples}", f"rollout.sequences={sequences}")
    run = config(*keys, f"rollout.servers={servers}", f"batch.max_staleness={staleness}")
    flow = expected(run, staleness)
    assert 0 < flow.running <= 1.001 * servers * sequences and 0 <= flow.age <= staleness and flow.speed > 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batch.max_staleness=0"], "staleness 0 is synchronous"),
        (["algorithm.loss=gspo"], "3e-4 and 4e-4 are usual"),
        (["run.versions=10"], "learner.warmup_versions 10 is not below run.versions 10"),
        (["run.versions=19"], "learner.checkpoint_every 20 is more than run.versions 19"),
        (["algorithm.reference_kl=1e-3"], "a frozen copy"),
        (["algorithm.loss=m2po"], "one more forward pass"),
        (["algorithm.turn_discount=0.9", "batch.skip_zero_variance=true"], "set batch.skip_zero_variance: false"),
        (["buffer.address=tcp://10.0.0.1:5600"], "weights.host 127.0.0.1 is loopback"),
        (["buffer.path=null"], "buffer.path null"),
        (["buffer.max_message_mib=1"], "a rank's part of a batch can take 6 MiB"),
    ],
)
def test_notes(overrides: list[str], words: str) -> None:
    assert not any(words in line for line in explain(config()))
    assert sum(line.startswith("note:") and words in line for line in explain(config(*overrides))) == 1
    check(config(*overrides), files=())  # a note does not refuse


def test_few_problems_are_noted_and_gpus_left_to_the_cpu_are_not_counted() -> None:
    text = "\n".join(explain(config("learner.device=cpu", "rollout.servers=2"), problems=20))
    assert "note: 20 problems are fewer than batch.groups 32" in text
    assert "GPUs: 2; learner 1 rank + 2 servers, learner on cpu, servers on auto" in text


def test_facts_of_a_model(model: Path) -> None:
    assert model_facts(str(model)) == ModelFacts(1100, 6, 512)
    assert model_facts("Qwen/Qwen2.5-1.5B") == ModelFacts()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 9, "rope_scaling": {"factor": 4}}))
    assert model_facts(str(model)).positions == 36
    (model / "model-1.safetensors").write_bytes(b"\xff" * 9)
    assert model_facts(str(model)) == ModelFacts()


def test_the_command_line_judges(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"problem": "1", "answer": "1"}\n\n{"problem": "2", "answer": "2"}\n')
    argv = [f"--model.path={model}/nowhere", "--data.train=d.jsonl", "--reward.function=exact_match"]
    assert main([*argv, "--data.epochs=1"]) == 2
    shown = capfd.readouterr()
    assert "2 problems make 0.1 batches" in shown.out
    assert "valid" not in shown.out
    keys = [line.partition(": ")[0] for line in shown.err.splitlines()]
    assert keys == ["data.epochs", "model.path"]


def test_rows_of_a_data_file_are_counted(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"problem": ["a", "b", "c"]}), tmp_path / "d.parquet")
    assert count_rows(tmp_path / "d.parquet") == 3
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    assert count_rows(tmp_path / "d.parquet") is None
    assert count_rows(tmp_path / "absent.parquet") is None


@pytest.mark.parametrize(
    ("parameters", "gpu_gib", "lora", "refused"),
    [(17, 80, False, False), (31, 80, False, True), (31, 140, False, False), (31, 80, True, False)],
)
def test_a_model_whose_copies_fill_rank_0_is_refused(
    tmp_path: Path, parameters: int, gpu_gib: int, lora: bool, refused: bool
) -> None:
    """Rank 0 holds two copies of billions of bfloat16 parameters for the servers."""
    shape = [parameters * 10**6, 1000]
    header = json.dumps({"model.layers.0.q_proj.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    run = config(f"model.path={tmp_path}", *(["model.lora={rank: 8}"] if lora else []))
    lines = list(unpublishable(run, gpu_gib << 30))
    assert bool(lines) is refused and not list(unpublishable(run, None))
    assert not list(unpublishable(config(f"model.path={tmp_path}", "learner.device=cpu"), gpu_gib << 30))
    explained = "\n".join(explain(run, gpu_bytes=gpu_gib << 30))
    assert ("learner rank 0 holds two copies of trained weights for the servers" in explained) is refused
    assert "publishing: learner rank 0 holds " in explained
    if refused:
        assert lines[0].startswith(f"model.path: {tmp_path}: learner rank 0 holds two copies of trained weights for")
        assert lines[0].endswith("train an adapter (model.lora), take a smaller model, or GPUs with more memory")


@pytest.mark.parametrize(
    ("keys", "who", "remedy"),
    [
        (
            ("learner.ranks=2", "weights.publish=rows"),
            "each of 2 learner ranks holds two copies of its rows",
            "raise learner.ranks or learner",
        ),
        (("learner.ranks=8", "weights.publish=rows"), "", ""),
        (("learner.ranks=16", "learner.shard=8", "weights.publish=rows"), "", ""),
        (("learner.ranks=8",), "", ""),
        ((), "learner rank 0 holds two copies of tr", "raise learner.ranks, with"),
        (
            ("learner.ranks=8", "weights.publish=gather"),
            "learner rank 0 holds two copies of tr",
            "set weights.publish: r",
        ),
        (("learner.ranks=8", "weights.transport=safetensors"), "learner rank 0 holds two copies of tr", "train an ad"),
        (("learner.ranks=8", "learner.nodes=4", "learner.shard=8"), "learner rank 0 holds two copies", "train an ad"),
        (
            ("learner.ranks=8", "learner.nodes=4", "learner.shard=8", "weights.host=10.0.0.1", "weights.publish=rows"),
            "",
            "",
        ),
    ],
)
def test_ranks_that_publish_their_rows_divide_the_copies(
    tmp_path: Path, keys: tuple[str, ...], who: str, remedy: str
) -> None:
    """70 G parameters: 261 GiB of copies."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [70 * 10**9], "data_offsets": [0, 0]}})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    lines = list(unpublishable(config(f"model.path={tmp_path}", *keys), 80 << 30))
    assert [who in line and f"; {remedy}" in line for line in lines] == [True] * bool(who)


def test_the_first_replicas_ranks_hold_the_copies_or_rank_0_alone() -> None:
    four = ("learner.ranks=4", "learner.shard=2")
    assert [copies_over(config(*four, "weights.publish=rows"), 2, rank) for rank in range(4)] == [2, 2, 0, 0]
    assert [copies_over(config(*four), 2, rank) for rank in range(4)] == [1, 0, 0, 0]
    assert copies_over(config(), 1, 0) == copies_over(config("weights.publish=rows"), 1, 0) == 1


def test_explain_names_the_largest_model_that_can_be_published() -> None:
    def most(*keys: str) -> int:
        return most_parameters(config(*keys), 80 * 10**9)

    assert most() == most("learner.ranks=8", "weights.publish=gather") == 18 * 10**9
    assert most("learner.ranks=8") == most()
    eight = ("learner.ranks=8", "weights.publish=rows")
    assert most(*eight) == 8 * most() and most(*eight, "model.dtype=float32") == 4 * most()


@pytest.mark.parametrize(
    ("megabytes", "keys", "chosen"),
    [
        (16_000, ("learner.ranks=2",), "rows: each of 2 ranks holds its share"),
        (16_000, ("learner.ranks=8", "learner.nodes=2"), "rows: each of 4 ranks"),
        (16_000, ("learner.ranks=2", "rollout.servers=2"), "rows: each of 2 ranks holds its share"),
        (16_000, ("learner.ranks=2", "rollout.tensor_parallel=2"), "rows: each of 2 ranks holds its share"),
        (16_000, (), "gather: one rank has the whole model"),
        (16_000, ("learner.ranks=2", "weights.transport=safetensors"), "gather: weights.transport is safetensors"),
        (1_300, ("learner.ranks=2",), "gather: the copies are small"),
        (1_600, ("learner.ranks=2",), "rows: each of 2"),
        (3_000, ("learner.ranks=8",), "gather: the copies are small"),
    ],
)
def test_auto_publishes_rows_where_that_saves_memory(
    tmp_path: Path, megabytes: int, keys: tuple[str, ...], chosen: str
) -> None:
    """A server's worker needs 700 MiB for each further rank that sends, and rank 0 keeps its share of two copies."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [megabytes * 10**6 // 4], "data_offsets": [0, 0]}})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    given = {"model_type": "qwen3_moe", "num_experts": 8} if megabytes == 1_600 else {"model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(given))
    run = config(f"model.path={tmp_path}", *keys)
    assert choice(run, shards_of(run)).startswith(f"weights.publish: auto takes {chosen}")
    assert publishes_rows(run, shards_of(run)) == chosen.startswith("rows")
    assert not choice(config(f"model.path={tmp_path}", *keys, "weights.publish=gather"), 2)


@pytest.mark.parametrize(
    "given",
    [{"model_type": "gemma3"}, {"model_type": "qwen3_vl", "vision_config": {"depth": 1}, "image_token_id": 7}, {}],
)
def test_auto_gathers_what_the_files_may_hold_in_another_form(tmp_path: Path, given: dict[str, object]) -> None:
    """Rows of these are refused, and whoever wrote nothing must not meet that refusal."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4 * 10**9], "data_offsets": [0, 0]}})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    (tmp_path / "config.json").write_text(json.dumps(given))
    run = config(f"model.path={tmp_path}", "learner.ranks=2")
    assert not publishes_rows(run, 2) and copies_over(run, 2, 1) == 0
    assert choice(run, 2) == "weights.publish: auto takes gather: the model's files may hold weights in another form"
    for path in ("Qwen/Qwen2.5-7B-Instruct", str(tmp_path)):
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        unknown = choice(config(f"model.path={path}", "learner.ranks=2"), 2)
        assert f"auto takes gather: no weights of {path} are here, so its size is not known; set rows for" in unknown


def test_rows_are_refused_where_only_rank_0_can_publish() -> None:
    assert not list(contradictions(config("learner.ranks=2", "weights.publish=rows")))
    assert not list(contradictions(config("learner.ranks=2", "weights.transport=safetensors")))
    (line,) = contradictions(config("learner.ranks=2", "weights.publish=rows", "weights.transport=safetensors"))
    assert line.startswith("weights.publish: rows, but weights.transport is safetensors, which rank 0 writes; change")
    across = ("learner.ranks=4", "learner.nodes=2", "learner.shard=4", "weights.publish=rows")
    (line,) = contradictions(config(*across))
    assert "weights.host 127.0.0.1 is loopback, and a copy of the model lies over ranks of several nodes" in line
    assert not list(contradictions(config(*across, "weights.host=10.0.0.1")))


def test_without_a_gpu_a_model_too_large_for_80_gb_is_noted(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [31 * 10**9], "data_offsets": [0, 0]}})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    text = "\n".join(explain(config(f"model.path={tmp_path}")))
    assert f"note: {tmp_path}: learner rank 0 holds two copies of trained weights for the servers, 115.5 GiB" in text


def test_the_run_file_of_the_readme_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = (part.partition("```")[0] for part in text.split("```yaml\n")[1:])
    (tmp_path / "run.yaml").write_text(block)
    run = load([str(tmp_path / "run.yaml")])
    check(run, files=())
    assert (run.run.versions, run.data.columns) == (200, {"problem": "question"})
