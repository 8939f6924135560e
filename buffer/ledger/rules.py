"""The ledger: which problem is dispatched, stored, batched, trained or dropped.

Pure Python without sockets, threads or clock: callers pass `now` in seconds, and commit each change (`drain`) before
they answer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from buffer.ledger import state
from buffer.ledger.counts import GIVEN_UP_FAILED, GIVEN_UP_FLAT, GIVEN_UP_ROWS, Marks, Rows, remember, row_values
from buffer.ledger.difficulty import DifficultyOrder, Shares
from buffer.ledger.evaluations import Evaluations
from buffer.ledger.scaling import WantedServers
from buffer.ledger.state import EpochOrder, LedgerState, Order, ServerRecord
from buffer.ledger.training import Batches, LedgerView, Suspicion, feasible, keepable
from buffer.ledger.types import (
    OPEN,
    Changes,
    FailureKind,
    ItemState,
    Lease,
    LedgerError,
    SampleStats,
    Saved,
    Terms,
    item_values,
    server_name,
)

ZERO_VARIANCE = "zero variance"
FIXED = ("problems", "seed", "shuffle")
"""Must not change while a run goes on."""
COUNTERS: Mapping[str, str] = {
    **{name: f"terms.{name}" for name in FIXED},
    **{name: f"state.{name}" for name in ("version", "last_trained", "oldest", "ceiling", "next_item", "next_lease")},
    **{name: f"state.trend.{name}" for name in ("failures_in_row", "given_up", "flat_in_row", "quarantined_in_row")},
    **{name: f"state.undone.{name}" for name in ("restored", "reached")},
    **{f"suspicion_{one.name}": f"batches.suspicion.{one.name}" for one in fields(Suspicion)},
    **{one.name: f"wanted.{one.name}" for one in fields(WantedServers)},
}
counters_of = attrgetter(*COUNTERS.values())


class Attempts:
    def __init__(self, terms: Terms, state: LedgerState, order: Order, view: LedgerView) -> None:
        self._terms, self._state, self._order, self._view = terms, state, order, view

    def next_item(self, server: str) -> ItemState | None:
        waiting = self._state.pool.next_waiting(server)
        if waiting is not None:
            return self._state.items[waiting]
        row = self._order.draw(self._state)
        if row is None:
            return None
        item = self._state.create(row, self._state.next_item // self._terms.problems)
        self._order.skip(self._state)
        return item

    def is_alive(self, server: ServerRecord, now: float) -> bool:
        return now < server.heard + self._terms.lease_s

    def store(self, item: ItemState, samples: Sequence[SampleStats], now: float) -> bool:
        """False: the attempt has failed."""
        state, d = self._state, item.version
        newest = max([sample.newest for sample in samples if sample.newest is not None], default=0)
        oldest = min([sample.oldest for sample in samples if sample.oldest is not None], default=d)
        undone, most = state.undone, max(state.ceiling, state.undone.reached)
        least = undone.restored if undone.restored < d <= undone.reached else d
        if newest > most or oldest < least:  # only a rewind leads back
            above = f"sampled under version {newest}, and no policy above version {most} exists"
            below = f"sampled under version {oldest}, and its server had version {least} or a later one"
            self.end(item, above if newest > most else below, now, "engine")
            return False
        if oldest < d and not self._redate(item, oldest):
            bound = f"within {self._terms.max_staleness} versions"
            self.end(item, f"sampled under version {oldest}, it could not be trained {bound}", now)
            return False
        flat = self._terms.skip_zero_variance and len({sample.reward for sample in samples}) == 1
        state.accept(item, samples, ZERO_VARIANCE if flat else None)
        if state.trend.flat_in_row >= self._view.most_flat and not state.trend.given_up:
            state.give_up_run(GIVEN_UP_FLAT)
        return True

    def end(
        self, item: ItemState, reason: str, now: float, kind: FailureKind = "infrastructure", permanent: bool = False
    ) -> None:
        """End a failed attempt. If another server lives, only another one may try the item within `lease_s`."""
        state = self._state
        is_left_out = state.count_failure(item.row, kind, reason, permanent)
        if is_left_out:
            self._order.skip(state)
        if permanent or is_left_out or item.attempts >= self._terms.attempts:
            state.give_up(item, reason)
        else:
            name = server_name(item.server)
            other = any(server_name(key) != name and self.is_alive(one, now) for key, one in state.servers.items())
            state.release(item, reason, elsewhere_until=now + self._terms.lease_s if other else 0.0)
        if self._view.is_hopeless():
            state.give_up_run(GIVEN_UP_FAILED)
        elif state.rows.all_left_out and not self._view.all_dispatched():
            state.give_up_run(GIVEN_UP_ROWS)

    def end_all(self, server: ServerRecord, reason: str, now: float) -> None:
        for number in list(server.leases.values()):
            self.end(self._state.items[number], reason, now)

    def take_back_too_old(self, but: int = -1) -> None:
        """Take back the open items that can no longer be trained within the bound."""
        state, most = self._state, self._terms.max_staleness
        opened = (item for item in state.items.values() if item.state in OPEN and item.number != but)
        items = sorted(opened, key=lambda item: (item.version, item.number))
        sound = [item for item in items if item.version <= state.ceiling]
        kept = keepable([item.version for item in sound], state.version, self._terms.groups, most)
        void = [item for item, keep in zip(sound, kept, strict=True) if not keep] + items[len(sound) :]
        if void:
            state.take_back(void, f"could not be trained within {most} versions of {state.version}")

    def _redate(self, item: ItemState, version: int) -> bool:
        counts = dict(self._state.pool.open)
        counts[item.version] -= 1
        counts[version] = counts.get(version, 0) + 1
        if not feasible(counts, self._state.version, self._terms.groups, self._terms.max_staleness):
            return False
        self._state.redate(item, version)
        return True


class Ledger:
    """The ledger, whose rules are in docs/design/ledger.md.

    `shares` has rows and weight of each source, `place` names a row for people, `recall` reads closed items from the
    store.
    """

    def __init__(
        self,
        problems: int,
        groups: int,
        max_staleness: int,
        *,
        target_staleness: int | None = None,
        shares: Sequence[tuple[int, float]] = (),
        difficulty: Shares | None = None,
        marks: Marks | None = None,
        eval_every: int | None = None,
        place: Callable[[int], str] = lambda row: f"row {row} of data.train",
        recall: Callable[[int], ItemState | None] = lambda item: None,
        **terms: Any,
    ) -> None:
        target = max_staleness if target_staleness is None else min(target_staleness, max_staleness)
        self.terms = Terms(problems, groups, max_staleness, target, **terms)
        self.place, self._recall = place, recall
        self.state = LedgerState(Rows(problems, marks, self.terms.attempts))
        drawing = problems, self.terms.seed, self.terms.shuffle, self.terms.epochs, shares
        self.order: Order = DifficultyOrder(*drawing, difficulty) if difficulty else EpochOrder(*drawing)
        self.evaluations = Evaluations(eval_every, self.terms.lease_s)
        self.wanted = WantedServers()
        self._expired = -1, -1
        """`revision` and `next_lease` when `expire` looked last."""
        self._next_end: float | None = None
        self._counted: tuple[tuple[Any, ...], Mapping[str, int]] = (), {}
        self.view = LedgerView(self.terms, self.state, self.order)
        self._attempts = Attempts(self.terms, self.state, self.order, self.view)
        self.batches = Batches(self.terms, self.state, self.view, self._attempts.take_back_too_old, self.find)

    def ask(self, server: str, version: int, room: int, now: float, request: int = 0) -> list[Lease]:
        """Dispatch up to `room` items. If none is returned, call again when `state.revision` has moved.

        A repeated `request` gets what is left of its leases, never more; request 0 is always new.
        """
        record = self.state.servers.setdefault(server, ServerRecord(heard=now))
        work = list[ItemState]()
        if request in record.answered:
            held = (self.state.items[item] for item in record.leases.values())
            work += [item for item in held if item.request == request]
        else:
            if not request or record.asked.get(request) != version:  # a repeated Ask is no news: heartbeats know better
                record.version, record.heard = version, now
                if request:
                    remember(record.asked, request, version)
            dispatched = min(record.version, self.state.ceiling)
            free = self.view.room(dispatched, server) if now < record.heard + self.terms.lease_s else 0
            while len(work) < min(room, free) and (item := self._attempts.next_item(server)):
                self.state.dispatch(item, server, dispatched, now, request)
                work.append(item)
            if work and request:
                record.asked.pop(request, None)
                remember(record.answered, request, None)
        return [Lease(item.number, item.lease, item.row, item.epoch, item.version) for item in work]

    def upcoming(self, number: int) -> Sequence[int]:
        return self.order.upcoming(self.state, number)

    def put(self, server: str, number: int, lease: int, samples: Sequence[SampleStats], now: float) -> str | None:
        """Store a finished group; returns None, also when repeated, or why its lease is over.

        If its server went back to an older policy, the group is dated by its oldest token, or dispatched again.
        """
        if not samples:
            raise LedgerError(f"item {number}: a group without samples; report what went wrong with Fail instead")
        item = self.find(number)
        if item is None:
            return f"item {number} is not known here: it was never dispatched, or was closed and pruned long ago"
        if (item.server, item.lease) != (server, lease) or not (item.state == "leased" or item.accepted):
            return item.lease_over(lease)
        if item.state == "leased" and not self._attempts.store(item, samples, now):
            return item.lease_over(lease)
        return None

    def fail(
        self,
        server: str,
        number: int,
        lease: int,
        reason: str,
        now: float,
        permanent: bool = False,
        returned: bool = False,
        kind: FailureKind = "infrastructure",
        hold_s: float = 0.0,
    ) -> None:
        """End the lease: the item is dispatched again, or dropped after `attempts`.

        `returned`: the attempt does not count, and no server gets the item within `hold_s`.
        """
        item = self.state.items.get(number)
        if item is None or item.state != "leased" or (item.server, item.lease) != (server, lease):
            return
        if returned:
            item.attempts -= 1
            self.state.release(item, reason, now + hold_s if hold_s else 0.0, held_back=hold_s > 0)
        else:
            self._attempts.end(item, reason, now, kind, permanent)

    def heartbeat(self, server: str, version: int, holding: Sequence[int], now: float) -> list[int]:
        """Note that the server lives; returns those of `holding` that are over.

        An old lease that the server does not hold never reached it, and ends.
        """
        record = self.state.servers.setdefault(server, ServerRecord(heard=now))
        self.state.revision += version != record.version or not self._attempts.is_alive(record, now)
        record.version, record.heard = version, now
        held = set(holding)
        for item in [self.state.items[item] for lease, item in record.leases.items() if lease not in held]:
            if now >= item.since + self.terms.lease_s:
                self._attempts.end(item, "lost: its server does not know of it", now)
        return [lease for lease in holding if lease not in record.leases and lease not in record.done]

    def leave(self, server: str, reason: str, now: float, returned: bool = False) -> None:
        """End the leases of a server that is gone. `returned`: the attempts do not count."""
        self.evaluations.leave(server)
        if server not in self.state.servers:
            return
        if returned:
            for lease, number in list(self.state.servers[server].leases.items()):
                self.fail(server, number, lease, reason, now, returned=True)
        self._attempts.end_all(self.state.servers[server], reason, now)
        del self.state.servers[server]

    def lose(self, server: str, reason: str, now: float) -> None:
        """End the leases of a server that may still deliver and ask again."""
        self.evaluations.leave(server)
        if server in self.state.servers:
            self.state.servers[server].heard = -math.inf
            self._attempts.end_all(self.state.servers[server], reason, now)

    def expire(self, now: float) -> float | None:
        """End the leases of silent servers, and waits. Returns when to call again."""
        state, pool, lease_s = self.state, self.state.pool, self.terms.lease_s
        # Heartbeats only put off when the next lease ends; everything else moves one of two numbers.
        if self._expired == (state.revision, state.next_lease) and (self._next_end is None or now < self._next_end):
            return self._next_end
        if pool.next_wait_end is not None and now >= pool.next_wait_end:
            pool.end_waits(now)
            state.revision += 1
        holders = [server for server in state.servers.values() if server.leases]
        for holder in holders:
            if now >= holder.heard + lease_s:
                self._attempts.end_all(holder, f"its server was not heard of for {lease_s:g} s", now)
        ends = [holder.heard + lease_s for holder in holders if holder.leases]
        if pool.next_wait_end is not None:
            ends.append(pool.next_wait_end)
        self._expired, self._next_end = (state.revision, state.next_lease), min(ends, default=None)
        return self._next_end

    def find(self, number: int) -> ItemState | None:
        """Also an item that has left memory."""
        return self.state.items.get(number) or self.state.journal.closed(number) or self._recall(number)

    def drain(self) -> Changes:
        """What changed since the last call. The caller must write it."""
        state, journal, changes = self.state, self.state.journal, self.state.journal.changes
        changes.items |= {number: item_values(state.items[number]) for number in journal.touched}
        changes.totals = {(what, which): state.totals.known[what][which] for what, which in state.totals.changed}
        changes.rows = {row: row_values(state.rows.records[row]) for row in state.rows.changed}
        changes.evaluations, self.evaluations.changed = self.evaluations.changed, {}
        counted = counters_of(self), self.order.counters
        if counted != self._counted:
            counters = {**dict(zip(COUNTERS, map(int, counted[0]), strict=True)), **counted[1]}
            changes.scalars = {name: value for name, value in counters.items() if journal.counters.get(name) != value}
            journal.counters, self._counted = counters, counted
        journal.changes = Changes()
        for noted in journal.touched, state.totals.changed, state.rows.changed:
            noted.clear()
        return changes

    def restore(self, saved: Saved, now: float) -> None:
        """Continue from the store, in a new ledger. Raises LedgerError if the problems are others."""
        if not saved.scalars:
            return
        for name in FIXED:
            was, value = saved.scalars[name], int(getattr(self.terms, name))
            if was != value:
                raise LedgerError(
                    f"the buffer's file has {name} = {was}, the run {value}: undo that, or choose another run.name"
                )
        for name, path in COUNTERS.items():
            if name in saved.scalars and name not in FIXED:  # the file of an earlier release lacks some
                part, _, counter = path.rpartition(".")
                setattr(attrgetter(part)(self), counter, saved.scalars[name])
        state.restore(self.state, saved, now)
        self.order.restore(saved.scalars)
        self.order.skip(self.state)
        self.evaluations.restore(saved.evaluations, now)
        self._attempts.take_back_too_old()
