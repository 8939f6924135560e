"""This machine's processes, from /proc."""

import mmap
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STOP_S = 1.0


def kill_below(root: int, children: dict[int, list[int]]) -> None:
    """Kill `root`, unless it is this process, and all below it. A later process with the same number has another
    parent, or a later descriptor."""
    family = {root, *below(root, children)}
    for pid in family - {os.getpid()}:
        with suppress(OSError):  # it has ended, or is another user's
            held = os.pidfd_open(pid)
            try:
                if state_and_parent(pid)[1] in {os.getpid(), *family}:
                    signal.pidfd_send_signal(held, signal.SIGKILL)
            finally:
                os.close(held)


def children_of_all() -> dict[int, list[int]]:
    """Return each process's children, without zombies."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            state, parent = state_and_parent(int(name))
            if state not in "Z":
                children.setdefault(parent, []).append(int(name))
    return children


def below(root: int, children: dict[int, list[int]]) -> list[int]:
    found = list(children.get(root, []))
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return found


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return state (proc(5)) and parent; "" for an ended process."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        state, parent = stat.read().rpartition(b")")[2].split(None, 2)[:2]
        return state.decode(), int(parent)
    return "", 0


def has_signal(pid: int, number: int) -> bool:
    """Whether a signal still waits for the process, or its main thread handles or blocks it. True if the kernel does
    not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in lines)
    masks = [int(fields.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd", "SigBlk")]
    return "SigBlk" not in fields or any(mask >> (number - 1) & 1 for mask in masks)


@contextmanager
def stopped(root: int) -> Iterator[list[int]]:
    """Stop the processes below `root` for the block, until a look finds no new one. Descriptors hold them, so that a
    later process with the same number is never meant."""
    held: dict[int, int] = {}
    ours: list[int] = []
    until, found = time.monotonic() + STOP_S, below(root, children_of_all())
    try:
        while (fresh := [pid for pid in found if pid not in held]) and time.monotonic() < until:
            for pid in fresh:
                with suppress(ProcessLookupError):
                    held[pid] = os.pidfd_open(pid)
            found = below(root, children_of_all())
            for pid in {*fresh} & {*found} & held.keys():
                if state_and_parent(pid)[0] != "T":
                    with suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(held[pid], signal.SIGSTOP)
                        ours.append(pid)
            found = below(root, children_of_all())
        yield found
    finally:
        for pid in ours:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(held[pid], signal.SIGCONT)
        for descriptor in held.values():
            os.close(descriptor)


def anonymous_bytes(pid: int) -> int:
    """Return the memory that no file backs; 0 for an ended process."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as statm:
        numbers = statm.read().split()
        return (int(numbers[1]) - int(numbers[2])) * mmap.PAGESIZE
    return 0


def proportional_bytes(pid: int) -> int:
    """As `anonymous_bytes`, but a page of n processes counts 1/n."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
        for line in rollup:
            if line.startswith(b"Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return anonymous_bytes(pid)
