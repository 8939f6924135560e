"""The sender's two copies of the weights: one may be on its way to the servers while the next is filled.

Shared by the learner's thread (`reserve`, `offer`) and the thread that serves (`hold_newest`). `reserve` waits until
one of the two copies is not being read; as one round is served at a time, that is at once unless a broken broadcast
lingers.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from learner.weights.buckets import Buckets
from learner.weights.plan import Plan
from learner.weights.protocol import Probe


@dataclass(eq=False)
class PublishedPolicy:
    """A published version, complete: never changed while anybody holds it."""

    snapshot: Buckets
    version: int = -1
    checksums: list[int] = field(default_factory=list)
    probe: Probe | None = None
    published_at: float = 0.0
    """When its publication began."""
    holders: int = 0


class DoubleBuffer:
    """At most two editions of `plan` on `device`, made when first needed."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._editions: list[PublishedPolicy] = []
        self._newest: PublishedPolicy | None = None
        self._changed = threading.Condition()

    @property
    def newest(self) -> PublishedPolicy | None:
        """The newest complete edition."""
        return self._newest

    def reserve(self, timeout_s: float) -> PublishedPolicy:
        """An edition to fill, out of sight of everybody until offered; preferably not the newest. Raises
        TimeoutError."""
        if len(self._editions) < 2:
            self._editions.append(PublishedPolicy(Buckets(self._plan, self._device)))
            return self._editions[-1]
        with self._changed:
            if not self._changed.wait_for(lambda: self._free() is not None, timeout_s):
                raise TimeoutError(f"both copies of the weights were still being sent after {timeout_s:g} s")
            edition = self._free()
            assert edition is not None
            if edition is self._newest:
                self._newest = None
            return edition

    def offer(self, edition: PublishedPolicy) -> None:
        """`edition` is complete and the newest."""
        with self._changed:
            self._newest = edition

    @contextmanager
    def hold_newest(self) -> Iterator[PublishedPolicy | None]:
        """The newest edition, held; None before the first."""
        with self._changed:
            edition = self._newest
            if edition is not None:
                edition.holders += 1
        try:
            yield edition
        finally:
            if edition is not None:
                self._release(edition)

    @contextmanager
    def hold(self, edition: PublishedPolicy) -> Iterator[PublishedPolicy]:
        """Hold `edition` once more, for a thread that may outlast the first holder."""
        with self._changed:
            edition.holders += 1
        try:
            yield edition
        finally:
            self._release(edition)

    def _release(self, edition: PublishedPolicy) -> None:
        with self._changed:
            edition.holders -= 1
            self._changed.notify_all()

    def _free(self) -> PublishedPolicy | None:
        free = [edition for edition in self._editions if not edition.holders]
        return min(free, key=lambda edition: edition is self._newest, default=None)
