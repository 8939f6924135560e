"""The ledger's state, the steps between the states of an item, and which row each new item gets.

`rules.py` decides which step comes. An epoch is a shuffled pass over all rows, or over several sources by weight.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Protocol

from buffer.ledger import schedule
from buffer.ledger.counts import GIVEN_UP_FAILED, GIVEN_UP_ROWS, LONG_REASON, Rows, Totals, Trend, remember
from buffer.ledger.types import (
    CLOSED,
    NO_SAMPLES,
    OPEN,
    Changes,
    FailureKind,
    FormedBatch,
    ItemState,
    Lengths,
    SampleStats,
    Saved,
    item_values,
    server_name,
)

NOBODY = ""
DRAWS_PER_STEP = schedule.STEP // 256
"""Draws for each step towards the next epoch's order, which is there long before it is needed."""


@dataclass
class ServerRecord:
    """One start of a rollout server."""

    heard: float
    version: int = 0
    leases: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    """Version of each unanswered Ask, by request number."""
    answered: dict[int, None] = field(default_factory=dict)
    done: dict[int, None] = field(default_factory=dict)
    """Leases that ended with an accepted group."""


class Journal:
    def __init__(self) -> None:
        self.changes = Changes()
        self.touched = set[int]()
        self.counters: Mapping[str, int] = {}

    def close(self, item: ItemState) -> None:
        if item.number in self.touched:
            self.touched.remove(item.number)
            self.changes.items[item.number] = item_values(item)

    def closed(self, number: int) -> ItemState | None:
        row = self.changes.items.get(number)
        item = ItemState.of(row) if row else None
        return item if item and item.state in CLOSED else None


@dataclass
class UndonePolicies:
    """Versions above `restored`, up to `reached`, name two policies: one that a rewind undid, and a later one."""

    restored: int = 0
    reached: int = 0

    def note(self, version: int, ceiling: int) -> None:
        if ceiling > version:
            self.restored = min(self.restored, version) if version <= self.reached else version
            self.reached = max(self.reached, ceiling)


class Pool:
    def __init__(self, items: Iterable[ItemState] = ()) -> None:
        items = list(items)
        self.open = Counter(item.version for item in items if item.state in OPEN)
        """By dispatch version."""
        self.stored = [(item.version, item.number) for item in items if item.state == "stored"]
        """A heap of (d, item)."""
        heapq.heapify(self.stored)
        self.stored_by = Counter(version for version, _ in self.stored)
        self._anywhere: list[int] = []
        self._elsewhere: dict[str, deque[tuple[float, int]]] = {}
        """(until when, item) by the server that failed at them; under NOBODY: no server gets them until then."""
        for item in sorted((item for item in items if item.state == "waiting"), key=lambda item: item.elsewhere_until):
            self.wait(item)

    @property
    def num_open(self) -> int:
        return self.open.total()

    @property
    def num_waiting(self) -> int:
        return len(self._anywhere) + sum(map(len, self._elsewhere.values()))

    def num_elsewhere(self, server: str) -> int:
        return len(self._elsewhere.get(server_name(server), ()))

    @property
    def num_held(self) -> int:
        return len(self._elsewhere.get(NOBODY, ()))

    def wait(self, item: ItemState) -> None:
        if item.elsewhere_until:
            held = self._elsewhere.setdefault(NOBODY if item.held_back else server_name(item.server), deque())
            held.append((item.elsewhere_until, item.number))
        else:
            heapq.heappush(self._anywhere, item.number)

    @property
    def next_wait_end(self) -> float | None:
        """When the first waiting item may go to any server."""
        return min((held[0][0] for held in self._elsewhere.values()), default=None)

    def end_waits(self, now: float) -> None:
        for name, held in list(self._elsewhere.items()):
            while held and now >= held[0][0]:
                heapq.heappush(self._anywhere, held.popleft()[1])
            if not held:
                del self._elsewhere[name]

    def next_waiting(self, server: str) -> int | None:
        elsewhere = self._elsewhere.items()
        fronts = {held[0][1]: name for name, held in elsewhere if name not in (NOBODY, server_name(server))}
        first = min([*fronts, *self._anywhere[:1]], default=None)
        if first in fronts:
            self._elsewhere[fronts[first]].popleft()
            if not self._elsewhere[fronts[first]]:
                del self._elsewhere[fronts[first]]
        elif first is not None:
            heapq.heappop(self._anywhere)
        return first

    def remove_open(self, version: int) -> None:
        self.open -= Counter((version,))

    def store(self, version: int, item: int) -> None:
        heapq.heappush(self.stored, (version, item))
        self.stored_by[version] += 1

    def take(self, number: int) -> list[tuple[int, int]]:
        """Take out the stored items with the smallest (d, item)."""
        taken = [heapq.heappop(self.stored) for _ in range(number)]
        by_version = Counter(version for version, _ in taken)
        self.open -= by_version
        self.stored_by -= by_version
        return taken


