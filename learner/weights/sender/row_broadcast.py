"""Rank 0's side of a round in which each rank sends its own rows: it orders, and sends its rows too. `send` is over
once all ranks have sent, or with the first that could not. A thread reads the other ranks' answers."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import torch

from learner.weights.buckets import WORDS, DoubleBuffer, PublishedPolicy, add_up
from learner.weights.channel import ChannelError, in_thread
from learner.weights.protocol import (
    TO_RANK_0,
    TO_RANKS,
    Bye,
    GiveUp,
    RankAssignment,
    RowsBegun,
    RowsSent,
    RowSums,
    SendRows,
)
from learner.weights.rows import RowPool
from learner.weights.sender.broadcast import BroadcastGroup
from learner.weights.sender.mailbox import ANSWERS, ORDERS, Mailbox, SendingRanks
from learner.weights.sender.members import Member

Sums = tuple[torch.Tensor, torch.Tensor]
CLOSE_S = 5.0


class RowBroadcast:
    """Takes the place of `broadcast.BroadcastGroup`. `group`: rank 0's own with the workers."""

    def __init__(self, group: BroadcastGroup, ranks: SendingRanks, timeout_s: float) -> None:
        self.backend, self._group, self._timeout_s = group.backend, group, timeout_s
        self._others = range(1, ranks.number)
        self._roots = ranks.number
        self._orders, self._answers = (
            Mailbox(ranks.store, ORDERS, TO_RANKS),
            Mailbox(ranks.store, ANSWERS, TO_RANK_0),
        )
        self._number = time.time_ns() >> 20
        self._sent: dict[int, asyncio.Future[None]] = {}
        self._deaf: set[int] = set()
        """Ranks without the present order, or that refused it."""
        self._sums: dict[tuple[int, str, int], asyncio.Future[Sums]] = {}
        self._reader: threading.Thread | None = None

    @property
    def at_fault(self) -> bool:
        return bool(self._deaf)

    @property
    def members(self) -> list[Member]:
        return self._group.members

    async def prepare(self, policy: PublishedPolicy, copies: DoubleBuffer, members: list[Member]) -> None:
        if self._reader is None:
            args = (asyncio.get_running_loop(),)
            self._reader = threading.Thread(target=self._read, args=args, name="weights-answers", daemon=True)
            self._reader.start()
        if members != self.members:
            self.give_up()
        await self._group.prepare(policy, copies, members)

    def give_up(self) -> None:
        group = self._group.formed
        self._group.give_up()
        if group:
            self._orders.post(GiveUp(epoch=group.epoch))
        for sent in self._sent.values():
            if not sent.done():
                sent.set_exception(ChannelError("the groups were given up"))

    def close(self) -> None:
        self._orders.post(Bye())
        self._answers.post(Bye())
        if self._reader:
            self._reader.join(CLOSE_S)

    def source(self, policy: PublishedPolicy, member: Member) -> RankAssignment:
        return self._group.source(policy, member).model_copy(update={"roots": self._roots})

    def send(self, policy: PublishedPolicy, copies: DoubleBuffer, digest: str) -> asyncio.Future[Any]:
        group, self._number = self._group.formed, self._number + 1
        assert group is not None
        loop = asyncio.get_running_loop()
        self._sent, self._deaf = {rank: loop.create_future() for rank in self._others}, set(self._others)
        order = SendRows(
            number=self._number, version=policy.version, plan=digest, timeout_s=self._timeout_s, source=group
        )
        self._orders.post(order)
        return asyncio.gather(self._group.send(policy, copies, digest), *self._sent.values())

    def checksums(self, policy: PublishedPolicy, copies: DoubleBuffer, digest: str) -> asyncio.Future[list[int]]:
        def own() -> Sums:
            with copies.reading(policy) as weights:
                assert isinstance(weights, RowPool)
                return weights.sums(copies.plan.first(digest))

        async def total() -> list[int]:
            for key in [key for key in self._sums if key[0] < policy.version]:
                del self._sums[key]
            others = [self._sums_of((policy.version, digest, rank)) for rank in self._others]
            rows, columns = zip(*await asyncio.gather(in_thread(own, "weights-checksums"), *others), strict=True)
            return add_up(torch.stack(rows), torch.stack(columns))

        return asyncio.ensure_future(total())

    def _sums_of(self, key: tuple[int, str, int]) -> "asyncio.Future[Sums]":
        if key not in self._sums:
            self._sums[key] = asyncio.get_running_loop().create_future()
        return self._sums[key]

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        for answer in self._answers.read():
            if isinstance(answer, Bye):
                return
            try:
                loop.call_soon_threadsafe(self._on_answer, answer)
            except RuntimeError:  # the loop is closed
                return

    def _on_answer(self, answer: object) -> None:
        if isinstance(answer, RowSums):
            columns = torch.from_numpy(np.frombuffer(answer.columns, np.int64).reshape(-1, WORDS).copy())
            found = self._sums_of((answer.version, answer.plan, answer.rank))
            if not found.done():
                found.set_result((torch.tensor(answer.rows, dtype=torch.int64), columns))
        elif isinstance(answer, RowsBegun) and answer.number == self._number:
            self._deaf.discard(answer.rank)
        elif isinstance(answer, RowsSent) and answer.number == self._number:
            self._deaf |= {answer.rank} if answer.refused else set()
            sent = self._sent[answer.rank]
            if not sent.done():
                sent.set_exception(ChannelError(answer.reason)) if answer.reason else sent.set_result(None)
