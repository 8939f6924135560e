"""Figures of an evaluation.

Attempts without a reward have failed: they are neither solved nor unsolved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean, variance

SOLVED = 1.0


@dataclass(frozen=True)
class Attempt:
    """A scored answer. Example: `Attempt(1.0, 212, False)`."""

    reward: float
    length: int
    """Sampled tokens."""
    truncated: bool

    @property
    def solved(self) -> bool:
        return self.reward >= SOLVED


def pass_at(k: int, attempts: int, solved: int) -> float:
    """Probability that one of k attempts, drawn without replacement, is solved: 1 - C(n-c, k) / C(n, k) (Chen et al.
    2021, arXiv 2107.03374, equation 1). Raises ValueError for fewer attempts."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} of {attempts} attempts")
    return 1.0 - comb(attempts - solved, k) / comb(attempts, k)


def pass_hat(k: int, attempts: int, solved: int) -> float:
    """Probability that all of k attempts are solved: C(c, k) / C(n, k) (Yao et al. 2024, arXiv 2406.12045). Raises
    ValueError for fewer attempts."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass^{k} of {attempts} attempts")
    return comb(solved, k) / comb(attempts, k)


def figures(problems: Sequence[Sequence[Attempt]], samples: int, ks: Sequence[int]) -> dict[str, float]:
    """The figures of a set. `problems`: the scored attempts at each, of `samples` that were made.

    `mean@N`: mean share of solved attempts; `error`: its standard error over problems (Miller 2024, arXiv 2411.00640,
    section 2.2). `pass@K`, `pass^K`: means over problems with K scored attempts; `left_out@K`: number of the others.
    """
    scored = [attempts for attempts in problems if attempts]
    every = [attempt for attempts in scored for attempt in attempts]
    found = {"problems": float(len(problems)), "failed": float(samples * len(problems) - len(every))}
    if not every:
        return found
    shares = [fmean(attempt.solved for attempt in attempts) for attempts in scored]
    found["reward"] = fmean(attempt.reward for attempt in every)
    found[f"mean@{samples}"] = fmean(shares)
    if len(shares) > 1:
        found["error"] = sqrt(variance(shares) / len(shares))
    for k in sorted(set(ks)):
        counts = [(len(each), sum(one.solved for one in each)) for each in problems if len(each) >= k]
        if counts:
            found[f"pass@{k}"] = fmean(pass_at(k, *count) for count in counts)
            if k > 1:  # equal for one attempt
                found[f"pass^{k}"] = fmean(pass_hat(k, *count) for count in counts)
        if len(counts) < len(problems):
            found[f"left_out@{k}"] = float(len(problems) - len(counts))
    found["length"] = fmean(attempt.length for attempt in every)
    found["truncated"] = fmean(attempt.truncated for attempt in every)
    return found
