"""What may happen next, as a view that changes nothing; and batches, which are taken, trained, rewound and forgotten.

The functions at the end take open items as counts by dispatch version, `{d: number}`. Sorted by d, item i goes into
batch `version + i // groups` at the latest, where `version` is the next batch. The set is *feasible* when every item
meets `d + staleness >= version + i // groups`. Only the last item of each d can break that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from buffer.ledger.counts import GIVEN_UP_QUARANTINED
from buffer.ledger.evaluations import Reach
from buffer.ledger.state import LedgerState, Order
from buffer.ledger.types import FormedBatch, ItemState, LedgerError, Lengths, Outcome, Terms

MOST_ENDS = 2
LEAST_FAILURES, LEAST_BATCHES = 100, 3
"""So many failures in a row, and the groups of so many batches, end a run."""
LEAST_FLAT, LEAST_FLAT_BATCHES = 1000, 10
"""The same for groups without variance: if one group in 100 has some, 1,000 in a row have none once in 2 million
groups."""
LEAST_QUARANTINED = 10
"""The same for groups in quarantine: then the groups are not at fault."""


class LedgerView:
    def __init__(self, terms: Terms, state: LedgerState, order: Order) -> None:
        self._terms, self._state, self._order = terms, state, order
        self.most_flat = max(LEAST_FLAT, LEAST_FLAT_BATCHES * terms.groups)
        self.most_quarantined = max(LEAST_QUARANTINED, terms.groups)

    def finished(self) -> bool:
        return self.outcome() is not None

    def outcome(self) -> Outcome | None:
        """Why no further batch can be formed. Data that end without a batch, after failures, have failed."""
        state = self._state
        if self._terms.versions is not None and state.version >= self._terms.versions:
            return "versions"
        if state.trend.given_up:
            return "failed"
        if not self.all_dispatched() or state.pool.num_waiting or state.pool.num_open:
            return None
        return "data" if state.num_formed or not (self.failed() or self.num_quarantined) else "failed"

    @property
    def reach(self) -> Reach:
        is_over = self.outcome() in ("versions", "data")
        return Reach(self._state.ceiling, self._state.version if is_over else None)

    def room(self, dispatched: int, server: str = "") -> int:
        """How many items may be dispatched under version `dispatched` now.

        Near `run.versions`, places are kept for items that this server failed at.
        """
        terms, state, pool = self._terms, self._state, self._state.pool
        if state.trend.given_up:
            return 0
        free = room(pool.open, state.version, terms.groups, terms.target_staleness, dispatched)
        if terms.versions is not None:
            kept = pool.num_held + (pool.num_elsewhere(server) if server else 0)
            free = min(free, (terms.versions - state.version) * terms.groups - pool.num_open - kept)
        return max(free, 0)

    def admits(self, version: int) -> bool:
        """Whether a server that runs `version`, or an older one, may get an item now."""
        pool = self._state.pool
        left = not self.all_dispatched() or pool.num_waiting > pool.num_held
        return left and self.room(min(version, self._state.ceiling)) > 0

    def ready(self) -> bool:
        terms, state, pool = self._terms, self._state, self._state.pool
        if state.trend.given_up or (terms.versions is not None and state.version >= terms.versions):
            return False
        left = left_behind(pool.open, pool.stored_by, terms.groups)
        if len(pool.stored) >= terms.groups and feasible(left, state.version + 1, terms.groups, terms.max_staleness):
            return True
        return 0 < len(pool.stored) == pool.num_open and self.all_dispatched() and not pool.num_waiting

    def all_dispatched(self) -> bool:
        terms = self._terms
        return terms.epochs is not None and self._state.next_item >= terms.problems * terms.epochs

    def is_hopeless(self) -> bool:
        """Whether attempts fail and no group is made. Attempts under way count as successes."""
        failures, pool = self._state.trend.failures_in_row, self._state.pool
        attempts = failures + pool.num_open - len(pool.stored)
        enough = failures >= max(LEAST_FAILURES, LEAST_BATCHES * self._terms.groups)
        return enough and failures > self._terms.max_failed_share * attempts

    def leased(self) -> Iterator[ItemState]:
        state = self._state
        return (state.items[item] for server in state.servers.values() for item in server.leases.values())

    def counts(self) -> dict[str, int]:
        pool, totals = self._state.pool, self._state.totals
        now = {"leased": pool.num_open - len(pool.stored), "stored": len(pool.stored), "waiting": pool.num_waiting}
        trained = totals.groups("trained")
        return now | {
            "batched": self._state.num_formed - trained,
            "trained": trained,
            "dropped": totals.groups("dropped"),
            **({"quarantined": self.num_quarantined} if self.num_quarantined else {}),
        }

    def problems_by_state(self) -> dict[str, int]:
        return self._state.rows.bands | self._order.counts(self._state)

    def left_out(self) -> dict[int, str]:
        return self._state.rows.left_out

    @property
    def num_quarantined(self) -> int:
        return self._state.totals.groups("quarantined")

    def dropped(self) -> dict[str, int]:
        return {reason: lengths.groups for reason, lengths in self._state.totals.by("dropped").items()}

    def failed(self) -> dict[str, int]:
        return {reason: lengths.groups for reason, lengths in self._state.totals.by("failed").items()}

    def ages(self) -> dict[int, int]:
        return dict(sorted((int(age), lengths.groups) for age, lengths in self._state.totals.by("age").items()))

    def lengths(self) -> dict[str, Lengths]:
        return self._state.totals.lengths()


@dataclass
class Suspicion:
    """The starts of the learner that ended; -1: none.

    A killed learner names no cause. A batch that ended MOST_ENDS starts is *suspect*: the next learner tries each of
    its groups alone. A group whose trial ended MOST_ENDS starts is the culprit.
    """

    taken: int = -1
    suspect: int = -1
    suspect_ends: int = 0
    tried: int = -1
    alone: int = -1
    alone_ends: int = 0

    def is_suspect(self, version: int) -> bool:
        return version == self.suspect and self.suspect_ends >= MOST_ENDS

    def try_alone(self, item: int | None) -> None:
        self.tried = -1 if item is None else item

    def begin(self) -> int | None:
        """Count the end of the last start; returns the culprit. Only the first rank's call counts."""
        if self.taken >= 0:
            self.suspect_ends = self.suspect_ends + 1 if self.taken == self.suspect else 1
            self.suspect = self.taken
        if self.tried >= 0:
            self.alone_ends = self.alone_ends + 1 if self.tried == self.alone else 1
            self.alone = self.tried
        self.taken = self.tried = -1
        return self.alone if self.alone_ends >= MOST_ENDS else None

    def clear(self, version: int) -> None:
        if version >= self.taken:
            self.taken = self.tried = -1
        if version >= self.suspect:
            self.suspect = self.alone = -1
            self.suspect_ends = self.alone_ends = 0


