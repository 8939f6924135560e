"""Time limits that a test waits for until they expire, and within which something else of it has to be done."""

import time

QUIET_S = 0.012
"""What the work below takes on a quiet machine."""
MOST = 6.0


def paced(seconds: float) -> float:
    """`seconds` on a quiet machine, and up to MOST times as long on one that is slow or busy with other processes."""
    began = time.perf_counter()
    sum(number * number for number in range(200_000))
    slowness = (time.perf_counter() - began) / QUIET_S
    return round(seconds * min(max(slowness, 1.0), MOST), 1)
