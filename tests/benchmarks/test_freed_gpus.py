"""A benchmark's processes leave the GPUs free for those of the next case."""

import os
import time
from pathlib import Path

import pytest

from benchmarks.runs.processes import FREED_S, Processes, run_file


def test_the_end_of_a_case_waits_until_its_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a killed process is freed some seconds after its parent has ended."""
    (tmp_path / "used").write_text("600\n141000\n90000\n700\n5\n")
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncd {tmp_path}\necho $* >> asked\nhead -n 1 used\nsed -i 1d used\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Processes(run_file(tmp_path, "run", "speck"), {"rollout": 3, "buffer": None}):
        pass
    assert (tmp_path / "used").read_text() == "5\n"
    assert "--id=3\n" in (tmp_path / "asked").read_text()


def test_without_nvidia_smi_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    began = time.monotonic()
    with Processes(run_file(tmp_path, "run", "speck"), {"rollout": 0}):
        pass
    assert time.monotonic() - began < FREED_S
