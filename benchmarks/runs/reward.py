"""The reward of runs that measure speed: `reward.function: .../reward.py:compute_score`. Runs in a reward worker."""

from typing import Any


def compute_score(solution_str: str, ground_truth: str, **_: Any) -> float:
    """Share of the answer's words that are different, so that the samples of a group differ."""
    words = solution_str.split()
    return len(set(words)) / max(len(words), 1)
