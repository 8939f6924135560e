"""A torchvision whose compiled operators do not load, as of a CUDA build beside a CPU build of torch, once mended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.doctor.host import TORCHVISION, probe
from actors.doctor.mend_torchvision import MISSING, fitting, mend

EXTENSION = "import torch\n\n\ndef _has_ops():\n    return False\n"
PACKAGE = """
import torch
from torchvision import extension

@torch.library.register_fake("torchvision::nms")
def meta_nms(dets, scores, iou_threshold):
    raise AssertionError
"""


def imported(folder: Path) -> str:
    """What importing the torchvision in `folder` says on stderr; empty if it works."""
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", TORCHVISION], env=env, capture_output=True, text=True).stderr


@pytest.mark.long
def test_it_imports_once_mended_and_a_second_mend_changes_nothing(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    extension, shared = package / "extension.py", tmp_path / "shared.py"
    extension.write_text(EXTENSION)
    shared.hardlink_to(extension)  # as package managers keep one file for many environments
    assert MISSING in imported(tmp_path)
    mend(extension)
    assert imported(tmp_path) == ""
    once = extension.read_text()
    mend(extension)
    assert extension.read_text() == once
    assert shared.read_text() == EXTENSION


@pytest.mark.parametrize(
    ("torch", "torchvision"), [("2.13.0+cpu", "0.28.0"), ("2.11.0", "0.26.0"), ("2.9.1+cu130", "0.24.1")]
)
def test_the_version_beside_a_torch(torch: str, torchvision: str) -> None:
    assert fitting(torch) == torchvision


@pytest.mark.long  # the fast lane starts a vision-language model in vLLM, which imports both
def test_the_one_installed_here_imports_with_the_models_that_need_it() -> None:
    assert probe(TORCHVISION).error == ""
    assert probe("from vllm.model_executor.models import qwen2_5_vl, qwen3_vl; print(0)").error == ""