class LedgerState:
    """Servers and recent failures are not saved."""

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows = rows or Rows()
        self.version = 0
        self.last_trained = -1
        self.oldest = 0
        self.ceiling = 0
        """No policy above this version can exist."""
        self.undone = UndonePolicies()
        self.next_item, self.next_lease = 0, 1
        self.revision = 0
        """Counts what a parked request may wait for."""
        self.items: dict[int, ItemState] = {}
        self.servers: dict[str, ServerRecord] = {}
        self.batches: dict[int, FormedBatch] = {}
        self.pool, self.totals, self.trend, self.journal = Pool(), Totals(), Trend(), Journal()

    @property
    def num_formed(self) -> int:
        return self.totals.groups("age")

    def create(self, row: int, epoch: int) -> ItemState:
        item = self.items[self.next_item] = ItemState(self.next_item, row, epoch)
        self.rows.note_drawn(row, item.number, self.version)
        self.next_item += 1
        return item

    def dispatch(self, item: ItemState, server: str, version: int, now: float, request: int) -> None:
        item.state, item.server, item.version, item.request, item.since = "leased", server, version, request, now
        item.lease, item.attempts = self.next_lease, item.attempts + 1
        self.next_lease += 1
        self.servers[server].leases[item.lease] = item.number
        self.pool.open[version] += 1
        self._touch(item)

    def _touch(self, item: ItemState) -> None:
        self.journal.touched.add(item.number)
        self.rows.moved.add(item.row)

    def redate(self, item: ItemState, version: int) -> None:
        self.pool.remove_open(item.version)
        self.pool.open[version] += 1
        item.version = version
        self._touch(item)

    def count_failure(self, row: int, kind: FailureKind, reason: str, permanent: bool = False) -> bool:
        failure = f"{kind}: {reason.strip()}"
        self.trend.note_failure(row, kind, failure, self.totals.add("failed", NO_SAMPLES, failure))
        return self.rows.note_failure(row, kind, failure.splitlines()[0][:LONG_REASON], permanent)

    def release(self, item: ItemState, reason: str, elsewhere_until: float = 0.0, held_back: bool = False) -> None:
        """Leased -> waiting: until `elsewhere_until` for other servers or, `held_back`, for none."""
        self._unlease(item, reason)
        item.elsewhere_until, item.held_back = elsewhere_until, held_back
        self.pool.wait(item)

    def give_up(self, item: ItemState, reason: str) -> None:
        self._unlease(item, reason)
        self._drop(item, reason)

    def _unlease(self, item: ItemState, reason: str) -> None:
        del self.servers[item.server].leases[item.lease]
        self.pool.remove_open(item.version)
        item.state, item.reason = "waiting", reason
        self._touch(item)
        self.revision += 1

    def take_back(self, items: Sequence[ItemState], reason: str) -> None:
        """Leased or stored -> waiting; it does not count as an attempt."""
        for item in items:
            if item.state == "leased":
                del self.servers[item.server].leases[item.lease]
            else:
                self.totals.add("discarded", item.lengths, reason)
                self.journal.changes.sample_stats.pop(item.number, None)
                self.journal.changes.discarded.add(item.number)
                item.lengths = NO_SAMPLES
            item.state, item.reason, item.attempts = "waiting", reason, item.attempts - 1
            item.elsewhere_until, item.held_back = 0.0, False
            self._touch(item)
        self.pool = Pool(self.items.values())
        self.revision += 1

    def accept(self, item: ItemState, samples: Sequence[SampleStats], unwanted: str | None) -> None:
        """Leased -> stored, or for an `unwanted` group -> dropped."""
        rewards, truncated = [sample.reward for sample in samples], sum([sample.truncated for sample in samples])
        tokens, sampled = sum([sample.tokens for sample in samples]), sum([sample.sampled for sample in samples])
        item.lengths = lengths = Lengths(1, len(samples), tokens, sampled, truncated)
        self.totals.add("generated", lengths)
        if item.attempts > 1:
            self.totals.add("retried", lengths)
        self.trend.note_group(unwanted, is_flat=len({*rewards}) == 1)
        server = self.servers[item.server]
        server.leases.pop(item.lease, None)
        remember(server.done, item.lease, None)
        self.rows.note_group(item.row, rewards)
        self.journal.changes.sample_stats[item.number] = tuple(samples)
        self._touch(item)
        self.revision += 1
        if unwanted is None:
            item.state, item.reason = "stored", ""
            self.pool.store(item.version, item.number)
        else:
            self.pool.remove_open(item.version)
            self._drop(item, unwanted)

    def _drop(self, item: ItemState, reason: str) -> None:
        item.state, item.reason, item.batch = "dropped", reason, self.version
        self.totals.add("dropped", item.lengths, reason)
        self._forget(item)

    def _forget(self, item: ItemState) -> None:
        del self.items[item.number]
        self.rows.moved.add(item.row)
        self.journal.close(item)

    def quarantine(self, item: ItemState, reason: str) -> None:
        """Stored -> quarantined. Only the store keeps it."""
        item.state, item.reason = "quarantined", reason
        item.batch = self.version if item.batch < 0 else item.batch
        self.totals.add("quarantined", item.lengths)
        self.trend.note_quarantine(reason)
        self.journal.changes.quarantined.add(item.number)
        self._touch(item)
        self._forget(item)
        self.pool = Pool(self.items.values())
        self.revision += 1

    def form(self, groups: int) -> None:
        taken = self.pool.take(min(groups, len(self.pool.stored)))
        for version, number in taken:
            item = self.items[number]
            item.state, item.batch = "batched", self.version
            self.totals.add("age", item.lengths, str(self.version - version))
            self._touch(item)
        self.batches[self.version] = _batch(self.version, taken)
        self.journal.changes.batches[self.version] = False
        self.trend.note_batch()
        self.version += 1
        self.revision += 1

    def take_out(self, item: ItemState) -> None:
        left = [(other.version, other.number) for other in self._members(item.batch) if other is not item]
        self.batches[item.batch] = _batch(item.batch, left)
        self._unbatch(item)

    def unform(self, version: int) -> None:
        for later in range(version, self.version):
            for item in self._members(later):
                self._unbatch(item)
                item.batch = -1
                self._touch(item)
            del self.batches[later]
            self.journal.changes.batches.pop(later, None)
        self.version, self.ceiling = version, min(self.ceiling, version)
        self.pool = Pool(self.items.values())
        self.revision += 1

    def _unbatch(self, item: ItemState) -> None:
        self.totals.add("age", item.lengths, str(item.batch - item.version), times=-1)
        item.state = "stored"

    def _members(self, version: int) -> list[ItemState]:
        return [self.items[number] for number in self.batches[version].items]

    def mark(self, last: int) -> None:
        """Count batches up to `last` as trained, and no others."""
        first, end = sorted((self.last_trained + 1, last + 1))
        for version in range(first, end):
            for number in self.batches[version].items:
                self.totals.add("trained", self.items[number].lengths, times=1 if version <= last else -1)
            self.journal.changes.batches[version] = version <= last
        if last > self.last_trained:
            self.trend.quarantined_in_row = 0
        self.last_trained = last
        self.revision += 1

    def rewind(self, version: int) -> None:
        self.undone.note(version, self.ceiling)
        self.mark(version - 1)
        self.ceiling = version

    def start_at(self, version: int) -> None:
        """Only while no batch was ever formed."""
        self.version = self.oldest = self.ceiling = version
        self.last_trained = version - 1

    def prune(self, oldest: int) -> None:
        for version in range(self.oldest, oldest):
            for number in self.batches.pop(version).items:
                self._forget(self.items[number])
        self.oldest = oldest

    def give_up_run(self, why: int) -> None:
        self.trend.given_up = why
        self.revision += 1

    def announce(self) -> None:
        if not self.trend.is_announced:
            self.trend.is_announced = True
            self.revision += 1

    def begin_anew(self) -> None:
        if self.trend.given_up in (GIVEN_UP_FAILED, GIVEN_UP_ROWS):
            self.rows.draw_again()
        self.trend.begin_anew()


