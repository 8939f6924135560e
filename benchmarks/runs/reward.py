"""The reward of runs that measure speed: `reward.function: .../reward.py:compute_score`. Runs in a reward worker."""

import zlib
from typing import Any


def compute_score(solution_str: str, ground_truth: str, **_: Any) -> float:
    """A number from 0 to 1 by the answer's text, so that the samples of a group differ."""
    return zlib.crc32(solution_str.encode()) % 101 / 100
