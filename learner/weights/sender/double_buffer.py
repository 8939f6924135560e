"""The sender's two copies of the weights: one is filled while the other may still be read by a broadcast.

Shared by the learner's thread (`reserve`, `offer`) and the serving thread (`hold_newest`). `reserve` waits until one of the
two is not being read: rounds are served one at a time, so that is at once unless a broken broadcast lingers.
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
    """A complete version of the weights. Never changed while anybody holds it."""

    weights: Buckets
    version: int = -1
    checksums: list[int] = field(default_factory=list)
    probe: Probe | None = None
    published_at: float = 0.0
    """`time.perf_counter` at the start of its publication."""
    holders: int = 0


class DoubleBuffer:
    """At most two copies of the weights of `plan` on `device`, allocated when first needed."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._copies: list[PublishedPolicy] = []
        self.newest: PublishedPolicy | None = None
        """The newest complete version."""
        self._changed = threading.Condition()

    def reserve(self, timeout_s: float) -> PublishedPolicy:
        """A copy to fill, invisible to others until offered; the newest one only if there is no other. Raises
        TimeoutError."""
        if len(self._copies) < 2:
            self._copies.append(PublishedPolicy(Buckets(self._plan, self._device)))
            return self._copies[-1]
        with self._changed:
            if not self._changed.wait_for(lambda: any(not copy.holders for copy in self._copies), timeout_s):
                raise TimeoutError(f"both copies of the weights were still being sent after {timeout_s:g} s")
            idle = [copy for copy in self._copies if not copy.holders]
            chosen = min(idle, key=lambda copy: copy is self.newest)
            if chosen is self.newest:
                self.newest = None
            return chosen

    def offer(self, policy: PublishedPolicy) -> None:
        """`policy` is complete, and the newest."""
        with self._changed:
            self.newest = policy

    @contextmanager
    def hold_newest(self) -> Iterator[PublishedPolicy | None]:
        """The newest version, held; None before the first."""
        with self._changed:
            policy = self.newest
            if policy is not None:
                policy.holders += 1
        try:
            yield policy
        finally:
            if policy is not None:
                self._release(policy)

    @contextmanager
    def hold(self, policy: PublishedPolicy) -> Iterator[None]:
        """Hold `policy` once more, in a thread that may outlast the first holder."""
        with self._changed:
            policy.holders += 1
        try:
            yield
        finally:
            self._release(policy)

    def _release(self, policy: PublishedPolicy) -> None:
        with self._changed:
            policy.holders -= 1
            self._changed.notify_all()
