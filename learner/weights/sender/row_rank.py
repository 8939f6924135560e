"""A rank other than 0 that sends its own rows.

`publish` waits for rank 0, which chooses the copy, because it knows which version it still offers. A thread reads rank
0's orders and sends the version that each names, or nothing: rows of two versions would pass every checksum.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from configs.schema import WeightsConfig
from learner.weights.buckets import DoubleBuffer, pending
from learner.weights.channel import Channel, ChannelError
from learner.weights.plan import Plan, Spec
from learner.weights.probe import ProbeRow
from learner.weights.prober import ProbedPolicy, Prober
from learner.weights.protocol import TO_RANK_0, TO_RANKS, Bye, GiveUp, RowsBegun, RowsSent, RowSums, SendRows
from learner.weights.rows import RowPool, bucket_bytes
from learner.weights.sender.mailbox import ANSWERS, ORDERS, Mailbox, SendingRanks

log = logging.getLogger(__name__)
CLOSE_S = 30.0
"""Longest wait for rank 0, which brings the last version to servers."""


class ShardedPolicy(ProbedPolicy, Protocol):
    """A policy whose own rows need no communication."""

    def local_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]: ...


def row_copies(
    specs: Sequence[Spec], config: WeightsConfig, device: torch.device, frozen: Collection[str], ranks: SendingRanks
) -> DoubleBuffer:
    """Two copies of a rank's own rows."""
    size = bucket_bytes(config, ranks.number)
    plan = Plan.of(specs, size, frozen, ranks.number, ranks.replicated)
    return DoubleBuffer(plan, device, lambda before: RowPool(plan, ranks.rank, device, before))


class RowRank:
    """Rank `ranks.rank`, which is not 0."""

    def __init__(
        self,
        specs: Sequence[Spec],
        config: WeightsConfig,
        seed: int,
        device: torch.device,
        ranks: SendingRanks,
        probe: ProbeRow | Sequence[int] | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        self._ranks, self._device, self._timeout_s = ranks, device, config.timeout_s
        self.copies = row_copies(specs, config, device, frozen, ranks)
        self._prober, self._known = Prober(specs, config, seed, probe), frozenset[str]()
        self._answers = Mailbox(ranks.store, ANSWERS, TO_RANK_0)
        self._orders = Mailbox(ranks.store, ORDERS, TO_RANKS)
        self._channel: Channel | None = None
        self._summed: set[tuple[int, str]] = set()
        self._failed: Future[None] = Future()
        self._thread = threading.Thread(target=self._guard, args=(self._follow,), name="weights", daemon=True)
        self._thread.start()

    def publish(self, policy: ShardedPolicy, version: int) -> None:
        if self._failed.done():
            self._failed.result()
        # a broken broadcast may wait for two timeouts
        copy = self.copies.take(self._ranks.agree(0), 2 * self._timeout_s)
        copy.version, copy.filled = version, pending()
        self.copies.offer(copy)
        copy.weights.fill(policy.local_weights(self._known), self._known)
        self._known = self.copies.plan.frozen_names
        on_gpu = self._device.type == "cuda"
        copy.filled.set_result(torch.cuda.current_stream().record_event() if on_gpu else None)
        if self._prober.due(version):
            self._prober.ask(policy)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self, drain_s: float = 0.0) -> None:
        self._thread.join(CLOSE_S)

    def _follow(self) -> None:
        for order in self._orders.read():
            if isinstance(order, Bye):
                break
            if isinstance(order, GiveUp) and self._channel and self._channel.epoch <= order.epoch:
                self._leave_group()
            elif isinstance(order, SendRows):
                self._start(order)
        self._leave_group()

    def _start(self, order: SendRows) -> None:
        self._answers.post(RowsBegun(rank=self._ranks.rank, number=order.number))
        group = order.source
        if self._channel is None or self._channel.epoch != group.epoch:
            self._leave_group()
            root = self._ranks.rank
            self._channel = Channel(
                group.host, group.port, group.epoch, 0, group.world, self._device, order.timeout_s, root
            )
        channel = self._channel
        self._run(lambda: self._send(order, channel), "weights-broadcast")
        if (order.version, order.plan) not in self._summed:
            self._summed = {each for each in self._summed if each[0] == order.version} | {(order.version, order.plan)}
            self._run(lambda: self._sum(order), "weights-checksums")

    def _leave_group(self) -> None:
        if self._channel:
            self._channel.abort()
            self._channel = None

    def _send(self, order: SendRows, channel: Channel) -> None:
        reason, refused = "", False
        try:
            channel.connect()
            with self._holding(order) as weights:
                for _ in channel.broadcast(weights.messages(self.copies.plan.first(order.plan))):
                    pass
        except (ChannelError, LookupError) as error:
            reason, refused = f"rank {self._ranks.rank}: {error}", isinstance(error, LookupError)
            log.warning("weights: the rows of version %d were not sent: %s", order.version, error)
        self._answers.post(RowsSent(rank=self._ranks.rank, number=order.number, reason=reason, refused=refused))

    def _sum(self, order: SendRows) -> None:
        try:
            with self._holding(order) as weights:
                rows, columns = weights.sums(self.copies.plan.first(order.plan))
        except LookupError:  # `_send` reports it; the version never comes back
            return
        found = RowSums(
            rank=self._ranks.rank,
            version=order.version,
            plan=order.plan,
            rows=rows.tolist(),
            columns=columns.numpy().tobytes(),
        )
        self._answers.post(found)

    @contextmanager
    def _holding(self, order: SendRows) -> Iterator[RowPool]:
        with (
            self.copies.hold_version(order.version, order.timeout_s) as policy,
            self.copies.reading(policy) as weights,
        ):
            assert isinstance(weights, RowPool)
            yield weights

    def _run(self, work: Callable[[], None], name: str) -> None:
        threading.Thread(target=self._guard, args=(work,), name=name, daemon=True).start()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except dist.DistError:  # rank 0 is gone: the learner ends as a whole
            log.warning("weights: rank 0 is out of reach")
        except BaseException as error:  # outermost boundary
            log.exception("weights: a thread of rank %d ended", self._ranks.rank)
            if not self._failed.done():
                self._failed.set_exception(error)
