"""The reward of the chaos test, for real reward workers: it hangs, ends its process or raises as the problem says."""

import os
import threading
from collections.abc import Sequence


def score(solution_strs: Sequence[str], ground_truths: Sequence[str]) -> list[float]:
    """The number at the end of each answer of a group."""
    kind = ground_truths[0].partition(":")[0]
    if kind == "hang":
        threading.Event().wait()
    if kind == "crash":
        os._exit(3)
    if kind == "wrong":
        raise ValueError("no reward for this one")
    return [float(solution.rpartition("=")[2]) for solution in solution_strs]
