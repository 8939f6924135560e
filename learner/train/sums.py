"""Sums of a step for its metrics: fetched from the GPU, and added up over the ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.diagnostics import is_max
from learner.model.host_copies import Fetched

TALLY = "moe"
"""Key, among a rank's sums, of the routers' tally: [layers, ...]."""


class FetchedSums:
    """A step's sums, [] each, and the routers' tally on their way from the GPU, which has not computed them yet."""

    def __init__(self, sums: dict[str, Tensor]) -> None:
        tally = sums.pop(TALLY, None)
        self._names, self._values = list(sums), Fetched(torch.stack([value.double() for value in sums.values()]))
        self._tally = None if tally is None else Fetched(tally)

    def wait(self) -> tuple[dict[str, Tensor], Tensor | None]:
        values = dict(zip(self._names, self._values.wait(), strict=True))
        return values, None if self._tally is None else self._tally.wait()


def uncounted(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums of a rank whose row another rank counts."""
    return {name: value if is_max(name) else torch.zeros_like(value) for name, value in sums.items()}


def all_reduce(sums: dict[str, Tensor]) -> dict[str, float]:
    """Sums over all ranks, or the largest. A collective."""
    total: dict[str, float] = {}
    for maximum, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
        names = [key for key in sums if is_max(key) is maximum]
        values = torch.stack([sums[key].double() for key in names])
        dist.all_reduce(values, operation)
        total |= dict(zip(names, values.tolist(), strict=True))
    return total
