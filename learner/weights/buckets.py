"""Copies of a policy's weights in buckets, with their checksums."""

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol

import torch

from learner.weights.channel import own_stream
from learner.weights.copying import Pair, copy_in_turn
from learner.weights.plan import Plan, Slot
from learner.weights.protocol import Probe

WORDS = 4128
"""Words of 8 bytes per row of the checksum; a power of two would crowd columns into few places of a cache."""
ROW = 8 * WORDS
CACHED_ROWS = 16
FACTOR = 0x9E3779B97F4A7C1
HALVES = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D


class Allocation:
    """Buckets of `sizes` bytes in one allocation, uint8, zero at first; each begins at a row of the checksum. `places`:
    the rows of its bucket that each share has."""

    def __init__(
        self, sizes: Iterable[int], device: torch.device, places: Sequence[torch.Tensor] | None = None
    ) -> None:
        rows = [(size, max(1, -(-size // ROW))) for size in sizes]
        begins = [0, *accumulate(count for _, count in rows)]
        self._memory = torch.zeros(begins[-1] * ROW, dtype=torch.uint8, device=device)
        self.buckets = [self._memory[at * ROW : at * ROW + size] for at, (size, _) in zip(begins, rows, strict=False)]
        self._ends = torch.tensor(begins[1:], device=device) - 1
        indices = [torch.arange(count) for _, count in rows] if places is None else places
        self._row_weights = torch.cat([_weights_of(index.to(device)) for index in indices])
        self._column_weights = _column_weights(device)
        self._places = [slice(begin, end) for begin, end in pairwise(begins)]

    def checksums(self) -> torch.Tensor:
        rows, columns = self.sums()
        return rows + _sum_of_columns(columns, self._column_weights)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted sums of rows `[buckets]` and sums of columns `[buckets, WORDS]`, int64; those of shares add up."""
        words = self._memory.view(torch.int64).view(-1, WORDS)
        if words.device.type == "cpu":
            found, columns = zip(*(_sums(words[place]) for place in self._places), strict=True)
            rows = torch.cat(found)
        else:
            rows, columns = words.sum(1), tuple(words[place].sum(0) for place in self._places)
        sums = (rows * self._row_weights).cumsum(0)[self._ends]
        return sums.diff(prepend=sums.new_zeros(1)), torch.stack(columns)


class Buckets:
    """The buckets of `plan`. On a GPU all work is queued. `rotating`: later buckets overwrite the first `turns`.
    `beside`: another copy, which shares its frozen buckets. `scratch`: bytes of two buffers in which shares arrive."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        rotating: bool = False,
        beside: "Buckets | None" = None,
        scratch: int = 0,
        turns: int = 2,
    ) -> None:
        self.plan, self.rotating = plan, rotating
        self._parts: list[Allocation] = []
        self.scratch = [torch.empty(scratch, dtype=torch.uint8, device=device) for _ in range(2 if scratch else 0)]
        self.copies: dict[tuple[int, int], list[tuple[list[torch.Tensor], list[torch.Tensor]]]] = {}
        if rotating:
            few = Allocation([max(plan.sizes)] * min(turns, len(plan.sizes)), device).buckets
            self.buckets = [few[index % turns][:size] for index, size in enumerate(plan.sizes)]
            return
        if plan.frozen:
            self._parts.append(beside._parts[0] if beside else Allocation(plan.sizes[: plan.frozen], device))
        self._parts.append(Allocation(plan.sizes[plan.frozen :], device))
        self.buckets = [bucket for part in self._parts for bucket in part.buckets]

    def views(self, bucket: int | None = None, first: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        for slot in self.plan.slots:
            if slot.bucket >= first and bucket in (None, slot.bucket):
                yield slot.spec.name, self.view(slot)

    def view(self, slot: Slot) -> torch.Tensor:
        flat = self.buckets[slot.bucket][slot.offset : slot.offset + slot.size]
        return flat.view(slot.spec.dtype).view(slot.spec.shape)

    @cached_property
    def _targets(self) -> dict[str, torch.Tensor]:
        return dict(self.views())

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, torch.Tensor]], without: Collection[str] = ()) -> None:
        """Copy in all `weights` but those named `without`, in the plan's order; frozen ones may come between others.
        Raises ValueError if they are not the plan's, but only after consuming all of them: gathering them is
        collective."""
        copy_in_turn(self._checked(weights, without), non_blocking=True)

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]], without: Collection[str]) -> Iterator[Pair]:
        """Yield where each goes, and the weight."""
        problem, frozen = "", self.plan.frozen_names
        wanted = [slot for slot in self.plan.slots if slot.spec.name not in without]
        kinds = [iter([slot for slot in wanted if (slot.spec.name in frozen) == kind]) for kind in (False, True)]
        for name, tensor in weights:
            slot = next(kinds[name in frozen], None)
            got = (name, tuple(tensor.shape), tensor.dtype)
            if slot is None or got != tuple(slot.spec):
                planned = tuple(slot.spec) if slot else "no more tensors"
                problem = problem or f"weights: got {got}, the plan has {planned}"
            else:
                yield self._targets[name], tensor
        missing = next(chain(*kinds), None)
        if not problem and missing is not None:
            problem = f"weights: {missing.spec.name} is missing"
        if problem:
            raise ValueError(problem)

    def messages(self, first: int = 0) -> list[torch.Tensor]:
        return self.buckets[first:]

    def checksums(self, first: int = 0) -> torch.Tensor:
        """`[buckets] int64` from bucket `first` on: 0 or the first trained one."""
        if self.rotating:
            raise ValueError("rotating buckets are never all there at once: checksum them one by one")
        return torch.cat([part.checksums() for part in self._parts[1 if first else 0 :]])


