"""A real run and what its learner recorded: shared by `async_vs_sync`, `loop` and `vision`.

`start` starts buffer, rollout server and learner and waits for the learner's first version; `figures_of` sums up the
records of some versions. A version's wall time is from the end of the version before it. Server and learner have a GPU
each. On one they share it: memory, weights and probes are then those of a run, its speeds are not.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.runs.processes import FIRST_GPU, Processes, engine_keys, run_file, sequences
from benchmarks.weights.table import progress

Record = dict[str, Any]
FAST = {"compile": True, "activation_checkpointing": "none", "tokens_per_microbatch": 16384, "head_chunk_tokens": 4096}
"""The learner's keys on a GPU (docs/design/learner.md)."""
SHARED_MEMORY = {"gpu_memory_utilization": 0.3}
"""Of a server that leaves its GPU to a learner of 3 billion parameters."""


def trained_run(
    work: Path, name: str, shape: str, mean_length: float, length: int, running: int, groups: int, samples: int,
    engine: dict[str, Any], learner: dict[str, Any], model_keys: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None, fast: bool = True,
) -> Processes:  # fmt: skip
    """Make a run whose learner starts from weights of `models.py`. On a GPU it has the keys of FAST unless `fast` is
    false."""
    progress(f"{name}: weights of {shape}")
    gpus = max(0, torch.cuda.device_count() - FIRST_GPU)
    given = [sys.executable, "-m", "benchmarks.runs.models", shape, str(work / "models"), str(mean_length)]
    model = subprocess.run(given, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    config: dict[str, dict[str, Any]] = {
        "model": {"path": model, **(model_keys or {})},
        "sampling": {"max_tokens": length},
        "batch": {"groups": groups, "samples": samples},
        "rollout": {
            **sequences(running, samples),
            "engine": engine_keys(length, (SHARED_MEMORY if gpus == 1 else {}) | engine, shape=shape),
            "heartbeat_s": 1.0,
        },
        "learner": {**(FAST if gpus and fast else {}), **learner},
        "weights": weights or {},
    }
    file = run_file(work, name, shape, **config)
    return Processes(file, {"rollout": 0, "learner": min(1, gpus - 1)} if gpus else {})


def versions_of(run: Processes) -> int:
    """How many versions the learner has recorded."""
    return len(run.records())


def figures_of(records: Sequence[Record]) -> dict[str, float]:
    """Means over the records of consecutive versions, the first of which only gives the beginning."""
    counted = records[1:]
    seconds = sum(record["time/version_s"] for record in counted)
    spans = {key: sum(record.get(f"time/{key}_s", 0.0) for record in counted) for key in ("wait", "train", "publish")}
    tokens, sampled = (sum(record[key] for record in counted) for key in ("tokens", "tokens_sampled"))
    return {
        "versions": float(len(counted)),
        "seconds": seconds,
        "versions/h": 3600.0 * len(counted) / seconds,
        "sampled tokens/s": sampled / seconds,
        "tokens/s with prompts": tokens / seconds,
        "length": mean(record["length/mean"] for record in counted),
        "learner works": (spans["train"] + spans["publish"]) / seconds,
        "waits s/version": spans["wait"] / len(counted),
        "train s/version": spans["train"] / len(counted),
        "age mean": mean(record["age/mean"] for record in counted),
        "age max": max(record["age/max"] for record in counted),
        "dropped": counted[-1].get("buffer/dropped", 0.0),
        "failed": counted[-1].get("buffer/failed", 0.0),
    }
