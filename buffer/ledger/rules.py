"""The ledger: which problem is dispatched, stored, batched, trained or dropped, and what may happen next.

Pure Python: no sockets, no threads, no clock (callers pass `now` in seconds). It knows items by number and never sees
tokens: payloads live in the store. `buffer/wire/handlers.py` drives it and commits what each call changed (`drain`) before it
answers. Decisions are made here; the state they change is in `buffer/ledger/state.py`.
"""

from collections.abc import Iterator, Mapping, Sequence

from buffer.ledger import reasons, schedule
from buffer.ledger.servers import ServerRecord
from buffer.ledger.state import LedgerState
from buffer.ledger.types import OPEN, Changes, FormedBatch, ItemState, Lease, LedgerError, Lengths, SampleStats, Saved

__all__ = ["Changes", "FormedBatch", "Lease", "Ledger", "LedgerError", "Lengths", "SampleStats", "Saved"]

ZERO_VARIANCE = "zero variance"
FIXED = ("problems", "seed", "shuffle")


class Ledger:
    """The rules are in docs/architecture.md, section 4, their properties in tests/buffer/ledger/test_rules.py.

    Item s is problem `order(seed, epoch)[s % problems]` of epoch `s // problems`, and keeps its number for life.
    """

    def __init__(
        self,
        problems: int,
        groups: int,
        max_staleness: int,
        *,
        target_staleness: int | None = None,
        versions: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        attempts: int = 3,
        lease_s: float = 10.0,
        skip_zero_variance: bool = False,
    ) -> None:
        if problems < 1 or groups < 1 or max_staleness < 0 or attempts < 1:
            raise LedgerError(f"{problems=}, {groups=}, {attempts=} must be at least 1 and {max_staleness=} at least 0")
        self.problems, self.groups, self.versions, self.epochs = problems, groups, versions, epochs
        self.max_staleness, self.attempts, self.lease_s = max_staleness, attempts, lease_s
        self.target_staleness = max_staleness if target_staleness is None else min(target_staleness, max_staleness)
        self.seed, self.shuffle, self.skip_zero_variance = seed, shuffle, skip_zero_variance
        self.book = LedgerState()
        self._epoch: tuple[int, Sequence[int]] = (-1, ())  # the epoch last drawn from, and its rows

    # what rollout servers say

    def ask(self, server: str, version: int, room: int, now: float, request: int = 0) -> list[Lease]:
        """Dispatch up to `room` items; empty: nothing may be dispatched yet (park it, and call again with the same
        arguments after other calls). A repeated `request` of the same server gets what it still holds of the leases it
        got before, never more; request 0 is not numbered and always new. Raises nothing; `finished()` tells whether to
        stop asking.

        d is the version last heard from the server, in a new Ask or a heartbeat, but no more than the learner can have
        reached since it last restored. A parked Ask of a server that fell silent gets nothing.
        """
        asker = self.book.servers.setdefault(server, ServerRecord(heard=now))
        if request in asker.answered:
            held = (self.book.entries[item] for item in asker.leases.values())
            return [_leased(entry) for entry in held if entry.request == request]
        asker.hears(request, version, now)
        if now >= asker.heard + self.lease_s:
            return []
        dispatched = min(asker.version, self.book.ceiling)
        work: list[Lease] = []
        for _ in range(min(room, self.room(dispatched))):
            entry = self._next()
            if entry is None:
                break
            self.book.dispatch(entry, server, dispatched, now, request)
            work.append(_leased(entry))
        if work:
            asker.answers(request)
        return work

    def put(self, server: str, item: int, lease: int, samples: Sequence[SampleStats], now: float) -> str | None:
        """Store a finished group; None: accepted (also when repeated), else why not (its lease moved on).

        A server may have gone back to an older policy with the learner, after the dispatch. The group then counts as
        dispatched under the version of its oldest token; one too old for that is dispatched again.
        """
        if not samples:
            raise LedgerError(f"item {item}: a group without samples; report what went wrong with Fail instead")
        entry = self.book.entries.get(item)
        if entry is None:
            return f"item {item} is not known here: it was never dispatched, or was closed and pruned long ago"
        if (entry.server, entry.lease) != (server, lease) or not (entry.state == "leased" or entry.accepted):
            return reasons.moved_on(entry, lease)
        if entry.state == "leased":
            oldest = min((sample.oldest for sample in samples if sample.oldest is not None), default=entry.version)
            if oldest < entry.version and not self._redate(entry, oldest):
                reason = f"sampled under version {oldest}, it could not be trained within {self.max_staleness} versions"
                self._end(entry, reason)
                return reasons.moved_on(entry, lease)
            flat = self.skip_zero_variance and len({sample.reward for sample in samples}) == 1
            self.book.accept(entry, samples, ZERO_VARIANCE if flat else None)
        return None

    def fail(
        self,
        server: str,
        item: int,
        lease: int,
        reason: str,
        now: float,
        permanent: bool = False,
        returned: bool = False,
    ) -> None:
        """End the lease; the item waits to be dispatched again, first in line, or is dropped after `attempts`.

        `returned`: its server gives it back without having failed at it, and the attempt does not count.
        """
        entry = self.book.entries.get(item)
        if entry and entry.state == "leased" and (entry.server, entry.lease) == (server, lease):
            entry.attempts -= returned
            self._end(entry, reason, permanent)

    def heartbeat(self, server: str, version: int, holding: Sequence[int], now: float) -> list[int]:
        """The server lives and runs `version`; its leases go on. Returns the leases it holds in vain.

        A lease older than `lease_s` that it does not hold never reached it, or was forgotten: it ends.
        """
        teller = self.book.servers.setdefault(server, ServerRecord(heard=now))
        teller.version, teller.heard = version, now
        held = set(holding)
        for entry in [self.book.entries[item] for lease, item in teller.leases.items() if lease not in held]:
            if now >= entry.since + self.lease_s:
                self._end(entry, "lost: its server does not know of it")
        return [lease for lease in holding if lease not in teller.leases and lease not in teller.done]

    def leave(self, server: str, reason: str, now: float) -> None:
        """The server is gone (its successor said Hello): end its leases."""
        if server in self.book.servers:
            self._end_all(self.book.servers[server], reason)
            del self.book.servers[server]

    def expire(self, now: float) -> float | None:
        """End the leases of servers not heard of for `lease_s`; returns when to call again, None: no lease is out."""
        holders = [server for server in self.book.servers.values() if server.leases]
        for holder in holders:
            if now >= holder.heard + self.lease_s:
                self._end_all(holder, f"its server was not heard of for {self.lease_s:g} s")
        return min((holder.heard + self.lease_s for holder in holders if holder.leases), default=None)

    # what the learner says

    def take(self, version: int) -> FormedBatch | None:
        """Batch `version`: as it was, if formed before; formed now, if it is the next one and ready; None: not ready
        yet (park it) or, with `finished()`, never. Raises LedgerError for a version beyond the next, or pruned.

        At the end of the problems a last, smaller batch is formed of what is left.
        """
        if version < self.book.oldest:
            raise LedgerError(self._gone(version))
        if version > self.version:
            raise LedgerError(
                f"Take({version}): the next batch is {self.version}; restart the learner to rewind it to its checkpoint"
            )
        if version == self.version:
            if not self.ready():
                return None
            self.book.form(self.groups)
        self.book.ceiling = max(self.book.ceiling, version + 1)
        return self.book.batches[version]

    def trained(self, version: int) -> None:
        """Batch `version` has been trained. Repeats change nothing, nor does the word of a learner that was replaced
        since: after a rewind a batch must be taken again before it can be trained again."""
        if version >= self.version:
            raise LedgerError(f"Trained({version}): the next batch is {self.version}; restart the learner to rewind it")
        if version < self.book.ceiling:
            self.book.mark(max(version, self.last_trained))

    def rewind(self, version: int) -> int:
        """The learner restored `version`: batches from there on count as untrained; returns how many will be served
        again. Raises LedgerError if the ledger does not reach that version or has pruned it.

        A ledger that never formed a batch goes to any version; what it opened too early for that is dispatched again.
        """
        if version != self.version and not self.book.num_formed:
            self.book.start_at(version)
            self._settle()
        if version > self.version:
            raise LedgerError(
                f"the learner restored version {version}, but the buffer's next batch is {self.version}: they are not "
                "of one run; remove the run's buffer.sqlite or its checkpoints, or choose another run.name"
            )
        if version < self.book.oldest:
            raise LedgerError(self._gone(version))
        self.book.mark(version - 1)
        self.book.ceiling = version
        return self.version - version

    def prune(self, oldest_kept: int) -> list[int]:
        """Forget the samples of batches before `oldest_kept`; returns their items, whose payloads may go.

        Only trained batches go, and with them the items that were dropped before them.
        """
        return self.book.prune(max(self.book.oldest, min(oldest_kept, self.last_trained + 1)))

    def finished(self) -> bool:
        """No further batch can be formed: problems or versions are used up and nothing is open."""
        if self.versions is not None and self.version >= self.versions:
            return True
        return self.used_up() and not self.book.pool.num_open

    # what people ask

    @property
    def version(self) -> int:
        """Next batch to be formed, v'."""
        return self.book.version

    @property
    def last_trained(self) -> int:
        """Last batch reported trained; -1 before the first."""
        return self.book.last_trained

    @property
    def entries(self) -> Mapping[int, ItemState]:
        """Items by number, all but those not yet dispatched and those pruned. To look at only."""
        return self.book.entries

    @property
    def servers(self) -> Mapping[str, ServerRecord]:
        """Rollout servers by name. To look at only."""
        return self.book.servers

    @property
    def num_leased(self) -> int:
        """Items out on lease."""
        return self.book.pool.num_open - self.book.pool.num_stored

    def counts(self) -> dict[str, int]:
        """Items by state: leased, stored, waiting; batched (not yet trained), trained, dropped in the whole run."""
        pool, audit = self.book.pool, self.book.audit
        now = {"leased": self.num_leased, "stored": pool.num_stored, "waiting": pool.num_waiting}
        trained = audit.total("trained").groups
        dropped = audit.total("dropped").groups
        return now | {"batched": self.book.num_formed - trained, "trained": trained, "dropped": dropped}

    def dropped(self) -> dict[str, int]:
        """Dropped items by reason, in the whole run."""
        return {reason: lengths.groups for reason, lengths in self.book.audit.by("dropped").items()}

    def ages(self) -> dict[int, int]:
        """Groups of formed batches by age, in the whole run."""
        return dict(sorted((int(age), lengths.groups) for age, lengths in self.book.audit.by("age").items()))

    def audit(self) -> dict[str, Lengths]:
        """Lengths by what became of the samples: `generated`, `trained`, `dropped: REASON`, `discarded: REASON`."""
        return self.book.audit.lengths()

    def leased(self) -> Iterator[ItemState]:
        """The items out on lease, server by server."""
        return (self.entries[item] for server in self.servers.values() for item in server.leases.values())

    def holders(self) -> dict[str, list[Lease]]:
        """Leases by server, servers without any included."""
        servers = self.book.servers.items()
        return {name: [_leased(self.book.entries[item]) for item in server.leases.values()] for name, server in servers}

    def room(self, dispatched: int) -> int:
        """How many items may be dispatched under version `dispatched` now."""
        free = schedule.room(self.book.pool.open, self.version, self.groups, self.target_staleness, dispatched)
        if self.versions is not None:
            free = min(free, (self.versions - self.version) * self.groups - self.book.pool.num_open)
        return max(free, 0)

    def ready(self) -> bool:
        """Whether batch v' can be formed."""
        if self.versions is not None and self.version >= self.versions:
            return False
        pool = self.book.pool
        if pool.ready(self.version, self.groups, self.max_staleness):
            return True
        return self.used_up() and 0 < pool.num_stored == pool.num_open

    def used_up(self) -> bool:
        """No problem is left to dispatch."""
        if self.epochs is None or self.book.pool.num_waiting:
            return False
        return self.book.next_item >= self.problems * self.epochs

    def waiting_reason(self) -> str:
        """One line: why batch v' is not ready, and who holds what it waits for."""
        return reasons.for_batch(self)

    def dispatch_reason(self, server: str) -> str:
        """One line: why nothing can be dispatched to `server` now."""
        return reasons.for_work(self, server)

    # what the store is told

    def drain(self) -> Changes:
        """What changed since the last call. The ledger forgets it: who cannot write it keeps it (`Changes.merge`)."""
        return self.book.drain({name: int(getattr(self, name)) for name in FIXED})

    def restore(self, saved: Saved, now: float) -> None:
        """Continue from what the store read back; this ledger must be new. Leases go on, renewed to now + `lease_s`.

        Raises LedgerError if the problems are others. If the bound is smaller now, what breaks it is dispatched again.
        """
        if not saved.scalars:
            return
        for name in FIXED:
            was, value = saved.scalars[name], int(getattr(self, name))
            if was != value:
                raise LedgerError(
                    f"the buffer's file has {name} = {was}, the run {value}: undo that, or choose another run.name"
                )
        self.book.restore(saved, now)
        self._settle()

    # the rules behind

    def _next(self) -> ItemState | None:
        """The item to dispatch next: a waiting one, else a new one, else None."""
        item = self.book.pool.next_waiting()
        if item is not None:
            return self.book.entries[item]
        if self.used_up():
            return None
        epoch, place = divmod(self.book.next_item, self.problems)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, schedule.order(self.problems, self.seed, epoch, self.shuffle))
        return self.book.create(self._epoch[1][place], epoch)

    def _end(self, entry: ItemState, reason: str, permanent: bool = False) -> None:
        if permanent or entry.attempts >= self.attempts:
            self.book.give_up(entry, reason)
        else:
            self.book.release(entry, reason)

    def _redate(self, entry: ItemState, version: int) -> bool:
        """Have the open item count as dispatched under the older `version`, if all stay within the bound."""
        counts = dict(self.book.pool.open)
        counts[entry.version] -= 1
        counts[version] = counts.get(version, 0) + 1
        if not schedule.feasible(counts, self.version, self.groups, self.max_staleness):
            return False
        self.book.redate(entry, version)
        return True

    def _end_all(self, server: ServerRecord, reason: str) -> None:
        for item in list(server.leases.values()):
            self._end(self.book.entries[item], reason)

    def _settle(self) -> None:
        """Take back the open items that cannot be trained within the bound: v' or the bound was set from outside."""
        entries = sorted(self._open(), key=lambda entry: (entry.version, entry.item))
        sound = [entry for entry in entries if entry.version <= self.book.ceiling]
        kept = schedule.keepable([entry.version for entry in sound], self.version, self.groups, self.max_staleness)
        void = [entry for entry, keep in zip(sound, kept, strict=True) if not keep] + entries[len(sound) :]
        if void:
            self.book.take_back(void, f"could not be trained within {self.max_staleness} versions of {self.version}")

    def _open(self) -> Iterator[ItemState]:
        return (entry for entry in self.book.entries.values() if entry.state in OPEN)

    def _gone(self, version: int) -> str:
        return (
            f"batch {version} is gone, the buffer keeps those from {self.book.oldest} on: restore a checkpoint of at "
            "least that version, or remove the run's buffer.sqlite and checkpoints to begin anew"
        )


def _leased(entry: ItemState) -> Lease:
    return Lease(entry.item, entry.lease, entry.row, entry.epoch, entry.version)