def checksum(bucket: torch.Tensor) -> torch.Tensor:
    """`[bytes] uint8 -> [] int64`: sums of all rows and of all columns of words, each weighted by its index, modulo
    2^64. Exact in any order of summation and on every device; swapped values change it."""
    rows, columns = bucket_sums(bucket, row_weights(len(bucket) // ROW + 1, bucket.device))
    return rows + _sum_of_columns(columns, _column_weights(bucket.device))


def bucket_sums(bucket: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of rows and sums of columns: `[bytes] uint8 -> [], [WORDS] int64`."""
    words = bucket.view(torch.int64)
    whole = len(words) // WORDS * WORDS
    rest = words[whole:]
    rows, columns = _sums(words[:whole].view(-1, WORDS))
    columns[: len(rest)] += rest
    rows = torch.cat([rows, rest.sum(0, keepdim=True)])
    return (rows * weights[: len(rows)]).sum(), columns


def checksums_of(rows: torch.Tensor, columns: torch.Tensor) -> list[int]:
    """Checksums from `bucket_sums`."""
    return [int(value) for value in (rows + _sum_of_columns(columns, _column_weights(columns.device))).tolist()]


def _sums(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """On a CPU the second sum finds its block in the cache."""
    if words.device.type != "cpu" or len(words) <= CACHED_ROWS:
        return words.sum(1), words.sum(0)
    columns, rows = words.new_zeros(WORDS), list[torch.Tensor]()
    for block in words.split(CACHED_ROWS):
        rows.append(block.sum(1))
        columns += block.sum(0)
    return torch.cat(rows), columns


def _sum_of_columns(sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each half by itself: a sign is the highest bit, of which any even multiple is 0 modulo 2^64."""
    return (sums.view(torch.int32) * weights).sum(-1)


def _column_weights(device: torch.device) -> torch.Tensor:
    halves = torch.tensor(HALVES, dtype=torch.int64, device=device)
    return (row_weights(WORDS, device)[:, None] * halves).flatten()


def row_weights(number: int, device: torch.device) -> torch.Tensor:
    """Weights of `number` rows or columns."""
    return _weights_of(torch.arange(number, device=device))


def _weights_of(index: torch.Tensor) -> torch.Tensor:
    """Odd, so that no bit is lost modulo 2^64."""
    return (2 * index + 1) * FACTOR


def add_up(rows: torch.Tensor, columns: torch.Tensor) -> list[int]:
    """Checksums from the ranks' sums."""
    return checksums_of(rows.sum(0), columns.sum(0))


def pending() -> "Future[Any]":
    """A future that a waiter cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class PublishedWeights(Protocol):
    """What one process sends of a version."""

    def fill(self, weights: Iterable[tuple[str, torch.Tensor]], without: Collection[str] = ()) -> None: ...
    def messages(self, first: int = 0) -> list[torch.Tensor]: ...


@dataclass(eq=False)
class PublishedPolicy:
    """One version of the weights, and what servers verify it with. Unchanged while anybody holds it."""

    weights: PublishedWeights
    version: int = -1
    published_at: float = 0.0
    filled: "Future[torch.cuda.Event | None]" = field(default_factory=pending)
    """Done once all weights are copied, or the copying is queued before this event."""
    probe: "Future[Probe] | None" = None
    checksums: "dict[str, asyncio.Future[list[int]]]" = field(default_factory=dict)
    holders: int = 0


class DoubleBuffer:
    """The sender's two copies of the weights, shared by several threads: one is filled while a broadcast may read the
    other. Where several ranks send, rank 0 chooses the copy for all."""

    def __init__(
        self, plan: Plan, device: torch.device, allocate: Callable[[Any], PublishedWeights] | None = None
    ) -> None:
        self.plan, self._device = plan, device
        self._allocate = allocate or (lambda before: Buckets(plan, device, beside=before))
        self._copies: list[PublishedPolicy] = []
        self.newest: PublishedPolicy | None = None
        self._latest = -1
        self._changed = threading.Condition()

    def reserve(self, timeout_s: float) -> PublishedPolicy:
        """A copy to fill, invisible until offered; the newest only if no other is free. Raises TimeoutError."""
        if len(self._copies) < 2:
            return self._further()
        with self._changed:
            if not self._changed.wait_for(lambda: any(not copy.holders for copy in self._copies), timeout_s):
                raise TimeoutError(f"both copies of the weights were still being sent after {timeout_s:g} s")
            idle = [copy for copy in self._copies if not copy.holders]
            return self._free(min(idle, key=lambda copy: copy is self.newest))

    def number_of(self, policy: PublishedPolicy) -> int:
        return self._copies.index(policy)

    def take(self, number: int, timeout_s: float) -> PublishedPolicy:
        """The copy that rank 0 reserved. Raises TimeoutError."""
        if number == len(self._copies):
            return self._further()
        with self._changed:
            chosen = self._copies[number]
            if not self._changed.wait_for(lambda: not chosen.holders, timeout_s):
                raise TimeoutError(f"the rows of version {chosen.version} were still being sent after {timeout_s:g} s")
            return self._free(chosen)

    def _further(self) -> PublishedPolicy:
        first = self._copies[0].weights if self._copies else None
        self._copies.append(PublishedPolicy(self._allocate(first)))
        return self._copies[-1]

    def _free(self, chosen: PublishedPolicy) -> PublishedPolicy:
        chosen.version = -1
        if chosen is self.newest:
            self.newest = None
        return chosen

    def offer(self, policy: PublishedPolicy) -> None:
        with self._changed:
            self.newest = policy
            self._latest = max(self._latest, policy.version)
            self._changed.notify_all()

    @contextmanager
    def hold_version(self, version: int, timeout_s: float) -> Iterator[PublishedPolicy]:
        """Wait for `version`, and keep it within the block. Raises LookupError if it does not come or was overwritten:
        rows of another version would pass every checksum."""
        with self._changed:
            published = self._changed.wait_for(lambda: self._latest >= version, timeout_s)
            held = next((copy for copy in self._copies if copy.version == version), None)
            if held is None or not published:
                have = ", ".join(str(copy.version) for copy in self._copies)
                raise LookupError(f"version {version} is not among those that this rank holds ({have})")
            held.holders += 1
        try:
            yield held
        finally:
            with self._changed:
                held.holders -= 1
                self._changed.notify_all()

    @contextmanager
    def reading(self, policy: PublishedPolicy) -> Iterator[PublishedWeights]:
        """The complete weights, on a stream of this thread's own."""
        with self.hold(policy), own_stream(self._device):
            copied = policy.filled.result()
            if copied is not None:
                copied.wait()  # the stream waits, not this thread
            yield policy.weights

    @contextmanager
    def hold(self, policy: PublishedPolicy | None = None) -> Iterator[PublishedPolicy | None]:
        with self._changed:
            held = policy or self.newest
            if held:
                held.holders += 1
        try:
            yield held
        finally:
            with self._changed:
                if held:
                    held.holders -= 1
                self._changed.notify_all()
