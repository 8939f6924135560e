"""What can be asked of the ledger without changing it: how far the run is, what may happen next, and counts for people.

Part of the ledger (`rules.py` decides by it). Everything is computed from the state when it is asked for.
"""

from collections.abc import Iterator

from buffer.ledger.evaluations import Reach
from buffer.ledger.order import Order
from buffer.ledger.pool import room
from buffer.ledger.state import LedgerState
from buffer.ledger.types import ItemState, Lengths, Outcome, Terms

LEAST_FAILURES, LEAST_BATCHES = 100, 3
"""A run is given up after so many failures in a row, and after as many as the groups of so many batches."""
LEAST_FLAT, LEAST_FLAT_BATCHES = 1000, 10
"""The same for groups in a row that `skip_zero_variance` leaves out. The limit is higher because such a group is not a
fault: if one group in 100 has variance, 1,000 in a row without variance come once in 2 million groups; if one in 200
has, once in 30,000."""
LEAST_QUARANTINED = 10
"""A run is given up after so many groups, and the groups of a batch, were put into quarantine and none was trained:
then it is not the groups that are at fault."""


class LedgerView:
    """`ledger.view`; changes nothing."""

    def __init__(self, terms: Terms, state: LedgerState, order: Order) -> None:
        self._terms, self._state, self._order = terms, state, order
        self.most_flat = max(LEAST_FLAT, LEAST_FLAT_BATCHES * terms.groups)
        """Number of groups in a row without variance that ends the run."""
        self.most_quarantined = max(LEAST_QUARANTINED, terms.groups)
        """Number of groups put into quarantine in a row, none trained between them, that ends the run."""

    # how far the run is

    def finished(self) -> bool:
        """No further batch can be formed."""
        return self.outcome() is not None

    def outcome(self) -> Outcome | None:
        """Why no further batch can be formed; None while one may be.

        No version is left; or the run was given up, because all attempts fail or all groups lack variance; or no
        problem is left and no item is open. If attempts failed and no problem ever got into a batch, the run failed
        too.
        """
        state = self._state
        if self._terms.versions is not None and state.version >= self._terms.versions:
            return "versions"
        if state.trend.given_up:
            return "failed"
        if not self.used_up() or state.pool.num_open:
            return None
        return "data" if state.num_formed or not (self.failed() or self.num_quarantined) else "failed"

    @property
    def reach(self) -> Reach:
        """How far the policy can be, and which version is the last."""
        is_over = self.outcome() in ("versions", "data")
        return Reach(self._state.ceiling, self._state.version if is_over else None)

    # what may happen next

    def room(self, dispatched: int, server: str = "") -> int:
        """How many items may be dispatched under version `dispatched` now, to `server` if one is named; none once the
        run was given up.

        Near `run.versions`, places are kept for items that this server failed at: another server, or after a while any,
        takes those.
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
        """Whether some server that runs `version` may get an item now. If not, none that runs an older one may."""
        pool = self._state.pool
        left = not self.all_dispatched() or pool.num_waiting > pool.num_held
        return left and self.room(min(version, self._state.ceiling)) > 0

    def ready(self) -> bool:
        """Whether batch v' can be formed."""
        terms, state, pool = self._terms, self._state, self._state.pool
        if state.trend.given_up or (terms.versions is not None and state.version >= terms.versions):
            return False
        if pool.ready(state.version, terms.groups, terms.max_staleness):
            return True
        return self.used_up() and 0 < pool.num_stored == pool.num_open

    def used_up(self) -> bool:
        """No problem is left to dispatch."""
        return self.all_dispatched() and not self._state.pool.num_waiting

    def all_dispatched(self) -> bool:
        """Every problem of every epoch was dispatched once."""
        terms = self._terms
        return terms.epochs is not None and self._state.next_item >= terms.problems * terms.epochs

    def is_hopeless(self) -> bool:
        """Whether attempts fail and no group is made any more.

        Fast failures must not end a run whose groups take long: what is under way counts as if it would succeed.
        """
        failures, pool = self._state.trend.failures_in_row, self._state.pool
        attempts = failures + pool.num_open - pool.num_stored
        enough = failures >= max(LEAST_FAILURES, LEAST_BATCHES * self._terms.groups)
        return enough and failures > self._terms.max_failed_share * attempts

    # for people

    def leased(self) -> Iterator[ItemState]:
        """The items out on lease, server by server."""
        state = self._state
        return (state.items[item] for server in state.servers.values() for item in server.leases.values())

    def counts(self) -> dict[str, int]:
        """Items by state: leased, stored, waiting; batched (not yet trained), trained, dropped and, if there are some,
        quarantined in the whole run."""
        pool, totals = self._state.pool, self._state.totals
        now = {"leased": pool.num_open - pool.num_stored, "stored": pool.num_stored, "waiting": pool.num_waiting}
        trained = totals.groups("trained")
        return now | {
            "batched": self._state.num_formed - trained,
            "trained": trained,
            "dropped": totals.groups("dropped"),
            **({"quarantined": self.num_quarantined} if self.num_quarantined else {}),
        }

    def problems_by_state(self) -> dict[str, int]:
        """How many rows of the data set are in each band, retired, left out."""
        rows = self._state.rows
        return rows.bands() | self._order.counts(self._state) | {"left_out": len(rows.left_out)}

    def left_out(self) -> dict[int, str]:
        """Rows that are not drawn any more: `KIND: REASON` of the last failure by row."""
        return self._state.rows.left_out

    @property
    def num_quarantined(self) -> int:
        """Groups put into quarantine in the whole run."""
        return self._state.totals.groups("quarantined")

    def dropped(self) -> dict[str, int]:
        """Dropped items by reason, in the whole run."""
        return {reason: lengths.groups for reason, lengths in self._state.totals.by("dropped").items()}

    def failed(self) -> dict[str, int]:
        """Failed attempts by `KIND: REASON`, in the whole run."""
        return {reason: lengths.groups for reason, lengths in self._state.totals.by("failed").items()}

    def ages(self) -> dict[int, int]:
        """Groups of formed batches by age, in the whole run."""
        return dict(sorted((int(age), lengths.groups) for age, lengths in self._state.totals.by("age").items()))

    def lengths(self) -> dict[str, Lengths]:
        """Lengths by what became of the samples: `generated`, `trained`, `quarantined`, `dropped: REASON`,
        `discarded: REASON`."""
        return self._state.totals.lengths()
