"""Answers what can be asked of the ledger without changing it."""

from collections.abc import Iterator

from buffer.ledger.evaluations import Reach
from buffer.ledger.order import Order
from buffer.ledger.pool import feasible, left_behind, room
from buffer.ledger.state import LedgerState
from buffer.ledger.types import ItemState, Lengths, Outcome, Terms

LEAST_FAILURES, LEAST_BATCHES = 100, 3
"""So many failures in a row, and the groups of so many batches, end a run."""
LEAST_FLAT, LEAST_FLAT_BATCHES = 1000, 10
"""The same for groups without variance. If one group in 100 has variance, 1,000 in a row without come once in 2 million
groups; if one in 200, once in 30,000."""
LEAST_QUARANTINED = 10
"""So many groups in quarantine in a row, and those of a batch, end a run: then the groups are not at fault."""


class LedgerView:
    """`ledger.view`; changes nothing."""

    def __init__(self, terms: Terms, state: LedgerState, order: Order) -> None:
        self._terms, self._state, self._order = terms, state, order
        self.most_flat = max(LEAST_FLAT, LEAST_FLAT_BATCHES * terms.groups)
        self.most_quarantined = max(LEAST_QUARANTINED, terms.groups)

    def finished(self) -> bool:
        return self.outcome() is not None

    def outcome(self) -> Outcome | None:
        """Why no further batch can be formed. A run whose data end without a batch, after failures, failed too."""
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
        """Whether some server that runs `version`, or an older one, may get an item now."""
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
        """Whether attempts fail and no group is made. Attempts under way count as if they would succeed."""
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
