"""The ledger's state: every item, lease, batch and server, and the elementary steps between the states of an item.

Each step keeps the counts right and notes what it changed, until `drain` hands that to the store. No decision is made
here: `rules.py` owns the state, knows the rules and chooses the next step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from buffer.ledger.pool import Pool
from buffer.ledger.rows import Rows
from buffer.ledger.totals import LONG_REASON, Totals
from buffer.ledger.types import CLOSED, Changes, FailureKind, FormedBatch, ItemState, Lengths, SampleStats, Saved

COUNTERS = (
    *("version", "last_trained", "oldest", "ceiling", "next_item", "next_lease", "failures_in_row", "given_up"),
    *("wanted_servers", "wanted_by_person", "flat_in_row", "restored", "reached", "quarantined_in_row"),
)
GIVEN_UP_FAILED, GIVEN_UP_FLAT, GIVEN_UP_QUARANTINED, GIVEN_UP_ROWS = 1, 2, 3, 4
"""Why a run was given up: all attempts fail; all groups lack variance; none can be trained; all rows are left out."""
EXAMPLES = 3
"""Rows kept whose attempts failed last."""
REMEMBERED = 1024
"""Request and lease numbers kept of each server, so that repeated messages are recognised."""
T = TypeVar("T")


@dataclass
class ServerRecord:
    """One start of a rollout server. Its leases go on while it is heard of."""

    heard: float
    version: int = 0
    leases: dict[int, int] = field(default_factory=dict)
    """Item by lease."""
    asked: dict[int, int] = field(default_factory=dict)
    """By request number not yet answered: the version its Ask gave."""
    answered: dict[int, None] = field(default_factory=dict)
    """Request numbers that got work, latest last."""
    done: dict[int, None] = field(default_factory=dict)
    """Leases that ended with an accepted group, latest last."""

    def record_ask(self, request: int, version: int, now: float) -> None:
        """Note an Ask. One seen before (parked, or repeated) is no news: heartbeats since then know better."""
        if request and self.asked.get(request) == version:
            return
        if request:
            _remember(self.asked, request, version)
        self.version, self.heard = version, now

    def record_answer(self, request: int) -> None:
        """The Ask of this number got work."""
        if request:
            self.asked.pop(request, None)
            _remember(self.answered, request, None)

    def record_delivery(self, lease: int) -> None:
        """The lease ended with an accepted group."""
        self.leases.pop(lease, None)
        _remember(self.done, lease, None)


class LedgerState:
    """The state of a run; everything in it but servers and recent failures comes back with `restore`."""

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows = rows or Rows()
        self.moved: set[int] = set()
        """Rows of items that have changed since whoever draws has last looked; not written down."""
        self.version = 0
        """Next batch to be formed, v'."""
        self.last_trained = -1
        self.oldest = 0
        """Oldest batch not pruned."""
        self.ceiling = 0
        """No policy above this version can exist: since it restored, the learner got no batches for a later one."""
        self.restored = self.reached = 0
        """Versions above `restored`, up to `reached`, name two policies each: one that a rewind undid, and a later
        one. Tokens of both may be in the batches to come."""
        self.next_item, self.next_lease = 0, 1
        self.failures_in_row = 0
        """Attempts that failed since a group was made or the learner was started; those of the infrastructure apart."""
        self.flat_in_row = 0
        """Groups without variance in a row, since a group had variance or the learner was started."""
        self.given_up = 0
        """0, or why the run was given up: GIVEN_UP_FAILED for `failures_in_row`, GIVEN_UP_FLAT for `flat_in_row`,
        GIVEN_UP_QUARANTINED for `quarantined_in_row`, GIVEN_UP_ROWS."""
        self.quarantined_in_row = 0
        """Groups put into quarantine since a batch was trained or the learner was started."""
        self.last_quarantined = ""
        """Why the last one was; not written down."""
        self.wanted_servers = self.wanted_by_person = 0
        """Rollout servers that are wanted, 0 before anybody said so; 1 while the number is a person's."""
        self.told = False
        """Whether the learner was told so."""
        self.revision = 0
        """Counts the changes that a parked request may wait for."""
        self.items: dict[int, ItemState] = {}
        """Items by number: all but those not yet dispatched, those dropped and those pruned."""
        self.servers: dict[str, ServerRecord] = {}
        self.batches: dict[int, FormedBatch] = {}
        self.pool = Pool()
        self.totals = Totals()
        self.recent_failures: Counter[str] = Counter()
        """Attempts that failed since the last batch was formed, by `KIND: REASON`."""
        self.recent_groups = Counter[str]()
        """Groups made since the last batch was formed: `varied`, and those left out by their reason (`unwanted` of
        `accept`)."""
        self.flat_groups = self.new_groups = 0
        """Groups made between the last two batches that were formed, and how many had equal rewards; not written
        down."""
        self._flat = self._made = 0
        self.examples: dict[int, str] = {}
        """By row of the data set: `KIND: REASON` of the rows that failed last."""
        self._changes, self._touched = Changes(), set[int]()
        self._written: dict[str, int] = {}  # counters as last drained

    @property
    def num_formed(self) -> int:
        """Groups that ever went into a batch."""
        return self.totals.groups("age")

    def create(self, row: int, epoch: int) -> ItemState:
        """The next item."""
        item = self.items[self.next_item] = ItemState(self.next_item, row, epoch)
        self.rows.note_drawn(row, item.number, self.version)
        self.next_item += 1
        return item

    def dispatch(self, item: ItemState, server: str, version: int, now: float, request: int) -> None:
        """New or waiting -> leased."""
        item.state, item.server, item.version, item.request, item.since = "leased", server, version, request, now
        item.lease, item.attempts = self.next_lease, item.attempts + 1
        self.next_lease += 1
        self.servers[server].leases[item.lease] = item.number
        self.pool.add_open(version)
        self._touch(item)

    def _touch(self, item: ItemState) -> None:
        """The item changed: it is written down, and whoever draws looks at its row again."""
        self._touched.add(item.number)
        self.moved.add(item.row)

    def redate(self, item: ItemState, version: int) -> None:
        """The leased item counts as dispatched under another version."""
        self.pool.remove_open(item.version)
        self.pool.add_open(version)
        item.version = version
        self._touch(item)

    def count_failure(self, row: int, kind: FailureKind, reason: str, permanent: bool = False) -> bool:
        """An attempt at this row failed. Returns whether the row is left out from now on."""
        failure = f"{kind}: {reason.strip()}"
        self.recent_failures[self.totals.add("failed", Lengths(groups=1), failure)] += 1
        if kind != "infrastructure":
            self.failures_in_row += 1
            self.examples.pop(row, None)
            _remember(self.examples, row, failure, EXAMPLES)
        return self.rows.note_failure(row, kind, failure.splitlines()[0][:LONG_REASON], permanent)

    def give_up_run(self, why: int) -> None:
        """Nothing is dispatched and no batch is formed any more, until the learner is started again."""
        self.given_up = why
        self.revision += 1

    def tell(self) -> None:
        """The learner is told that the run was given up."""
        if not self.told:
            self.told = True
            self.revision += 1

    def forgive(self) -> None:
        """The learner was started: reset the counts of failures and of groups without variance. If the run was given
        up because of failures, what failed was mended, and rows that are left out are drawn again."""
        if self.given_up in (GIVEN_UP_FAILED, GIVEN_UP_ROWS):
            self.moved.update(self.rows.forgive())
        self.failures_in_row = self.flat_in_row = self.quarantined_in_row = self.given_up = 0
        self.told = False

    def release(self, item: ItemState, reason: str, elsewhere_until: float = 0.0, held_back: bool = False) -> None:
        """Leased -> waiting, until `elsewhere_until` for other servers or, `held_back`, for none: the attempt failed,
        or it was returned."""
        self._unlease(item, reason)
        item.elsewhere_until, item.held_back = elsewhere_until, held_back
        self.pool.wait(item)

    def give_up(self, item: ItemState, reason: str) -> None:
        """Leased -> dropped: the last attempt failed."""
        self._unlease(item, reason)
        self._drop(item, reason)

    def _unlease(self, item: ItemState, reason: str) -> None:
        del self.servers[item.server].leases[item.lease]
        self.pool.remove_open(item.version)
        item.state, item.reason = "waiting", reason
        self._touch(item)
        self.revision += 1

    def accept(self, item: ItemState, samples: Sequence[SampleStats], unwanted: str | None) -> None:
        """Leased -> stored, or for an `unwanted` group -> dropped with that reason."""
        lengths = Lengths.of(samples)
        _, item.samples, item.tokens, item.sampled, item.truncated = lengths
        self.totals.add("generated", lengths)
        if item.attempts > 1:
            self.totals.add("retried", lengths)
        self.failures_in_row = 0
        self.flat_in_row = 0 if unwanted is None else self.flat_in_row + 1
        self.recent_groups["varied" if unwanted is None else unwanted] += 1
        self.servers[item.server].record_delivery(item.lease)
        rewards = [sample.reward for sample in samples]
        self.rows.note_group(item.row, rewards)
        self._made, self._flat = self._made + 1, self._flat + (len({*rewards}) == 1)
        self._changes.sample_stats[item.number] = tuple(samples)
        self._touch(item)
        self.revision += 1
        if unwanted is None:
            item.state, item.reason = "stored", ""
            self.pool.store(item.version, item.number)
        else:
            self.pool.remove_open(item.version)
            self._drop(item, unwanted)

    def _drop(self, item: ItemState, reason: str) -> None:
        """The item leaves memory; its row in the store stays as the record."""
        item.state, item.reason, item.batch = "dropped", reason, self.version
        self.totals.add("dropped", item.lengths if item.samples else Lengths(groups=1), reason)
        self._forget(item)

    def _forget(self, item: ItemState) -> None:
        del self.items[item.number]
        self.moved.add(item.row)
        if item.number in self._touched:
            self._touched.remove(item.number)
            self._changes.items[item.number] = item.row_values()

    def quarantine(self, item: ItemState, reason: str) -> None:
        """Stored -> quarantined. The item leaves memory; its row and its samples in the store stay."""
        item.state, item.reason = "quarantined", reason
        item.batch = self.version if item.batch < 0 else item.batch
        self.totals.add("quarantined", item.lengths)
        self.quarantined_in_row += 1
        self.last_quarantined = reason
        self._changes.quarantined.add(item.number)
        self._touch(item)
        self._forget(item)
        self.pool = Pool(self.items.values())
        self.revision += 1

    def take_out(self, item: ItemState) -> None:
        """Batched -> stored: the group leaves its batch. The batch keeps its other groups."""
        left = [(other.version, other.number) for other in self._members(item.batch) if other is not item]
        self.batches[item.batch] = _batch(item.batch, left)
        self._unbatch(item)

    def unform(self, version: int) -> None:
        """Batched -> stored: all groups of batch `version` and of later ones; v' is `version` again."""
        for later in range(version, self.version):
            for item in self._members(later):
                self._unbatch(item)
                item.batch = -1
                self._touch(item)
            del self.batches[later]
            self._changes.batches.pop(later, None)
        self.version, self.ceiling = version, min(self.ceiling, version)
        self.pool = Pool(self.items.values())
        self.revision += 1

    def _unbatch(self, item: ItemState) -> None:
        self.totals.add("age", item.lengths, str(item.batch - item.version), times=-1)
        item.state = "stored"

    def _members(self, version: int) -> list[ItemState]:
        return [self.items[number] for number in self.batches[version].items]

    def closed_since_drain(self, number: int) -> ItemState | None:
        """An item that was dropped or put into quarantine and is not in the store yet."""
        row = self._changes.items.get(number)
        item = ItemState(*row) if row and number not in self.items else None  # type: ignore[arg-type]
        return item if item and item.state in CLOSED else None

    def take_back(self, items: Sequence[ItemState], reason: str) -> None:
        """Leased or stored -> waiting, through no fault of the dispatch: it does not count as an attempt."""
        for item in items:
            if item.state == "leased":
                del self.servers[item.server].leases[item.lease]
            else:
                self.totals.add("discarded", item.lengths, reason)
                self._changes.sample_stats.pop(item.number, None)
                self._changes.discarded.add(item.number)
                item.samples = item.tokens = item.sampled = item.truncated = 0
            item.state, item.reason, item.attempts = "waiting", reason, item.attempts - 1
            item.elsewhere_until, item.held_back = 0.0, False
            self._touch(item)
        self.pool = Pool(self.items.values())
        self.revision += 1

    def form(self, groups: int) -> None:
        """Stored -> batched: batch v' takes up to `groups` groups, and v' is the next one."""
        taken = self.pool.take(min(groups, self.pool.num_stored))
        for version, number in taken:
            item = self.items[number]
            item.state, item.batch = "batched", self.version
            self.totals.add("age", item.lengths, str(self.version - version))
            self._touch(item)
        self.batches[self.version] = _batch(self.version, taken)
        self._changes.batches[self.version] = False
        self.recent_failures.clear()
        self.recent_groups.clear()
        self.flat_groups, self.new_groups, self._flat, self._made = self._flat, self._made, 0, 0
        self.version += 1
        self.revision += 1

    def raise_ceiling(self, version: int) -> None:
        """The learner has a batch from which it can make policy `version`."""
        if version > self.ceiling:
            self.ceiling = version
            self.revision += 1

    def mark(self, last: int) -> None:
        """Batches up to `last` count as trained, and none after it."""
        first, end = sorted((self.last_trained + 1, last + 1))
        for version in range(first, end):
            for number in self.batches[version].items:
                self.totals.add("trained", self.items[number].lengths, times=1 if version <= last else -1)
            self._changes.batches[version] = version <= last
        if last > self.last_trained:
            self.quarantined_in_row = 0
        self.last_trained = last
        self.revision += 1

    def rewind(self, version: int) -> None:
        """The learner is at `version` again: mark later batches as untrained and undo what followed from them."""
        if self.ceiling > version:
            self.restored = min(self.restored, version) if version <= self.reached else version
            self.reached = max(self.reached, self.ceiling)
        self.mark(version - 1)
        self.ceiling = version

    def start_at(self, version: int) -> None:
        """Begin with batch `version`; only while no batch was ever formed."""
        self.version = self.oldest = self.ceiling = version
        self.last_trained = version - 1

    def prune(self, oldest: int) -> None:
        """Forget batches before `oldest`."""
        for version in range(self.oldest, oldest):
            for number in self.batches.pop(version).items:
                self._forget(self.items[number])
        self.oldest = oldest

    def drain(self, fixed: Mapping[str, int]) -> Changes:
        """What changed since the last call; `fixed` are counters of the caller."""
        for number in self._touched:
            self._changes.items[number] = self.items[number].row_values()
        changes, self._changes, self._touched = self._changes, Changes(), set()
        counters = {**fixed, **{name: getattr(self, name) for name in COUNTERS}}
        changes.scalars = {name: value for name, value in counters.items() if self._written.get(name) != value}
        changes.totals, self._written, changes.rows = self.totals.drain(), counters, self.rows.drain()
        return changes

    def restore(self, saved: Saved, now: float) -> None:
        """Continue from what was saved; this state must be new. Leases begin anew at `now`."""
        for name in COUNTERS:
            setattr(self, name, saved.scalars.get(name, 0))  # an older file lacks some
        self.examples = dict(saved.failed_rows)
        self._written = dict(saved.scalars)
        self.totals.restore(saved.totals)
        self.rows.restore(saved.rows)
        self.items = {item.number: item for item in saved.items}
        self.pool = Pool(saved.items)
        members: dict[int, list[tuple[int, int]]] = {version: [] for version in range(self.oldest, self.version)}
        for item in saved.items:
            if item.state == "leased":
                item.since = now
                holder = self.servers.setdefault(item.server, ServerRecord(heard=now, version=item.version))
                holder.leases[item.lease] = item.number
                holder.record_answer(item.request)
            elif item.state == "batched":
                members[item.batch].append((item.version, item.number))
        self.batches = {version: _batch(version, sorted(pairs)) for version, pairs in members.items()}


def _batch(version: int, taken: Sequence[tuple[int, int]]) -> FormedBatch:
    return FormedBatch(version, tuple(number for _, number in taken), tuple(dispatched for dispatched, _ in taken))


def _remember(memory: dict[int, T], number: int, what: T, most: int = REMEMBERED) -> None:
    memory[number] = what
    if len(memory) > most:
        del memory[next(iter(memory))]