def _batch(version: int, taken: Sequence[tuple[int, int]]) -> FormedBatch:
    return FormedBatch(version, tuple(number for _, number in taken), tuple(dispatched for dispatched, _ in taken))


def restore(state: LedgerState, saved: Saved, now: float) -> None:
    """Leases begin anew at `now`."""
    state.trend.examples = dict(saved.failed_rows)
    state.journal.counters = saved.scalars
    state.totals.restore(saved.totals)
    state.rows.restore(saved.rows)
    state.items = {item.number: item for item in saved.items}
    state.pool = Pool(saved.items)
    members: dict[int, list[tuple[int, int]]] = {version: [] for version in range(state.oldest, state.version)}
    for item in saved.items:
        if item.state == "leased":
            item.since = now
            holder = state.servers.setdefault(item.server, ServerRecord(heard=now, version=item.version))
            holder.leases[item.lease] = item.number
            if item.request:
                remember(holder.answered, item.request, None)
        elif item.state == "batched":
            members[item.batch].append((item.version, item.number))
    state.batches = {version: _batch(version, sorted(pairs)) for version, pairs in members.items()}


class Order(Protocol):
    """Draws rows as a function of what is committed: a restart draws the same rows."""

    def draw(self, state: LedgerState) -> int | None:
        """The row of item `state.next_item`; None: no row may be drawn any more."""

    def upcoming(self, state: LedgerState, number: int) -> Sequence[int]:
        """The next `number` rows, as far as they are known."""

    def skip(self, state: LedgerState) -> None:
        """Move `state.next_item` past rows that are left out."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What the store keeps of the draws."""

    def restore(self, scalars: Mapping[str, int]) -> None:
        """Continue with saved `counters`."""

    def counts(self, state: LedgerState) -> dict[str, int]:
        """Numbers of rows for people."""


