"""`python -m learner sft` on an NVIDIA GPU: with images, and with products in FP8, against the same run on the CPU."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.runs.processes import records_in
from configs.load import load
from tests.harness.demonstrated import demonstrations, jsonl, seeing_demonstrations, sft_run
from tests.harness.pictured import seeing_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def losses(folder: Path, name: str, device: str, dtype: str, images: bool, **learner: Any) -> list[float]:
    """The loss of each version of a run."""
    words = sft_run(
        folder, [],
        run={"name": name, "versions": 5},
        model={"dtype": dtype},
        data={"train": str(folder / "rows.jsonl"), **({"max_pixels": 9 * 32**2} if images else {})},
        learner={"device": device, "checkpoint_every": 5, "lr": 1e-3, **learner},
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "learner", *words], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return [one["loss"] for one in records_in(load(words[1:]).run.path / "metrics.jsonl") if "loss" in one]


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_demonstrations_with_images_have_the_losses_of_a_cpu(tmp_path: Path, kind: str) -> None:
    seeing_model(tmp_path / "model", kind, tied=False, layers=2, depth=2)
    jsonl(tmp_path / "rows.jsonl", seeing_demonstrations(tmp_path))
    images = kind != "gemma3"
    exact = losses(tmp_path, "cpu", "cpu", "float32", images)
    assert len(exact) == 5 and exact[-1] < exact[0]
    assert losses(tmp_path, "cuda", "cuda", "float32", images) == pytest.approx(exact, rel=2e-3)
    assert losses(tmp_path, "narrow", "cuda", "bfloat16", images) == pytest.approx(exact, rel=0.03)


def test_products_in_fp8_have_nearly_the_losses_of_a_cpu(tmp_path: Path) -> None:
    """The rows are those of `sft_run`: texts in one turn and in several."""
    jsonl(tmp_path / "rows.jsonl", demonstrations())
    exact = losses(tmp_path, "cpu", "cpu", "float32", images=False)
    fp8 = losses(tmp_path, "fp8", "cuda", "bfloat16", images=False, matmul="fp8")
    narrow = losses(tmp_path, "narrow", "cuda", "bfloat16", images=False)
    assert fp8 != narrow, "the key changes nothing"
    assert narrow == pytest.approx(exact, rel=0.03) and fp8 == pytest.approx(exact, rel=0.1)
