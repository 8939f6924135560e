"""What holds a GPU's memory at its peak, from the history that torch's allocator records."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
FRAMES, GROUPS = 4, 14
"""Frames of Python that name a group of allocations, and how many groups are returned."""
CHANGES = {"alloc": 1, "free_requested": -1}
HIDDEN = ("/autograd/function.py", "/nn/modules/module.py", "/_ops.py", "/utils/_contextlib.py", "/_tensor.py")


def holders(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Largest groups of allocations that are alive at the peak and were made since the history began.

    `events`: of one GPU, with `action`, `addr`, `size` and `frames`. A group has one size and place in the code.
    """
    groups: dict[tuple[int, str], int] = defaultdict(int)
    for event in at_peak(events):
        groups[event["size"], place(event.get("frames", ()))] += 1
    largest = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:GROUPS]
    return [f"{size * number / GIB:.3f} GiB = {number} x {size:,}: {where}" for (size, where), number in largest]


def at_peak(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Allocations that are alive when their sum is largest."""
    total = most = end = 0
    for number, event in enumerate(events):
        total += event["size"] * CHANGES.get(event["action"], 0)
        if total > most:
            most, end = total, number + 1
    alive: dict[int, Mapping[str, Any]] = {}
    for event in events[:end]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    return [*alive.values()]


def place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frames that name the code, innermost first."""
    named = [frame for frame in frames if not str(frame["filename"]).endswith(HIDDEN)]
    return " < ".join(f"{str(f['filename']).rpartition('/')[2]}:{f['line']} {f['name']}" for f in named[:FRAMES])
