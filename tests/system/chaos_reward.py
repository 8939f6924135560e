"""The reward of the chaos test, loaded by real reward workers: it hangs, dies or raises where a problem says so."""

import os
import threading
from collections.abc import Sequence


def score(solution_strs: Sequence[str], ground_truths: Sequence[str]) -> list[float]:
    """The number that an answer ends with, one for each answer of a group."""
    kind = ground_truths[0].partition(":")[0]
    if kind == "hang":
        threading.Event().wait()
    if kind == "crash":
        os._exit(3)
    if kind == "wrong":
        raise ValueError("no reward for this one")
    return [float(solution.rpartition("=")[2]) for solution in solution_strs]
