"""Which bytes of each bucket a rank of the learner sends (docs/design/weights-wire.md).

FSDP2 shards a tensor over its first dimension: of n ranks each has ceil(rows / n) rows, the last ones fewer or none. So
a rank has one range of bytes of a tensor, and its ranges of a bucket are one message, its share. The ranks' sums add up
to a bucket's checksum because a range has the same offset modulo `buckets.ROW` in share and bucket, no row of a share
has bytes of two ranges, and the padding is zero at both ends.
"""

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from configs.schema import WeightsConfig
from configs.staging import LARGER
from learner.weights.buckets import ROW, Allocation, Buckets
from learner.weights.channel import WorkerChannels
from learner.weights.copying import Pair, copy_in_turn
from learner.weights.plan import Plan, Slot


class RowRange(NamedTuple):
    """`size` bytes of tensor `name`, at `offset` of its share and `target` of the bucket."""

    name: str
    offset: int
    target: int
    size: int


class Share(NamedTuple):
    """What `rank` sends of `bucket` in one message, in whole rows of the checksum."""

    bucket: int
    rank: int
    ranges: tuple[RowRange, ...]
    size: int

    def places(self) -> torch.Tensor:
        rows = torch.zeros(self.size // ROW, dtype=torch.int64)
        for _, offset, target, size in self.ranges:
            first, number = offset // ROW, _rows(target, size)
            rows[first : first + number] = torch.arange(target // ROW, target // ROW + number)
        return rows


def bucket_bytes(config: WeightsConfig, ranks: int) -> int:
    """Bytes of a bucket that `ranks` ranks send."""
    return (config.bucket_mib << 20) * min(ranks, LARGER)


def rows_of(rows: int, ranks: int, rank: int) -> range:
    """The rows of a tensor that FSDP2 gives `rank`."""
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


@lru_cache(4)
def shares_of(plan: Plan) -> tuple[Share, ...]:
    """All shares by bucket and rank. Rank 0 has one of each bucket, other ranks only where they have rows."""
    found, sent = [], [0] * plan.ranks
    slots: list[list[Slot]] = [[] for _ in plan.sizes]
    for slot in plan.slots:
        slots[slot.bucket].append(slot)
    for bucket, within in enumerate(slots):
        drawn: list[list[RowRange]] = [[] for _ in range(plan.ranks)]
        ends = [0] * plan.ranks
        for slot in within:
            for rank, (start, size) in _owners(slot, plan, sent):
                target = slot.offset + start
                drawn[rank].append(RowRange(slot.spec.name, ends[rank] + target % ROW, target, size))
                ends[rank] += _rows(target, size) * ROW
                sent[rank] += size
        for rank, ranges in enumerate(drawn):
            if ranges or rank == 0:
                found.append(Share(bucket, rank, tuple(ranges), max(ends[rank], ROW)))
    return tuple(found)


def _owners(slot: Slot, plan: Plan, sent: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    if slot.spec.name in plan.replicated:
        if slot.size:
            yield sent.index(min(sent)), (0, slot.size)
        return
    rows = slot.spec.shape[0] if slot.spec.shape else 1
    line = slot.size // max(rows, 1)
    for rank in range(plan.ranks):
        own = rows_of(rows, plan.ranks, rank)
        if len(own) and line:
            yield rank, (own.start * line, len(own) * line)


def _rows(target: int, size: int) -> int:
    return -(-(target % ROW + size) // ROW)


class RowPool:
    """The shares that `rank` sends. `beside`: a pool with the same frozen ones."""

    def __init__(self, plan: Plan, rank: int, device: torch.device, beside: "RowPool | None" = None) -> None:
        self.plan, self.rank = plan, rank
        shares = [share for share in shares_of(plan) if share.rank == rank]
        frozen = [share for share in shares if share.bucket < plan.frozen]
        trained = shares[len(frozen) :]
        self._frozen: Allocation | None = beside._frozen if beside else _allocate(frozen, device)
        self._trained: Allocation | None = _allocate(trained, device)
        held = [each.buckets for each in (self._frozen, self._trained) if each]
        self._memory = list(zip(shares, [memory for one in held for memory in one], strict=True))

    @property
    def num_bytes(self) -> int:
        return sum(len(memory) for _, memory in self._memory)

    def messages(self, first: int = 0) -> list[torch.Tensor]:
        return [memory for share, memory in self._memory if share.bucket >= first]

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, torch.Tensor]], without: Collection[str] = ()) -> None:
        """Copy in this rank's rows of all weights but those named `without`. Raises ValueError if they are not the
        plan's."""
        copy_in_turn(self._checked(weights, without))

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]], without: Collection[str]) -> Iterator[Pair]:
        """Yield where each weight's rows go, and the rows."""
        wanted = {slot.spec.name: slot for slot in self.plan.slots if slot.spec.name not in without}
        for name, rows in weights:
            slot = wanted.pop(name, None)
            if slot is None or tuple(rows.shape) != (shape := self._shapes[name]):
                planned = f"the plan has {shape} of {tuple(slot.spec)}" if slot else "the plan has no such tensor"
                raise ValueError(f"weights: rank {self.rank} got {tuple(rows.shape)} of {name}, {planned}")
            if name in self._targets:
                yield self._targets[name], rows
        if wanted:
            raise ValueError(f"weights: {next(iter(wanted))} is missing")

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {slot.spec.name: self._shape(slot) for slot in self.plan.slots}

    @cached_property
    def _targets(self) -> dict[str, torch.Tensor]:
        dtypes = {slot.spec.name: slot.spec.dtype for slot in self.plan.slots}
        return {
            name: memory[offset : offset + size].view(dtypes[name]).view(self._shapes[name])
            for share, memory in self._memory
            for name, offset, _, size in share.ranges
        }

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        if slot.spec.name in self.plan.replicated or not slot.spec.shape:
            return slot.spec.shape
        return len(rows_of(slot.spec.shape[0], self.plan.ranks, self.rank)), *slot.spec.shape[1:]

    def sums(self, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """`Allocation.sums` from bucket `first` on, on the CPU."""
        number, found = len(self.plan.sizes), [share.bucket for share, _ in self._memory if share.bucket >= first]
        held = [each.sums() for each in (*([] if first else [self._frozen]), self._trained) if each]
        rows, columns = (torch.cat([one[at].cpu() for one in held]) if held else None for at in (0, 1))
        words = ROW // 8
        every = torch.zeros(number, dtype=torch.int64), torch.zeros(number, words, dtype=torch.int64)
        if rows is not None and columns is not None:
            every[0][found], every[1][found] = rows, columns
        return every[0][first:], every[1][first:]


def _allocate(shares: list[Share], device: torch.device) -> Allocation | None:
    if not shares:
        return None
    return Allocation([share.size for share in shares], device, [share.places() for share in shares])


def scratch_bytes(plan: Plan) -> int:
    """Bytes of each buffer in which a worker receives shares; 0 where one rank sends."""
    return max(share.size for share in shares_of(plan)) if plan.ranks > 1 else 0


def receive(weights: Buckets, channels: WorkerChannels, first: int) -> Iterator[int]:
    """Fill the buckets from `first` on. Yields as `broadcast_in_turn`."""
    shares = [(number, share) for number, share in enumerate(shares_of(weights.plan)) if share.bucket >= first]
    ends = {share.bucket: index for index, (_, share) in enumerate(shares)}
    messages = [weights.scratch[index % 2][: share.size] for index, (_, share) in enumerate(shares)]
    bucket = -1
    for index in channels.broadcast(messages, 1, [share.rank for _, share in shares]):
        number, share = shares[index]
        if weights.rotating and share.bucket != bucket:  # rows do not overwrite the padding, which the checksum counts
            weights.buckets[share.bucket].zero_()
        bucket = share.bucket
        for into, out_of in _copies(weights, number, share, index % 2):
            torch._foreach_copy_(into, out_of)
        if ends[bucket] == index:
            yield bucket


def _copies(
    weights: Buckets, number: int, share: Share, which: int
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """A GPU copies words of 8 bytes faster than bytes."""
    if (number, which) not in weights.copies:
        bucket, scratch = weights.buckets[share.bucket], weights.scratch[which]
        pairs: tuple[tuple[list[torch.Tensor], list[torch.Tensor]], ...] = ([], []), ([], [])
        for _, offset, target, size in share.ranges:
            in_words = not (target % 8 or size % 8)
            dtype = torch.int64 if in_words else torch.uint8
            for views, memory, at in zip(pairs[in_words], (bucket, scratch), (target, offset), strict=True):
                views.append(memory[at : at + size].view(dtype))
        weights.copies[number, which] = [pair for pair in pairs if pair[0]]
    return weights.copies[number, which]
