"""Texts that a step trains beside a batch (`learner/sft/beside.py`)."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from learner.model.microbatch import Microbatch
from learner.model.policy import Policy

TOTAL = "demonstrations"
"""Among a rank's sums: `DrawnBeside.total`."""


class DrawnBeside(Protocol):
    """The texts of one batch."""

    @property
    def microbatches(self) -> Sequence[Microbatch]:
        """On the CPU; every rank has as many."""

    @property
    def total(self) -> Tensor:
        """Summed loss of this rank's tokens so far: [] float64."""

    @property
    def tokens(self) -> float:
        """Tokens of all ranks."""

    def backward_of(self, policy: Policy, microbatch: Microbatch) -> None: ...

    def metrics(self, total: float) -> dict[str, float]: ...

    def flops(self, policy: Policy) -> float:
        """FLOPs of all ranks."""


class TrainedBeside(Protocol):
    """Texts of which each version draws some."""

    def draw(self, policy: Policy, version: int) -> DrawnBeside: ...
