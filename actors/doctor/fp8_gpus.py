"""Whether this machine's GPUs multiply in FP8: asks the driver, not CUDA. The learner's ranks ask again."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from actors.doctor.host import Gpu
from configs.checks import cluster_of
from configs.matmul import too_old
from configs.schema import Config


def without_fp8(config: Config, gpus: Sequence[Gpu], capabilities: Mapping[str, tuple[int, int]]) -> list[str]:
    """Refuse GPUs that cannot; nothing is known of a cluster's nodes. `capabilities`: by UUID."""
    if config.learner.matmul != "fp8" or config.learner.device == "cpu" or cluster_of(config):
        return []
    if not gpus:
        return [line for line in [too_old("this machine has none", None)] if line]
    named = ((f"{gpu.name}", capabilities.get(gpu.uuid)) for gpu in gpus)
    found = (too_old(name, capability) for name, capability in named if capability is not None)
    return list(dict.fromkeys(line for line in found if line))


def compute_capabilities() -> dict[str, tuple[int, int]]:
    """By UUID; empty without a driver."""
    if not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", "--query-gpu=uuid,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return parse_capabilities(done.stdout) if done.returncode == 0 else {}


def parse_capabilities(listing: str) -> dict[str, tuple[int, int]]:
    """Example: `parse_capabilities("GPU-a, 9.0") == {"GPU-a": (9, 0)}`"""
    rows = [[word.strip() for word in line.split(",")] for line in listing.splitlines()]
    found = {}
    for row in rows:
        major, point, minor = row[-1].partition(".")
        if point and major.isdigit() and minor.isdigit():
            found[row[0]] = int(major), int(minor)
    return found
