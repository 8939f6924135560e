"""What a step asks of texts that are trained beside the samples of a batch, in the same optimizer step
(`learner/sft/beside.py`)."""

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
        """Microbatches of this rank, as many as on every other rank, on its device."""

    @property
    def total(self) -> Tensor:
        """The loss of what this rank has trained so far, added up over tokens: [] float64."""

    @property
    def tokens(self) -> float:
        """Tokens of all ranks."""

    def backward_of(self, policy: Policy, microbatch: Microbatch) -> None:
        """Add one microbatch's gradient."""

    def metrics(self, total: float) -> dict[str, float]:
        """Metrics of the whole batch; `total`: the sum over all ranks."""

    def flops(self, policy: Policy) -> float:
        """FLOPs of all ranks."""


class TrainedBeside(Protocol):
    """Texts of which each version draws some."""

    def draw(self, policy: Policy, version: int) -> DrawnBeside:
        ...
