"""The ledger's book: every item, lease and batch, and the elementary steps between their states.

Each step keeps the counts right and notes what it changed, until `drain` hands that to the store. The book makes no
decision: `buffer/ledger/rules.py` owns it, knows the rules and says which step is next.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from buffer.ledger.pool import Pool
from buffer.ledger.servers import ServerRecord
from buffer.ledger.totals import Totals
from buffer.ledger.types import Changes, FormedBatch, ItemState, Lengths, SampleStats, Saved

COUNTERS = ("version", "last_trained", "oldest", "ceiling", "next_item", "next_lease")


class LedgerState:
    """The state of a run's items; everything in it comes back with `restore`."""

    def __init__(self) -> None:
        self.version = 0
        """Next batch to be formed, v'."""
        self.last_trained = -1
        self.oldest = 0
        """Oldest batch not pruned."""
        self.ceiling = 0
        """No policy above this version can exist: since it restored, the learner got no batches for a later one."""
        self.next_item, self.next_lease = 0, 1
        self.entries: dict[int, ItemState] = {}
        """Items by number: all but those not yet dispatched and those pruned."""
        self.servers: dict[str, ServerRecord] = {}
        self.batches: dict[int, FormedBatch] = {}
        self.pool = Pool()
        self.audit = Totals()
        self._dropped: deque[tuple[int, int]] = deque()  # (batch collected then, item), oldest first
        self._changes, self._touched = Changes(), set[int]()
        self._written: dict[str, int] = {}  # counters as last drained

    @property
    def num_formed(self) -> int:
        """Groups that ever went into a batch."""
        return self.audit.total("age").groups

    def create(self, row: int, epoch: int) -> ItemState:
        """The next item."""
        entry = self.entries[self.next_item] = ItemState(self.next_item, row, epoch)
        self.next_item += 1
        return entry

    def dispatch(self, entry: ItemState, server: str, version: int, now: float, request: int) -> None:
        """New or waiting -> leased."""
        entry.state, entry.server, entry.version, entry.request, entry.since = "leased", server, version, request, now
        entry.lease, entry.attempts = self.next_lease, entry.attempts + 1
        self.next_lease += 1
        self.servers[server].leases[entry.lease] = entry.item
        self.pool.opens(version)
        self._touched.add(entry.item)

    def redate(self, entry: ItemState, version: int) -> None:
        """Leased under another version than was thought."""
        self.pool.closes(entry.version)
        self.pool.opens(version)
        entry.version = version
        self._touched.add(entry.item)

    def release(self, entry: ItemState, reason: str) -> None:
        """Leased -> waiting: the dispatch failed."""
        self._unlease(entry, reason)
        self.pool.wait(entry.item)

    def give_up(self, entry: ItemState, reason: str) -> None:
        """Leased -> dropped: the last dispatch failed."""
        self._unlease(entry, reason)
        self._drop(entry, reason)

    def _unlease(self, entry: ItemState, reason: str) -> None:
        del self.servers[entry.server].leases[entry.lease]
        self.pool.closes(entry.version)
        entry.state, entry.reason = "waiting", reason
        self._touched.add(entry.item)

    def accept(self, entry: ItemState, samples: Sequence[SampleStats], unwanted: str | None) -> None:
        """Leased -> stored, or for an `unwanted` group -> dropped with that reason."""
        lengths = Lengths.of(samples)
        _, entry.samples, entry.tokens, entry.sampled, entry.truncated = lengths
        self.audit.add("generated", lengths)
        self.servers[entry.server].delivers(entry.lease)
        self._changes.facts[entry.item] = tuple(samples)
        self._touched.add(entry.item)
        if unwanted is None:
            entry.state, entry.reason = "stored", ""
            self.pool.stores(entry.version, entry.item)
        else:
            self.pool.closes(entry.version)
            self._drop(entry, unwanted)

    def _drop(self, entry: ItemState, reason: str) -> None:
        entry.state, entry.reason, entry.batch = "dropped", reason, self.version
        self._dropped.append((self.version, entry.item))
        lengths = entry.lengths if entry.samples else Lengths(groups=1)
        self.audit.add("dropped", lengths, reason)

    def take_back(self, entries: Sequence[ItemState], reason: str) -> None:
        """Leased or stored -> waiting, through no fault of the dispatch: it does not count as an attempt."""
        for entry in entries:
            if entry.state == "leased":
                del self.servers[entry.server].leases[entry.lease]
            else:
                self.audit.add("discarded", entry.lengths, reason)
                self._changes.facts.pop(entry.item, None)
                self._changes.discarded.add(entry.item)
                entry.samples = entry.tokens = entry.sampled = entry.truncated = 0
            entry.state, entry.reason, entry.attempts = "waiting", reason, entry.attempts - 1
            self._touched.add(entry.item)
        self.pool = Pool(self.entries.values())

    def form(self, groups: int) -> None:
        """Stored -> batched: batch v' takes up to `groups` groups, and v' is the next one."""
        taken = self.pool.takes(min(groups, self.pool.num_stored))
        for version, item in taken:
            entry = self.entries[item]
            entry.state, entry.batch = "batched", self.version
            self.audit.add("age", entry.lengths, str(self.version - version))
            self._touched.add(item)
        self.batches[self.version] = _batch(self.version, taken)
        self._changes.batches[self.version] = False
        self.version += 1

    def mark(self, last: int) -> None:
        """Batches up to `last` count as trained, and none after it."""
        first, end = sorted((self.last_trained + 1, last + 1))
        for version in range(first, end):
            for item in self.batches[version].items:
                self.audit.add("trained", self.entries[item].lengths, times=1 if version <= last else -1)
            self._changes.batches[version] = version <= last
        self.last_trained = last

    def start_at(self, version: int) -> None:
        """Begin with batch `version`; only while no batch was ever formed."""
        self.version = self.oldest = self.ceiling = version
        self.last_trained = version - 1

    def prune(self, oldest: int) -> list[int]:
        """Forget batches before `oldest`, and what was dropped before it; returns their items."""
        gone = [item for version in range(self.oldest, oldest) for item in self.batches.pop(version).items]
        while self._dropped and self._dropped[0][0] < oldest:
            gone.append(self._dropped.popleft()[1])
        for item in gone:
            entry = self.entries.pop(item)
            if item in self._touched:
                self._touched.remove(item)
                self._changes.items[item] = entry.row_values()
        self.oldest = oldest
        return gone

    def drain(self, fixed: Mapping[str, int]) -> Changes:
        """What changed since the last call; `fixed` are counters of the caller."""
        for item in self._touched:
            self._changes.items[item] = self.entries[item].row_values()
        changes, self._changes, self._touched = self._changes, Changes(), set()
        counters = {**fixed, **{name: getattr(self, name) for name in COUNTERS}}
        changes.scalars = {name: value for name, value in counters.items() if self._written.get(name) != value}
        changes.totals, self._written = self.audit.drain(), counters
        return changes

    def restore(self, saved: Saved, now: float) -> None:
        """Continue from what was saved; this book must be new. Leases begin anew at `now`."""
        for name in COUNTERS:
            setattr(self, name, saved.scalars[name])
        self._written = dict(saved.scalars)
        self.audit.restore(saved.totals)
        self.entries = {entry.item: entry for entry in saved.entries}
        self.pool = Pool(saved.entries)
        members: dict[int, list[tuple[int, int]]] = {version: [] for version in range(self.oldest, self.version)}
        for entry in saved.entries:
            if entry.state == "leased":
                entry.since = now
                holder = self.servers.setdefault(entry.server, ServerRecord(heard=now, version=entry.version))
                holder.leases[entry.lease] = entry.item
                holder.answers(entry.request)
            elif entry.state == "batched":
                members[entry.batch].append((entry.version, entry.item))
        self.batches = {version: _batch(version, sorted(pairs)) for version, pairs in members.items()}
        self._dropped = deque(sorted((e.batch, e.item) for e in saved.entries if e.state == "dropped"))


def _batch(version: int, taken: Sequence[tuple[int, int]]) -> FormedBatch:
    return FormedBatch(version, tuple(item for _, item in taken), tuple(dispatched for dispatched, _ in taken))