class Batches:
    def __init__(
        self,
        terms: Terms,
        state: LedgerState,
        view: LedgerView,
        take_back_too_old: Callable[..., None],
        find: Callable[[int], ItemState | None],
    ) -> None:
        self._terms, self._state, self._view, self._find = terms, state, view, find
        self._take_back_too_old = take_back_too_old
        self.suspicion = Suspicion()

    def take(self, version: int) -> FormedBatch | None:
        """Batch `version`, formed now if it is the next one. None: not ready yet, or never (`view.finished()`).

        Raises LedgerError for a version beyond the next, or pruned.
        """
        state = self._state
        if version < state.oldest:
            raise LedgerError(self._pruned(version))
        if version > state.version:
            raise LedgerError(
                f"Take({version}): the next batch is {state.version}; restart the learner to rewind it to its "
                "checkpoint"
            )
        if version == state.version:
            if not self._view.ready():
                if state.trend.given_up:
                    state.announce()
                return None
            state.form(self._terms.groups)
        if state.ceiling <= version:
            state.ceiling = version + 1
            state.revision += 1
        if version > state.last_trained:
            self.suspicion.taken = version
        return state.batches[version]

    def trained(self, version: int) -> list[int]:
        """Mark batches up to `version` as trained; returns their items.

        Only the first rank's call has an effect, and none after a rewind: the batch must be taken again.
        """
        state = self._state
        if version >= state.version:
            raise LedgerError(
                f"Trained({version}): the next batch is {state.version}; restart the learner to rewind it"
            )
        if not state.last_trained < version < state.ceiling:
            return []
        newly = range(state.last_trained + 1, version + 1)
        state.mark(version)
        self.suspicion.clear(version)
        return [item for batch in newly for item in state.batches[batch].items]

    def rewind(self, version: int) -> int:
        """Count batches from `version` on as untrained; returns how many will be served again.

        Raises LedgerError for a version that the ledger does not reach or has pruned.
        """
        state = self._state
        if version != state.version and not state.num_formed:
            state.start_at(version)
            self._take_back_too_old()
        if version > state.version:
            raise LedgerError(
                f"the learner restored version {version}, but the buffer's next batch is {state.version}: they are not "
                "of one run; remove the run's buffer.sqlite or its checkpoints, or choose another run.name"
            )
        if version < state.oldest:
            raise LedgerError(self._pruned(version))
        state.rewind(version)
        state.begin_anew()
        self.suspicion.clear(version - 1)
        culprit = self.suspicion.begin()
        if culprit is not None and culprit in state.items:
            self.quarantine(culprit, f"the learner ended {MOST_ENDS} times while it tried this group by itself")
        return state.version - version

    def prune(self, oldest_kept: int) -> int:
        """Forget older batches; returns the oldest that is left."""
        state = self._state
        state.prune(max(state.oldest, min(oldest_kept, state.last_trained + 1)))
        return state.oldest

    def try_alone(self, version: int, number: int | None) -> None:
        batch = self._state.batches.get(version)
        if number is not None and (batch is None or number not in batch.items):
            raise LedgerError(f"item {number} is not in batch {version}: take the batch again")
        self.suspicion.try_alone(number)

    def quarantine(self, number: int, reason: str) -> bool:
        """Keep a group and never train it; returns whether that is news.

        Raises LedgerError if there is no group, or its batch was trained.
        """
        item = self._find(number)
        if item is not None and item.state == "quarantined":
            return False
        if item is None or item.state not in ("stored", "batched"):
            now = "not known here" if item is None else item.state
            raise LedgerError(f"item {number} is {now}: only a group that is stored or batched goes into quarantine")
        if item.state == "batched" and item.batch <= self._state.last_trained:
            raise LedgerError(f"item {number} was trained in batch {item.batch}: it cannot go into quarantine any more")
        if item.state == "batched":
            self._take_out(item)
        self._state.quarantine(item, reason)
        trend = self._state.trend
        if trend.quarantined_in_row >= self._view.most_quarantined and not trend.given_up:
            self._state.give_up_run(GIVEN_UP_QUARANTINED)
        return True

    def _take_out(self, item: ItemState) -> None:
        """If no group is left, this batch and all later ones are formed anew: batches are consecutive."""
        batch = item.batch
        self._state.take_out(item)
        self.suspicion.clear(batch)
        if not self._state.batches[batch].items:
            self._state.unform(batch)
            self._take_back_too_old(item.number)

    def _pruned(self, version: int) -> str:
        return (
            f"batch {version} is gone, the buffer keeps those from {self._state.oldest} on: restore a checkpoint of at "
            "least that version, or remove the run's buffer.sqlite and checkpoints to begin anew"
        )


