"""The benchmark of documents that several ranks share runs, and prints its table, on two ranks without GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.world import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_it_measures_both_ways(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    small = ["--shape", "speck", "--tokens", "64", "--ways", "2-eager,1-eager", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*launcher, "benchmarks.long_documents", *small]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"].split(", ")[2] for row in rows] == ["way 2-eager of 2"] * 5 + ["way 1-eager of 2"] * 5
    assert all(
        row["value"] > 0 for row in rows if row["what"] in ("tokens/s", "seconds a step", "norm of the gradient")
    )
    assert "memory of a GPU, peak" in done.stdout
