"""Tiny models that see images, made once for all tests here."""

from pathlib import Path

import pytest

from configs.load import load
from configs.schema import Config
from tests.harness.tiny_vlm import tiny_vlm

RUN = Path(__file__).parents[3] / "examples/countdown/quickstart.yaml"


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's. transformers gives Qwen3.5 a tokenizer of its own class, which has no tiny one."""
    path = tmp_path_factory.mktemp(request.param)
    tiny_vlm(path, request.param, layers=1, depth=1)
    return path


@pytest.fixture
def config(folder: Path) -> Config:
    lengths = ["--data.max_prompt_tokens=400", "--data.max_pixels=50176"]
    return load([str(RUN), f"--model.path={folder}", *lengths, "--sampling.stop=[]"])