def feasible(counts: Mapping[int, int], version: int, groups: int, staleness: int) -> bool:
    end = 0
    for dispatched in sorted(counts):
        end += counts[dispatched]
        if counts[dispatched] and dispatched + staleness < version + (end - 1) // groups:
            return False
    return True


def room(counts: Mapping[int, int], version: int, groups: int, staleness: int, dispatched: int) -> int:
    """How many more items of `dispatched` may be opened.

    Older items are not checked: a straggler that missed a tighter target must not close admission.
    """
    end = sum(number for d, number in counts.items() if d <= dispatched)
    free = (dispatched + staleness - version + 1) * groups - end
    for d in sorted(d for d in counts if d > dispatched):
        end += counts[d]
        free = min(free, (d + staleness - version + 1) * groups - end)
    return max(free, 0)


def left_behind(counts: Mapping[int, int], stored: Mapping[int, int], groups: int) -> dict[int, int]:
    left, wanted = dict(counts), groups
    for d in sorted(stored):
        taken = min(stored[d], wanted)
        left[d] -= taken
        wanted -= taken
    return left


def keepable(dispatched: Iterable[int], version: int, groups: int, staleness: int) -> list[bool]:
    """Which items to keep, so that as many as possible are feasible."""
    kept, verdicts = 0, []
    for d in dispatched:
        verdicts.append(d + staleness >= version + kept // groups)
        kept += verdicts[-1]
    return verdicts
