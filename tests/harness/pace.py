"""Time limits that a test lets expire, though other work of it has to fit into them."""

import time

QUIET_S = 0.012
"""Seconds that the work in `paced` takes on a quiet machine."""
MOST = 6.0


def paced(seconds: float) -> float:
    """`seconds` on a quiet machine, and up to MOST times as long on one that is slow or busy with other processes."""
    began = time.perf_counter()
    sum(number * number for number in range(200_000))
    slowness = (time.perf_counter() - began) / QUIET_S
    return round(seconds * min(max(slowness, 1.0), MOST), 1)
