"""The weights wire between a learner with FSDP on two GPUs and real vLLM: two servers, and one of tensor parallelism 2.
Each learner rank sends its own rows, or rank 0 sends what all gather.

With fewer than four GPUs the ends share them (`benchmarks.weights --shared`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
UPDATES = 4
ENGINE = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 8 << 30}


@pytest.mark.parametrize(("case", "servers", "publish"), [("c", 2, "rows"), ("d", 1, "rows"), ("c", 2, "gather")])
def test_layout(case: str, servers: int, publish: str, tmp_path: Path) -> None:
    """Every update reaches every server under load; no request is lost, no token stamped wrong, the probes agree."""
    out = tmp_path / "weights.json"
    options = {"cases": case, "shape": "Qwen2.5-1.5B", "updates": UPDATES, "gap": 2.0, "running": 64, "length": 256,
               "peer": 0, "publish": publish, "tolerance": 0.05, "engine": json.dumps(ENGINE), "timeout": 240,
               "work": tmp_path, "out": out}  # fmt: skip
    argv = [f"--{key}={value}" for key, value in options.items()]
    ended = subprocess.run([sys.executable, "-m", "benchmarks.weights", "--shared", *argv], timeout=280)
    assert ended.returncode == 0
    found = {row["what"]: row["value"] for row in json.loads(out.read_text())["rows"]}
    assert found["updates"] == UPDATES * servers
    assert found["requests lost"] == found["tokens stamped wrong"] == 0
    for weights in ("random weights, mean difference", "marked weights, largest mean difference"):
        assert 0 <= found[f"probe of {weights}"] <= 0.05
