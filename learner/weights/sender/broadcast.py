"""Rank 0's process group with the workers, kept while members stay the same."""

import asyncio
import time

import torch

from learner.weights.buckets import Buckets, DoubleBuffer, PublishedPolicy
from learner.weights.channel import Channel, Rendezvous, backend_of, in_thread
from learner.weights.protocol import RankAssignment
from learner.weights.sender.members import Member


class BroadcastGroup:
    """Rank 0 and the workers of `members`, in order."""

    at_fault = False
    """Whether the learner, and no server, spoilt the round."""

    def __init__(self, host: str, device: torch.device, timeout_s: float) -> None:
        self.members: list[Member] = []
        self.backend = backend_of(device)
        self._device, self._timeout_s = device, timeout_s
        self._rendezvous = Rendezvous(host, timeout_s)
        self._channel: Channel | None = None
        self._epoch = time.time_ns() >> 20  # greater than a dead learner's epochs

    async def prepare(self, policy: PublishedPolicy, copies: DoubleBuffer, members: list[Member]) -> None:
        if self._channel is not None and members == self.members:
            return
        self.give_up()
        self._epoch += 1
        world = 1 + sum(member.workers for member in members)
        host, port = self._rendezvous.host, self._rendezvous.port
        self._channel = Channel(host, port, self._epoch, 0, world, self._device, self._timeout_s)
        self.members = members

    def give_up(self) -> None:
        if self._channel:
            self._channel.abort()
        self._channel, self.members = None, []

    @property
    def formed(self) -> RankAssignment | None:
        """How other learner ranks form groups with the same workers."""
        return self._assignment(0) if self._channel else None

    def source(self, policy: PublishedPolicy, member: Member) -> RankAssignment:
        return self._assignment(1 + sum(other.workers for other in self.members[: self.members.index(member)]))

    def _assignment(self, offset: int) -> RankAssignment:
        assert self._channel is not None
        world, host, port = self._channel.world, self._rendezvous.host, self._rendezvous.port
        return RankAssignment(epoch=self._epoch, offset=offset, world=world, host=host, port=port)

    def send(self, policy: PublishedPolicy, copies: DoubleBuffer, digest: str) -> asyncio.Future[None]:
        channel, first = self._channel, copies.plan.first(digest)
        assert channel is not None

        def run() -> None:
            channel.connect()
            with copies.reading(policy) as weights:
                for _ in channel.broadcast(weights.messages(first)):
                    pass

        return in_thread(run, "weights-broadcast")

    def checksums(self, policy: PublishedPolicy, copies: DoubleBuffer, digest: str) -> asyncio.Future[list[int]]:
        return whole_checksums(policy, copies, digest)


def whole_checksums(policy: PublishedPolicy, copies: DoubleBuffer, digest: str) -> asyncio.Future[list[int]]:
    """Compute a whole copy's checksums in a thread."""

    def compute() -> list[int]:
        with copies.reading(policy) as weights:
            assert isinstance(weights, Buckets)
            return [int(value) for value in weights.checksums(copies.plan.first(digest)).tolist()]

    return in_thread(compute, "weights-checksums")
