"""The learner's side of the group that a round broadcasts over: formed of members, kept while they stay the same.

Run by `rounds.Rounds`. `send` waits in a thread for the members to come and for the buckets to be through;
`give_up` ends that.
"""

import asyncio
import time

import torch

from learner.weights.channel import Channel, Rendezvous, backend_of, in_thread, own_stream
from learner.weights.protocol import Go
from learner.weights.sender.members import Member
from learner.weights.sender.shelf import DoubleBuffer, PublishedPolicy


class BroadcastGroup:
    """Rank 0 and the workers of `members`, in order; nobody at first."""

    def __init__(self, host: str, device: torch.device, timeout_s: float) -> None:
        self.members: list[Member] = []
        self.backend = backend_of(device)
        self._device, self._timeout_s = device, timeout_s
        self._store = Rendezvous(host, timeout_s)
        self._channel: Channel | None = None
        self._epoch = time.time_ns() >> 20  # greater than those of a learner that died before

    def form(self, members: list[Member]) -> None:
        """Be the group of `members`: the present one if it is theirs and whole, else another, under a new epoch."""
        if self._channel is not None and members == self.members:
            return
        self.give_up()
        self._epoch += 1
        world = 1 + sum(member.workers for member in members)
        host, port = self._store.host, self._store.port
        self._channel = Channel(host, port, self._epoch, 0, world, self._device, self._timeout_s)
        self.members = members

    def give_up(self) -> None:
        """Abort it: whatever goes on over it fails, and the next `form` makes another."""
        if self._channel:
            self._channel.abort()
        self._channel, self.members = None, []

    def go(self, member: Member, round: int, session: str, edition: PublishedPolicy) -> Go:
        """What `member` needs to know to come to the group and receive `edition`."""
        assert self._channel is not None
        before = self.members[: self.members.index(member)]
        return Go(
            round=round,
            session=session,
            version=edition.version,
            epoch=self._epoch,
            offset=1 + sum(other.workers for other in before),
            world=self._channel.world,
            backend=self.backend,
            host=self._store.host,
            port=self._store.port,
            timeout_s=self._timeout_s,
            checksums=edition.checksums,
            probe=edition.probe,
        )

    def prepare(self, edition: PublishedPolicy, shelf: DoubleBuffer) -> "asyncio.Future[None]":
        """Nothing is to be done before the members are told to receive."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def send(self, edition: PublishedPolicy, shelf: DoubleBuffer) -> "asyncio.Future[None]":
        """Broadcast the buckets in a thread, which holds `edition` for as long as it reads it."""
        channel = self._channel
        assert channel is not None

        def run() -> None:
            channel.connect()
            with shelf.hold(edition), own_stream(self._device):
                for _ in channel.broadcast(edition.snapshot.buckets):
                    pass

        return in_thread(run, "weights-broadcast")