class EpochOrder:
    """Item s is problem `s % problems` of epoch `s // problems`; rows that are left out have no items."""

    counters: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, problems: int, seed: int, shuffle: bool, epochs: int | None, shares: Sequence[tuple[int, float]]
    ) -> None:
        self._problems, self._seed, self._shuffle, self._shares = problems, seed, shuffle, shares
        self._epochs = math.inf if epochs is None else epochs
        self._epoch: tuple[int, Sequence[int]] = (-1, ())
        self._following: tuple[int, schedule.Drawing] | None = None

    def draw(self, state: LedgerState) -> int | None:
        self.skip(state)
        state.rows.moved.clear()
        epoch, place = divmod(state.next_item, self._problems)
        if epoch >= self._epochs:
            return None
        row = self.rows(epoch)[place]
        if self._following and place % DRAWS_PER_STEP == 0:
            self._following[1].step()
        return None if row in state.rows.left_out else row  # `skip` stays where all rows are left out

    def upcoming(self, state: LedgerState, number: int) -> Sequence[int]:
        epoch, place = divmod(state.next_item, self._problems)
        if epoch >= self._epochs:
            return ()
        rows, out = self.rows(epoch), state.rows.left_out
        if not out:
            return rows[place : place + number]
        return list(islice((rows[at] for at in range(place, self._problems) if rows[at] not in out), number))

    def skip(self, state: LedgerState) -> None:
        while state.rows.left_out and not state.rows.all_left_out:
            epoch, place = divmod(state.next_item, self._problems)
            if epoch >= self._epochs or self.rows(epoch)[place] not in state.rows.left_out:
                return
            state.next_item += 1

    def restore(self, scalars: Mapping[str, int]) -> None:
        """Does nothing: the order follows from the seed."""

    def counts(self, state: LedgerState) -> dict[str, int]:
        return {}

    def rows(self, epoch: int) -> Sequence[int]:
        if self._epoch[0] != epoch:
            begun = self._following and self._following[0] == epoch and self._following[1]
            self._epoch = epoch, (begun or self._drawing(epoch)).rows()
            self._following = None if epoch + 1 >= self._epochs else (epoch + 1, self._drawing(epoch + 1))
        return self._epoch[1]

    def _drawing(self, epoch: int) -> schedule.Drawing:
        drawn = (self._seed, epoch, self._shuffle)
        steps = schedule.mixing(self._shares, *drawn) if self._shares else schedule.ordering(self._problems, *drawn)
        return schedule.Drawing(steps)
