"""The ledger: which problem is dispatched, stored, batched, trained or dropped, and what may happen next.

Pure Python: no sockets, no threads, no clock (callers pass `now` in seconds). It knows items by number and never sees
tokens: payloads live in the store. `buffer/wire/handlers.py` drives it and commits what each call changed (`drain`)
before it answers. Decisions are made here; the state they change is in `state.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from buffer.ledger import schedule
from buffer.ledger.difficulty import DifficultyOrder, Shares
from buffer.ledger.evaluations import Evaluations, Reach
from buffer.ledger.order import EpochOrder, Order
from buffer.ledger.rows import Marks, Rows
from buffer.ledger.state import (
    GIVEN_UP_FAILED,
    GIVEN_UP_FLAT,
    GIVEN_UP_QUARANTINED,
    GIVEN_UP_ROWS,
    LedgerState,
    ServerRecord,
)
from buffer.ledger.suspicion import MOST_ENDS, Suspicion
from buffer.ledger.types import (
    OPEN,
    Changes,
    FailureKind,
    FormedBatch,
    ItemState,
    Lease,
    LedgerError,
    Lengths,
    Outcome,
    SampleStats,
    Saved,
    server_name,
)

ZERO_VARIANCE = "zero variance"
FIXED = ("problems", "seed", "shuffle")
LEAST_FAILURES, LEAST_BATCHES = 100, 3
"""A run is given up after so many failures in a row, and after as many as the groups of so many batches."""
LEAST_FLAT, LEAST_FLAT_BATCHES = 1000, 10
"""The same for groups in a row that `skip_zero_variance` leaves out. The limit is higher because such a group is not a
fault: if one group in 100 has variance, 1,000 in a row without variance come once in 2 million groups; if one in 200
has, once in 30,000."""
LEAST_QUARANTINED = 10
"""A run is given up after so many groups, and the groups of a batch, were put into quarantine and none was trained:
then it is not the groups that are at fault."""


class Ledger:
    """The rules are in docs/design/ledger.md, their properties in tests/buffer/ledger/.

    Item s belongs to epoch `s // problems`, and keeps its number for life. Its row is chosen by `order.py`, or, with
    `difficulty`, by `difficulty.py`; `shares` are the rows and the weight of each source. `place` names a row of the
    data set for people. `recall` reads an item that was dropped or put into quarantine back from where `drain` was
    written: the ledger itself forgets it.
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
        max_failed_share: float = 0.5,
        shares: Sequence[tuple[int, float]] = (),
        difficulty: Shares | None = None,
        marks: Marks | None = None,
        eval_every: int | None = None,
        place: Callable[[int], str] = lambda row: f"row {row} of data.train",
        recall: Callable[[int], ItemState | None] = lambda item: None,
    ) -> None:
        if problems < 1 or groups < 1 or max_staleness < 0 or attempts < 1:
            raise LedgerError(f"{problems=}, {groups=}, {attempts=} must be at least 1 and {max_staleness=} at least 0")
        self.problems, self.groups, self.versions, self.epochs = problems, groups, versions, epochs
        self.max_staleness, self.attempts, self.lease_s = max_staleness, attempts, lease_s
        self.target_staleness = max_staleness if target_staleness is None else min(target_staleness, max_staleness)
        self.seed, self.shuffle, self.skip_zero_variance = seed, shuffle, skip_zero_variance
        self.max_failed_share, self.place = max_failed_share, place
        self.state = LedgerState(Rows(problems, marks, attempts))
        drawing = problems, seed, shuffle, epochs, shares
        self._order: Order = DifficultyOrder(*drawing, difficulty) if difficulty else EpochOrder(*drawing)
        self.evaluations = Evaluations(eval_every, lease_s)
        self.suspicion = Suspicion()
        self._recall = recall

    # requests of rollout servers

    def ask(self, server: str, version: int, room: int, now: float, request: int = 0) -> list[Lease]:
        """Dispatch up to `room` items; empty: nothing may be dispatched yet (park it, and call again with the same
        arguments when `revision` has moved). A repeated `request` of the same server gets what it still holds of the
        leases it got before, never more; request 0 is not numbered and always new. Raises nothing; `finished()` tells
        whether to stop asking.

        d is the version last heard from the server, in a new Ask or a heartbeat, but no more than the learner can have
        reached since it last restored. A parked Ask of a server that fell silent gets nothing.
        """
        record = self.state.servers.setdefault(server, ServerRecord(heard=now))
        if request in record.answered:
            held = (self.state.items[item] for item in record.leases.values())
            return [item.as_lease() for item in held if item.request == request]
        record.record_ask(request, version, now)
        if not self._alive(record, now):
            return []
        dispatched = min(record.version, self.state.ceiling)
        work: list[Lease] = []
        for _ in range(min(room, self.room(dispatched, server))):
            item = self._next(server)
            if item is None:
                break
            self.state.dispatch(item, server, dispatched, now, request)
            work.append(item.as_lease())
        if work:
            record.record_answer(request)
        return work

    def upcoming(self, number: int) -> Sequence[int]:
        """Rows of the next `number` items that will be new, or of those left in the epoch."""
        return self._order.upcoming(self.state, number)

    def draw_ahead(self) -> None:
        """Draw a few more rows of the next epoch, so that its beginning holds up nothing. To be called now and then."""
        self._order.draw_ahead()

    def answered(self, server: str, request: int) -> bool:
        """Whether this Ask of the server got work before: nothing new is dispatched for it any more."""
        return request in self.state.servers[server].answered

    def put(self, server: str, number: int, lease: int, samples: Sequence[SampleStats], now: float) -> str | None:
        """Store a finished group; None: accepted (also when repeated), else why not (its lease is over).

        A server may have gone back to an older policy with the learner, after the dispatch. The group then counts as
        dispatched under the version of its oldest token; one too old for that is dispatched again.
        """
        if not samples:
            raise LedgerError(f"item {number}: a group without samples; report what went wrong with Fail instead")
        item = self._find(number)
        if item is None:
            return f"item {number} is not known here: it was never dispatched, or was closed and pruned long ago"
        if (item.server, item.lease) != (server, lease) or not (item.state == "leased" or item.accepted):
            return item.lease_over(lease)
        if item.state == "leased":
            if wrong := self._wrong_versions(item, samples):
                self._end(item, wrong, now, "engine")
                return item.lease_over(lease)
            oldest = min((sample.oldest for sample in samples if sample.oldest is not None), default=item.version)
            if oldest < item.version and not self._redate(item, oldest):
                reason = f"sampled under version {oldest}, it could not be trained within {self.max_staleness} versions"
                self._end(item, reason, now)
                return item.lease_over(lease)
            flat = self.skip_zero_variance and len({sample.reward for sample in samples}) == 1
            self.state.accept(item, samples, ZERO_VARIANCE if flat else None)
            if self.state.flat_in_row >= self.most_flat and not self.state.given_up:
                self.state.give_up_run(GIVEN_UP_FLAT)
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
        """End the lease; the item waits to be dispatched again, before new ones, or is dropped after `attempts`.

        For up to `lease_s` it goes to another server only, if there is one.

        `returned`: its server gives it back without having failed at it, and the attempt does not count. No server
        gets it again within `hold_s`.
        """
        item = self.state.items.get(number)
        if item is None or item.state != "leased" or (item.server, item.lease) != (server, lease):
            return
        if returned:
            item.attempts -= 1
            self.state.release(item, reason, now + hold_s if hold_s else 0.0, held_back=hold_s > 0)
        else:
            self._end(item, reason, now, kind, permanent)

    def heartbeat(self, server: str, version: int, holding: Sequence[int], now: float) -> list[int]:
        """The server is alive and runs `version`; its leases go on. Returns those of `holding` that are over.

        A lease older than `lease_s` that it does not hold never reached it, or was forgotten: it ends.
        """
        record = self.state.servers.setdefault(server, ServerRecord(heard=now))
        self.state.revision += version != record.version or not self._alive(record, now)
        record.version, record.heard = version, now
        held = set(holding)
        for item in [self.state.items[item] for lease, item in record.leases.items() if lease not in held]:
            if now >= item.since + self.lease_s:
                self._end(item, "lost: its server does not know of it", now)
        return [lease for lease in holding if lease not in record.leases and lease not in record.done]

    def leave(self, server: str, reason: str, now: float, returned: bool = False) -> None:
        """The server is gone (its successor said Hello): end its leases. `returned`: it was drained, and what it had
        counts as given back."""
        self.evaluations.leave(server)
        if server not in self.state.servers:
            return
        if returned:
            for lease, number in list(self.state.servers[server].leases.items()):
                self.fail(server, number, lease, reason, now, returned=True)
        self._end_all(self.state.servers[server], reason, now)
        del self.state.servers[server]

    def scale(self, servers: int | None, by_person: bool) -> bool:
        """So many rollout servers are wanted from now on; None: a person's number no longer holds. Returns whether that
        is news: while a person's number holds, the rule's changes nothing."""
        state, before = self.state, (self.state.wanted_servers, self.state.wanted_by_person)
        if by_person or not state.wanted_by_person:
            state.wanted_servers = state.wanted_servers if servers is None else servers
            state.wanted_by_person = int(by_person and servers is not None)
        return before != (state.wanted_servers, state.wanted_by_person)

    def lose(self, server: str, reason: str, now: float) -> None:
        """The server broke off and did not come back in time: end its leases. It may still deliver and ask again."""
        self.evaluations.leave(server)
        if server in self.state.servers:
            self.state.servers[server].heard = -math.inf
            self._end_all(self.state.servers[server], reason, now)

    def expire(self, now: float) -> float | None:
        """End the leases of servers not heard of for `lease_s`, and the waits of failed items for another server.

        Returns when to call again; None: nothing ends by the clock.
        """
        due = self.state.pool.next_wait_end
        if due is not None and now >= due:
            self.state.pool.end_waits(now)
            self.state.revision += 1
        holders = [server for server in self.state.servers.values() if server.leases]
        for holder in holders:
            if not self._alive(holder, now):
                self._end_all(holder, f"its server was not heard of for {self.lease_s:g} s", now)
        ends = [holder.heard + self.lease_s for holder in holders if holder.leases]
        wait_end = self.state.pool.next_wait_end
        return min([*ends, *([] if wait_end is None else [wait_end])], default=None)

    # requests of the learner

    def take(self, version: int) -> FormedBatch | None:
        """Batch `version`: as it was, if formed before; formed now, if it is the next one and ready; None: not ready
        yet (park it) or, with `finished()`, never. Raises LedgerError for a version beyond the next, or pruned.

        At the end of the problems a last, smaller batch is formed of what is left.
        """
        if version < self.state.oldest:
            raise LedgerError(self._pruned(version))
        if version > self.version:
            raise LedgerError(
                f"Take({version}): the next batch is {self.version}; restart the learner to rewind it to its checkpoint"
            )
        if version == self.version:
            if not self.ready():
                if self.state.given_up:
                    self.state.tell()
                return None
            self.state.form(self.groups)
        self.state.raise_ceiling(version + 1)
        if version > self.last_trained:
            self.suspicion.take(version)
        return self.state.batches[version]

    def trained(self, version: int) -> list[int]:
        """Mark batch `version` as trained; returns the items that count as trained from now on.

        Every rank calls this; only the first call has an effect. A call of a replaced learner has no effect: after a
        rewind a batch must be taken again before it can be trained again.
        """
        if version >= self.version:
            raise LedgerError(f"Trained({version}): the next batch is {self.version}; restart the learner to rewind it")
        if not self.last_trained < version < self.state.ceiling:
            return []
        newly = range(self.last_trained + 1, version + 1)
        self.state.mark(version)
        self.suspicion.clear(version)
        return [item for batch in newly for item in self.state.batches[batch].items]

    def rewind(self, version: int) -> int:
        """The learner restored `version`: batches from there on count as untrained; returns how many will be served
        again. Raises LedgerError if the ledger does not reach that version or has pruned it.

        A run that was given up goes on: whoever started the learner again has mended what failed, or it ends once more.

        A ledger that never formed a batch goes to any version; what it opened too early for that is dispatched again.
        """
        if version != self.version and not self.state.num_formed:
            self.state.start_at(version)
            self._take_back_too_old()
        if version > self.version:
            raise LedgerError(
                f"the learner restored version {version}, but the buffer's next batch is {self.version}: they are not "
                "of one run; remove the run's buffer.sqlite or its checkpoints, or choose another run.name"
            )
        if version < self.state.oldest:
            raise LedgerError(self._pruned(version))
        self.state.rewind(version)
        self.state.forgive()
        self.suspicion.clear(version - 1)
        culprit = self.suspicion.begin()
        if culprit is not None and culprit in self.items:
            self.quarantine(culprit, f"the learner ended {MOST_ENDS} times while it tried this group by itself")
        return self.version - version

    def try_alone(self, version: int, number: int | None) -> None:
        """The learner, which has batch `version`, tries the group of this item by itself; None: it has tried all."""
        if number is not None and (version >= self.version or number not in self._batch_items(version)):
            raise LedgerError(f"item {number} is not in batch {version}: take the batch again")
        self.suspicion.try_alone(number)

    def suspect(self, version: int) -> bool:
        """Whether MOST_ENDS starts of the learner ended with this batch."""
        return self.suspicion.ends(version) >= MOST_ENDS

    def _batch_items(self, version: int) -> tuple[int, ...]:
        return self.state.batches[version].items if version in self.state.batches else ()

    def quarantine(self, number: int, reason: str) -> bool:
        """Put the group of this item into quarantine: it is kept and never trained. Returns whether that is news.

        Its batch is trained without it; no other batch changes. A batch that loses its last group is formed anew, and
        those after it too. Raises LedgerError for an item that has no group, or whose batch was trained.
        """
        item = self._find(number)
        if item is not None and item.state == "quarantined":
            return False
        if item is None or item.state not in ("stored", "batched"):
            now = "not known here" if item is None else item.state
            raise LedgerError(f"item {number} is {now}: only a group that is stored or batched goes into quarantine")
        if item.state == "batched" and item.batch <= self.last_trained:
            raise LedgerError(f"item {number} was trained in batch {item.batch}: it cannot go into quarantine any more")
        if item.state == "batched":
            self._take_out(item)
        self.state.quarantine(item, reason)
        if self.state.quarantined_in_row >= self.most_quarantined and not self.state.given_up:
            self.state.give_up_run(GIVEN_UP_QUARANTINED)
        return True

    def _take_out(self, item: ItemState) -> None:
        """Take the item out of its batch. If it was the last group, the batch and all later ones are formed anew,
        because batches are consecutive; groups that are too new for their batch are dispatched again."""
        batch = item.batch
        self.state.take_out(item)
        self.suspicion.clear(batch)
        if not self.state.batches[batch].items:
            self.state.unform(batch)
            self._take_back_too_old(but=item.number)

    def prune(self, oldest_kept: int) -> int:
        """Forget batches before `oldest_kept`, trained ones only; returns the oldest batch that is left.

        The samples of batches before that, and of items that were dropped before it, may go.
        """
        self.state.prune(max(self.state.oldest, min(oldest_kept, self.last_trained + 1)))
        return self.state.oldest

    def _find(self, number: int) -> ItemState | None:
        """An item in memory or, if it is closed, what is written down of it."""
        return self.state.items.get(number) or self.state.closed_since_drain(number) or self._recall(number)

    def finished(self) -> bool:
        """No further batch can be formed."""
        return self.outcome() is not None

    def outcome(self) -> Outcome | None:
        """Why no further batch can be formed; None while one may be.

        No version is left; or the run was given up, because all attempts fail or all groups lack variance; or no
        problem is left and no item is open. If attempts failed and no problem ever got into a batch, the run failed
        too.
        """
        if self.versions is not None and self.version >= self.versions:
            return "versions"
        if self.state.given_up:
            return "failed"
        if not self.used_up() or self.state.pool.num_open:
            return None
        return "data" if self.state.num_formed or not (self.failed() or self.num_quarantined) else "failed"

    # what is asked of it, without changing it

    @property
    def revision(self) -> int:
        """Moves whenever something changed that a parked Ask or Take may wait for."""
        return self.state.revision + self.evaluations.revision

    @property
    def reach(self) -> Reach:
        """How far the policy can be, and which version is the last."""
        return Reach(self.state.ceiling, self.version if self.outcome() in ("versions", "data") else None)

    @property
    def version(self) -> int:
        """Next batch to be formed, v'."""
        return self.state.version

    @property
    def last_trained(self) -> int:
        """Last batch reported trained; -1 before the first."""
        return self.state.last_trained

    @property
    def oldest(self) -> int:
        """The oldest batch that is not pruned."""
        return self.state.oldest

    @property
    def items(self) -> Mapping[int, ItemState]:
        """Items by number, all but those not yet dispatched, dropped or pruned. To look at only."""
        return self.state.items

    @property
    def servers(self) -> Mapping[str, ServerRecord]:
        """Rollout servers by name and token. To look at only."""
        return self.state.servers

    def state_of(self, number: int) -> str | None:
        """`ItemState.state` of an item; None if it is not in memory: never dispatched, dropped or pruned."""
        return self.state.items[number].state if number in self.state.items else None

    def counts(self) -> dict[str, int]:
        """Items by state: leased, stored, waiting; batched (not yet trained), trained, dropped and, if there are some,
        quarantined in the whole run."""
        pool, totals = self.state.pool, self.state.totals
        now = {"leased": pool.num_open - pool.num_stored, "stored": pool.num_stored, "waiting": pool.num_waiting}
        trained = totals.groups("trained")
        return now | {
            "batched": self.state.num_formed - trained,
            "trained": trained,
            "dropped": totals.groups("dropped"),
            **({"quarantined": self.num_quarantined} if self.num_quarantined else {}),
        }

    def problems_by_state(self) -> dict[str, int]:
        """How many rows of the data set are in each band, retired, left out."""
        rows = self.state.rows
        return rows.bands() | self._order.counts(self.state) | {"left_out": len(rows.left_out)}

    def left_out(self) -> dict[int, str]:
        """Rows that are not drawn any more: `KIND: REASON` of the last failure by row."""
        return self.state.rows.left_out

    @property
    def num_quarantined(self) -> int:
        """Groups put into quarantine in the whole run."""
        return self.state.totals.groups("quarantined")

    def dropped(self) -> dict[str, int]:
        """Dropped items by reason, in the whole run."""
        return {reason: lengths.groups for reason, lengths in self.state.totals.by("dropped").items()}

    def failed(self) -> dict[str, int]:
        """Failed attempts by `KIND: REASON`, in the whole run."""
        return {reason: lengths.groups for reason, lengths in self.state.totals.by("failed").items()}

    def ages(self) -> dict[int, int]:
        """Groups of formed batches by age, in the whole run."""
        return dict(sorted((int(age), lengths.groups) for age, lengths in self.state.totals.by("age").items()))

    def lengths(self) -> dict[str, Lengths]:
        """Lengths by what became of the samples: `generated`, `trained`, `quarantined`, `dropped: REASON`,
        `discarded: REASON`."""
        return self.state.totals.lengths()

    def leased(self) -> Iterator[ItemState]:
        """The items out on lease, server by server."""
        return (self.items[item] for server in self.servers.values() for item in server.leases.values())

    def room(self, dispatched: int, server: str = "") -> int:
        """How many items may be dispatched under version `dispatched` now, to `server` if one is named; none once the
        run was given up.

        Of the last places before `run.versions` it gets none that an item needs which it failed at: another server, or
        after a while any, takes that item.
        """
        return max(self._room_anywhere(dispatched, self.state.pool.num_elsewhere(server)), 0)

    def admits(self, version: int) -> bool:
        """Whether some server that runs `version` may get an item now. If not, none that runs an older one may."""
        pool = self.state.pool
        left = not self._all_dispatched() or pool.num_waiting > pool.num_held
        return left and self._room_anywhere(min(version, self.state.ceiling)) > 0

    def _room_anywhere(self, dispatched: int, kept: int = 0) -> int:
        """`room` for a server to which `kept` of the waiting items do not go."""
        if self.state.given_up:
            return 0
        pool = self.state.pool
        free = schedule.room(pool.open, self.version, self.groups, self.target_staleness, dispatched)
        if self.versions is not None:
            free = min(free, (self.versions - self.version) * self.groups - pool.num_open - pool.num_held - kept)
        return free

    @property
    def most_flat(self) -> int:
        """Number of groups in a row without variance that ends the run."""
        return max(LEAST_FLAT, LEAST_FLAT_BATCHES * self.groups)

    @property
    def most_quarantined(self) -> int:
        """Number of groups put into quarantine in a row, none trained between them, that ends the run."""
        return max(LEAST_QUARANTINED, self.groups)

    def ready(self) -> bool:
        """Whether batch v' can be formed."""
        if self.state.given_up or (self.versions is not None and self.version >= self.versions):
            return False
        pool = self.state.pool
        if pool.ready(self.version, self.groups, self.max_staleness):
            return True
        return self.used_up() and 0 < pool.num_stored == pool.num_open

    def used_up(self) -> bool:
        """No problem is left to dispatch."""
        return self._all_dispatched() and not self.state.pool.num_waiting

    # to the store and back

    def drain(self) -> Changes:
        """What changed since the last call. The ledger forgets it: the caller must write it."""
        fixed = {name: int(getattr(self, name)) for name in FIXED}
        changes = self.state.drain(fixed | self.suspicion.counters() | self._order.counters())
        changes.evaluations = self.evaluations.drain()
        return changes

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
        self.state.restore(saved, now)
        self._order.restore(saved.scalars)
        self._order.skip(self.state)
        self.evaluations.restore(saved.evaluations, now)
        self.suspicion = Suspicion.restored(saved.scalars)
        self._take_back_too_old()

    # the rules behind

    def _all_dispatched(self) -> bool:
        """Every problem of every epoch was dispatched once."""
        return self.epochs is not None and self.state.next_item >= self.problems * self.epochs

    def _alive(self, server: ServerRecord, now: float) -> bool:
        return now < server.heard + self.lease_s

    def _next(self, server: str) -> ItemState | None:
        """The item to dispatch next to `server`: a waiting one, else a new one, else None."""
        waiting = self.state.pool.next_waiting(server)
        if waiting is not None:
            return self.state.items[waiting]
        row = self._order.draw(self.state)
        if row is None:
            return None
        item = self.state.create(row, self.state.next_item // self.problems)
        self._order.skip(self.state)
        return item

    def _end(
        self, item: ItemState, reason: str, now: float, kind: FailureKind = "infrastructure", permanent: bool = False
    ) -> None:
        """An attempt failed. The next one is made by another server if there is one that lives; but if that does not
        ask within `lease_s`, by any."""
        is_left_out = self.state.count_failure(item.row, kind, reason, permanent)
        if is_left_out:
            self._order.skip(self.state)
        if permanent or is_left_out or item.attempts >= self.attempts:
            self.state.give_up(item, reason)
        else:
            name = server_name(item.server)
            other = any(server_name(key) != name and self._alive(one, now) for key, one in self.state.servers.items())
            self.state.release(item, reason, elsewhere_until=now + self.lease_s if other else 0.0)
        if self._hopeless():
            self.state.give_up_run(GIVEN_UP_FAILED)
        elif self.state.rows.all_left_out and not self._all_dispatched():
            self.state.give_up_run(GIVEN_UP_ROWS)

    def _hopeless(self) -> bool:
        """Whether attempts fail and no group is made any more.

        Fast failures must not end a run whose groups take long: what is under way counts as if it would succeed.
        """
        failures, pool = self.state.failures_in_row, self.state.pool
        attempts = failures + pool.num_open - pool.num_stored
        return failures >= max(LEAST_FAILURES, LEAST_BATCHES * self.groups) and (
            failures > self.max_failed_share * attempts
        )

    def _wrong_versions(self, item: ItemState, samples: Sequence[SampleStats]) -> str:
        """Why no server can have had the policies that sampled these tokens: newer than any there is, or older than its
        server's at the dispatch, to which only a rewind leads back; "" where one can."""
        state, d = self.state, item.version
        newest = max((sample.newest for sample in samples if sample.newest is not None), default=0)
        oldest = min((sample.oldest for sample in samples if sample.oldest is not None), default=d)
        if newest > (most := max(state.ceiling, state.reached)):
            return f"sampled under version {newest}, and no policy above version {most} exists"
        if oldest < (least := state.restored if state.restored < d <= state.reached else d):
            return f"sampled under version {oldest}, and its server had version {least} or a later one"
        return ""

    def _redate(self, item: ItemState, version: int) -> bool:
        """Have the open item count as dispatched under the older `version`, if all stay within the bound."""
        counts = dict(self.state.pool.open)
        counts[item.version] -= 1
        counts[version] = counts.get(version, 0) + 1
        if not schedule.feasible(counts, self.version, self.groups, self.max_staleness):
            return False
        self.state.redate(item, version)
        return True

    def _end_all(self, server: ServerRecord, reason: str, now: float) -> None:
        for number in list(server.leases.values()):
            self._end(self.state.items[number], reason, now)

    def _take_back_too_old(self, but: int = -1) -> None:
        """Take back the open items that cannot be trained within the bound, `but` one: v' or the bound was set from
        outside."""
        opened = (item for item in self.items.values() if item.state in OPEN and item.number != but)
        items = sorted(opened, key=lambda item: (item.version, item.number))
        sound = [item for item in items if item.version <= self.state.ceiling]
        kept = schedule.keepable([item.version for item in sound], self.version, self.groups, self.max_staleness)
        void = [item for item, keep in zip(sound, kept, strict=True) if not keep] + items[len(sound) :]
        if void:
            self.state.take_back(void, f"could not be trained within {self.max_staleness} versions of {self.version}")

    def _pruned(self, version: int) -> str:
        return (
            f"batch {version} is gone, the buffer keeps those from {self.state.oldest} on: restore a checkpoint of at "
            "least that version, or remove the run's buffer.sqlite and checkpoints to begin anew"
        )
