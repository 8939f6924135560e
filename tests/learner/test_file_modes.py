"""The umask sets the mode of all exports, whichever library wrote them; a run's other files are the user's own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from actors.process import Event, Process
from actors.supervise.cluster.remote import log_lines
from buffer.keys import make_keys
from buffer.store.sqlite import Store
from configs.load import load, write
from configs.schema import LoraConfig, ModelConfig
from configs.variables import RUN_UMASK, apply_umask, open_private, problems
from learner.record.metrics import Metrics
from learner.saved import adapter_files, export
from learner.weights.buckets import Buckets
from learner.weights.plan import Plan, Spec
from learner.weights.sender.files import _write_buckets


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


def test_exports_follow_the_umask(umask: int, tmp_path: Path) -> None:
    """safetensors creates files with 0600, and copied files once had the mode of the model's files, even read only."""
    (source := tmp_path / "model").mkdir()
    (source / "config.json").write_text('{"model_type": "qwen2", "name": "ä"}', encoding="utf-8")
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer.json").chmod(0o400)
    (source / "config.json").chmod(0o400)
    export.write({"a.weight": torch.zeros(2)}, ModelConfig(path=str(source)), tmp_path / "out")
    found = modes(tmp_path / "out")
    assert set(found) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert set(found.values()) == {0o666 & ~umask}


def test_adapters_and_weights_in_files_follow_the_umask(umask: int, tmp_path: Path) -> None:
    model = ModelConfig(path="m", lora=LoraConfig(rank=2))
    adapter_files.write({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 2)}, model, tmp_path / "one")
    plan = Plan.of([Spec("a", (2,), torch.float32)], 1 << 10)
    _write_buckets(Buckets(plan, torch.device("cpu")), [0], tmp_path / "two")
    for folder in ("one", "two"):
        found = modes(tmp_path / folder)
        assert set(found.values()) == {0o666 & ~umask}
        assert {Path(name).suffix for name in found} <= {".safetensors", ".json"}, "files that hold no code"
    assert os.umask(umask) == umask, "reading it changed it"


def test_secrets_are_private(umask: int, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    assert all(not mode & 0o077 for name, mode in modes(tmp_path / "keys").items() if "public" not in name)
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    apply_umask(tmp_path / "folder")  # folders keep theirs
    assert (tmp_path / "folder" / "inner").stat().st_mode & 0o100


@pytest.mark.parametrize(("mask", "private"), [(None, 0o077), ("027", 0o027), ("777", 0o077)])
def test_a_run_s_files_are_private_and_its_exports_are_not(
    umask: int, mask: str | None, private: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that SQLite and users' code make, too."""
    if mask:
        monkeypatch.setenv(RUN_UMASK, mask)
    run, words = tmp_path / "runs" / "one", ["--model.path=m", "--data.train=d", "--reward.function=countdown"]
    write(load(words), run / "config.yaml")
    with Store(run / "buffer.sqlite") as store:
        store.record_settings({}, [])
        Metrics(run / "metrics.jsonl", clock=lambda: 0.0).log(1, {"lr": 0.1})
        log_lines(Process("a", "rollout", ("x",), run / "logs" / "a.log"), [Event(1, "line", "said")])
        made = {path: path.stat().st_mode & 0o777 for path in run.rglob("*") if path.suffix != ".lock"}
    names = {path.name for path in made}
    assert names >= {"config.yaml", "buffer.sqlite", "buffer.sqlite-wal", "buffer.sqlite-samples", "logs", "a.log"}
    assert {mode for path, mode in made.items() if path.is_file()} == {0o666 & ~private & ~umask}
    assert {mode for path, mode in made.items() if path.is_dir()} == {0o777 & ~private & ~umask}
    assert run.stat().st_mode & 0o777 == (0o711 | 0o777 & ~private) & ~umask, "passed through to exports, not listed"


def test_a_log_is_private_where_the_process_is_not(umask: int, tmp_path: Path) -> None:
    """Whatever umask a keeper has, on a cluster's node that of Ray."""
    with open(tmp_path / "log", "ab", opener=open_private):
        pass
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600 & ~umask


@pytest.mark.parametrize("mask", ["", "77x", "0o77", "99", "-1"])
def test_a_umask_that_is_none_is_refused(mask: str) -> None:
    (line,) = [line for line in problems({RUN_UMASK: mask}) if line.startswith(RUN_UMASK)]
    assert f"{mask!r} is not a umask; write 077 for files that only you read, 027 for the group" in line
