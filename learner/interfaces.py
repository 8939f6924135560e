"""What the learner's loop asks of its parts. Each is built in `learner/__main__.py`; tests pass others."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from buffer.wire.protocol import Part
from learner.model.policy import Policy

__all__ = ["Algorithm", "Batches", "Checkpoints", "Metrics", "Policy", "Weights"]


class Algorithm(Protocol):
    """Loss, advantages, optimizer (`learner.step`)."""

    def step(self, policy: Policy, part: Part) -> dict[str, float]:
        """One optimizer step on this rank's part of a batch; the metrics of the whole batch."""
        ...


class Batches(Protocol):
    """The buffer (`buffer.client.LearnerClient`, and `learner.signals.Draining` around it)."""

    def rewind(self, version: int) -> object: ...

    def take(self, version: int) -> Part | None:
        """This rank's part of batch `version`; None: no more are to be trained."""
        ...

    def trained(self, version: int, oldest_kept: int) -> None: ...


class Weights(Protocol):
    """The rollout servers (`learner.weights.sender`)."""

    def publish(self, policy: Policy, version: int) -> None: ...

    def stats(self) -> dict[str, float]: ...


class Checkpoints(Protocol):
    """The disk (`learner.checkpoint`)."""

    def restore(self, policy: Policy) -> int:
        """The version restored, 0 for none."""
        ...

    def save(self, policy: Policy, version: int) -> int:
        """Write a checkpoint if `version` is due one; the oldest version to go back to, 0 for none."""
        ...

    def finish(self, policy: Policy, version: int) -> None:
        """Write the last checkpoint, and wait for all that are being written."""
        ...


class Metrics(Protocol):
    """The record of the run (`learner.metrics`)."""

    def span(self, name: str) -> AbstractContextManager[None]: ...

    def log(self, version: int, stats: Mapping[str, float]) -> None: ...
