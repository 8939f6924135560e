"""What this machine lets the buffer have: open files and memory."""

import ctypes
import gc
import logging
import os
import resource
from math import inf
from pathlib import Path

import psutil

from configs.flow import capacity
from configs.schema import Config

log = logging.getLogger(__name__)
REMEDY = "start the buffer where `ulimit -Hn` is higher (Docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536)"
CGROUP = Path("/sys/fs/cgroup")
LOW_BYTES = 2**30
TOLD_S = 60.0
COLLECT_S = 1800.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt`."""
KEPT_BELOW, KEPT_BYTES = 32 * 2**20, capacity.CACHE_BYTES
LOOK_S = 5.0


class OpenFiles:
    def __init__(self, limit: float | None = None) -> None:
        self.limit = _soft_limit() if limit is None else limit

    def left(self) -> float:
        """The system hands out the lowest free number."""
        try:
            lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        os.close(lowest)
        return self.limit - lowest

    def refusal(self, name: str) -> str:
        if (left := self.left()) >= capacity.OWN_FILES / 2:
            return ""
        few = f"{name}: the buffer may have {self.limit:g} files open, has {left:g} left and keeps them for its own"
        return f"{few}; {REMEDY}, or take fewer rollout.servers"


def raise_open_files(config: Config) -> None:
    """Take all open files that the system allows, less a reserve of the store."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = hard if hard == resource.RLIM_INFINITY else max(hard - capacity.RESERVED_FILES, hard // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    needed = capacity.open_files(config)
    if needed > _soft_limit():
        who = f"rollout.servers {config.rollout.servers} and learner.ranks {config.learner.ranks} are"
        log.warning("%s %d connections, which take %d open files of %d: some will be refused; %s",
                    who, capacity.connections(config), needed, hard, REMEDY)  # fmt: skip


def memory_left() -> int:
    """Bytes that can still be taken on this machine, or in its container."""
    left = psutil.virtual_memory().available
    try:
        most, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:  # no cgroup of the second version
        return left
    return left if most == "max" else min(left, int(most) - int(used) + int(stat["inactive_file"]))


def keep_memory() -> None:
    """Have glibc keep what is freed: fresh memory takes eight times as long as copying samples into it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BELOW)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def collect_rarely() -> None:
    """Look for cycles among new objects only: a look at a large ledger stops everything for 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 10, 10**9)


class MemoryWatch:
    """Logs what the buffer holds when memory gets short."""

    def __init__(self, now: float) -> None:
        self._told_at = -inf
        self._collected_at = now
        self.due = -inf

    def look(self, held: dict[str, int], now: float) -> None:
        """`held`: bytes. A look costs 0.1 ms."""
        self.due, left = now + LOOK_S, memory_left()
        if now >= self._collected_at + COLLECT_S:
            self._collected_at = now
            gc.collect()
        if left >= LOW_BYTES or now < self._told_at + TOLD_S:
            return
        self._told_at = now
        log.warning("%s", memory_in_words(psutil.Process().memory_info().rss, left, held))


def memory_in_words(taken: int, left: int, held: dict[str, int]) -> str:
    gib = 2**30
    what = ", ".join(f"{name} {size / gib:.2f}" for name, size in held.items())
    short = f"memory gets short: {left / gib:.2f} GiB are left on this machine, the buffer takes {taken / gib:.2f}"
    return f"{short} ({what}); stop what else runs here, or give the buffer a machine of its own"


def _soft_limit() -> float:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return inf if soft == resource.RLIM_INFINITY else soft
