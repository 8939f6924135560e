"""The arithmetic of a run against numbers worked out by hand, and each contradiction against its line."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.__main__ import main
from configs.explain import check, explain, in_flight, open_groups
from configs.load import ConfigError, load
from configs.model_facts import ModelFacts, model_facts
from configs.schema import Config

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


def refused(*overrides: str, **facts: object) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config(*overrides), **{"files": (), **facts})  # type: ignore[arg-type]
    return list(error.value.problems)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder of 1,100 parameters in two files, 6 heads and 512 positions."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 6, "max_position_embeddings": 512}))
    save_file({"a": np.zeros((10, 100), np.float16)}, folder / "model-1.safetensors")
    save_file({"b": np.zeros(100, np.float32)}, folder / "model-2.safetensors")
    return folder


def test_the_arithmetic_of_a_run(model: Path) -> None:
    run = config(
        *(f"model.path={model}", "run.versions=50", "batch.groups=12", "batch.samples=4", "batch.max_staleness=3"),
        *("data.max_prompt_tokens=100", "sampling.max_tokens=400", "learner.ranks=2", "learner.device=cuda"),
        *("learner.tokens_per_microbatch=1000", "rollout.servers=3", "rollout.tensor_parallel=2"),
        *("rollout.groups_in_flight=6", "rollout.device=cuda", "learner.export_every=20"),
    )
    text = "\n".join(explain(run, problems=100))
    assert "12 groups x 4 samples = 48 samples; at most 24,000 tokens (100 of prompt + 400 of answer each)" in text
    assert "19,200 of them sampled" in text
    assert "100 problems make 8.3 batches an epoch; the run trains 600 groups = 6.00 epochs" in text
    assert "(3 + 1) x 12 = 48 groups may be open at once" in text
    assert "3 x 6 = 18 groups (72 sequences) in flight, 18 of them admitted" in text
    assert "about 1.5 versions while the servers are the slower side, up to 3 when the learner is" in text
    assert "GPUs: learner 2 ranks + 3 servers x tensor parallel 2 = 8" in text
    assert "a rank trains about 24 of a version's samples, packed into forward passes, 12 of 1,000 tokens if" in text
    assert "1.1 k parameters x (3 x 14 + 2 bytes) = 48.4 kB of disk" in text
    assert "note:" not in text


def test_a_microbatch_holds_whole_samples() -> None:
    """256 samples of 2,048 tokens, 3 of which fit: 86 passes, where the tokens alone would make 75."""
    assert any("86 of 7,000 tokens" in line for line in explain(config("learner.tokens_per_microbatch=7000")))


def test_target_staleness_decides_what_may_be_open() -> None:
    run = config("batch.groups=10", "batch.max_staleness=4", "batch.target_staleness=1", "rollout.groups_in_flight=30")
    assert (open_groups(run), in_flight(run)) == (20, 30)
    text = explain(run)
    assert any("about 1.0 versions while the servers are the slower side, up to 1 when" in line for line in text)
    assert any(line.startswith("note: servers have room for 30 groups but only 20 may be open") for line in text)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batch.max_staleness=0"], "staleness 0 is synchronous"),
        (["algorithm.loss=gspo"], "3e-4 and 4e-4 are usual"),
        (["run.versions=10"], "learner.warmup_versions 10 is not below run.versions 10"),
        (["run.versions=19"], "learner.checkpoint_every 20 is more than run.versions 19"),
        (["algorithm.reference_kl=1e-3"], "a frozen copy"),
        (["algorithm.loss=m2po"], "one more forward pass"),
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
            ["learner.tokens_per_microbatch=2047"],
            "learner.tokens_per_microbatch: 2047 is less than data.max_prompt_tokens 1024 + sampling.max_tokens 1024 = "
            "2048, "
            "the longest sample; set it to 2048 or more",
        ),
        (
            ["learner.ranks=9", "batch.groups=4", "batch.samples=2"],
            "learner.ranks: 9 is more than batch.groups 4 x batch.samples 2 = 8 samples, a rank would get nothing; "
            "raise batch.groups or lower learner.ranks",
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
    for aggregation in ("token", "sequence"):
        check(config("algorithm.loss=gspo", f"algorithm.aggregation={aggregation}"), files=())


def test_epochs_must_reach_as_far_as_the_versions() -> None:
    epochs = ["data.epochs=2", "run.versions=100", "batch.groups=10"]
    assert refused(*epochs, problems=499) == [
        "data.epochs: 2 x 499 problems = 998 groups, but run.versions 100 x batch.groups 10 = 1000; "
        "set data.epochs: 3 (or null) or run.versions: 99"
    ]
    check(config(*epochs), files=(), problems=500)
    check(config(*epochs), files=())
    assert refused(problems=0) == ["data.train: d.parquet has no problems; name a file that has"]


@pytest.mark.parametrize(
    ("address", "outside"),
    [
        ("tcp://127.0.0.1:5600", False),
        ("tcp://localhost:5600", False),
        ("tcp://[::1]:5600", False),
        ("tcp://*:5600", True),
        ("tcp://0.0.0.0:5600", True),
        ("tcp://node7:5600", True),
    ],
)
def test_beyond_loopback_keys_are_required(address: str, outside: bool) -> None:
    run = config(f"buffer.address={address}")
    check(run, files=(), has_keys=True)
    if not outside:
        check(run, files=(), has_keys=False)
        return
    with pytest.raises(ConfigError, match="there are no CURVE keys"):
        check(run, files=(), has_keys=False)


def test_facts_of_a_model(model: Path) -> None:
    assert model_facts(str(model)) == ModelFacts(1100, 6, 512)
    assert model_facts("Qwen/Qwen2.5-1.5B") == ModelFacts()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 9, "rope_scaling": {"factor": 4}}))
    assert model_facts(str(model)).positions is None
    (model / "model-1.safetensors").write_bytes(b"\xff" * 9)
    assert model_facts(str(model)) == ModelFacts()


def test_a_model_too_small_for_the_run(model: Path) -> None:
    small = [
        f"model.path={model}",
        "data.max_prompt_tokens=113",
        "sampling.max_tokens=400",
        "rollout.tensor_parallel=4",
    ]
    positions, heads = refused(*small)
    assert positions.startswith(f"model.path: {model} has 512 positions, less than data.max_prompt_tokens 113 +")
    assert heads == f"rollout.tensor_parallel: 4 does not divide the 6 attention heads of {model}; lower it"


def test_missing_files_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "reward.py").write_text("from x import y\n\ndef score(): ...\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "file").write_text("")
    lines = refused(
        *("model.path=empty", "data.eval=empty", "data.format_prompt=none.jinja", "reward.function=reward.py:missing"),
        *("rollout.task=broken.py:task", "run.folder=file"),
        files=(
            "model.path",
            "data.train",
            "data.eval",
            "data.format_prompt",
            "reward.function",
            "rollout.task",
            "run.folder",
        ),
    )
    assert lines[:5] == [
        "model.path: empty: has no config.json; name a folder in Hugging Face format",
        f"data.train: d.parquet: no such file (from {tmp_path}); correct the path",
        f"data.eval: empty: not a file (from {tmp_path}); correct the path",
        f"data.format_prompt: none.jinja: no such file (from {tmp_path}); correct the path",
        "reward.function: reward.py has no function missing; it has score",
    ]
    assert lines[5].startswith("rollout.task: broken.py: not a Python file: ")
    assert lines[6].startswith(f"run.folder: file: {tmp_path / 'file'} cannot be written to")
    assert len(lines) == 7
    assert refused("reward.function=x.py", files=("reward.function",)) == [
        "reward.function: x.py names a file and no function; write x.py:function"
    ]
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


def test_the_command_line_judges(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"problem": "1"}\n\n{"problem": "2"}\n')
    argv = ["--model.path=model", "--data.train=d.jsonl", "--reward.function=countdown"]
    argv += ["--data.max_prompt_tokens=8", "--sampling.max_tokens=8"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "2 problems make 0.1 batches" in shown.out
    assert "\nvalid, fingerprint " in shown.out
    assert main([*argv, "--data.epochs=1"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("data.epochs: 1 x 2 problems = 2 groups")
    assert "valid" not in shown.out


def test_rows_of_a_parquet_file_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"problem": ["a", "b", "c"]}), tmp_path / "d.parquet")
    assert main(["--model.path=m", f"--data.train={tmp_path / 'd.parquet'}", "--reward.function=countdown"]) == 0
    assert "3 problems make" in capsys.readouterr().out
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    main(["--model.path=m", f"--data.train={tmp_path / 'd.parquet'}", "--reward.function=countdown"])
    assert "one problem each" in capsys.readouterr().out
