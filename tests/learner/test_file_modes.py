"""The umask sets the mode of all files for users, whichever library wrote them; keys have 0600."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from buffer.keys import make_keys
from configs.schema import LoraConfig, ModelConfig
from configs.variables import apply_umask
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
        assert set(modes(tmp_path / folder).values()) == {0o666 & ~umask}
    assert os.umask(umask) == umask, "reading it changed it"


def test_secrets_are_private(umask: int, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    assert all(not mode & 0o077 for name, mode in modes(tmp_path / "keys").items() if "public" not in name)
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    apply_umask(tmp_path / "folder")  # folders keep theirs
    assert (tmp_path / "folder" / "inner").stat().st_mode & 0o100
