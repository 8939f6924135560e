"""How an attempt at an item begins and ends: which item is next, who tries it again, and when the run is given up.

Part of the ledger (`rules.py` calls it for the requests of rollout servers).
"""

from collections.abc import Sequence

from buffer.ledger import schedule
from buffer.ledger.order import Order
from buffer.ledger.state import LedgerState, ServerRecord
from buffer.ledger.trend import GIVEN_UP_FAILED, GIVEN_UP_FLAT, GIVEN_UP_ROWS
from buffer.ledger.types import OPEN, FailureKind, ItemState, SampleStats, Terms, server_name
from buffer.ledger.view import LedgerView

ZERO_VARIANCE = "zero variance"


class Attempts:
    """`order` draws the rows of new items."""

    def __init__(self, terms: Terms, state: LedgerState, order: Order, view: LedgerView) -> None:
        self._terms, self._state, self._order, self._view = terms, state, order, view

    def next_item(self, server: str) -> ItemState | None:
        """The item to dispatch next to `server`: a waiting one, else a new one, else None."""
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
        """Whether the server has sent something within `lease_s`."""
        return now < server.heard + self._terms.lease_s

    def store(self, item: ItemState, samples: Sequence[SampleStats], now: float) -> bool:
        """The leased item has a group. False: it cannot be trained, and the attempt has failed."""
        if wrong := self._wrong_versions(item, samples):
            self.end(item, wrong, now, "engine")
            return False
        oldest = min((sample.oldest for sample in samples if sample.oldest is not None), default=item.version)
        if oldest < item.version and not self._redate(item, oldest):
            bound = f"within {self._terms.max_staleness} versions"
            self.end(item, f"sampled under version {oldest}, it could not be trained {bound}", now)
            return False
        flat = self._terms.skip_zero_variance and len({sample.reward for sample in samples}) == 1
        self._state.accept(item, samples, ZERO_VARIANCE if flat else None)
        if self._state.trend.flat_in_row >= self._view.most_flat and not self._state.trend.given_up:
            self._state.give_up_run(GIVEN_UP_FLAT)
        return True

    def end(
        self, item: ItemState, reason: str, now: float, kind: FailureKind = "infrastructure", permanent: bool = False
    ) -> None:
        """An attempt failed. The next one is made by another server if there is one that lives; but if that does not
        ask within `lease_s`, by any."""
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
        """All attempts of this server failed."""
        for number in list(server.leases.values()):
            self.end(self._state.items[number], reason, now)

    def take_back_too_old(self, but: int = -1) -> None:
        """Take back the open items that cannot be trained within the bound, `but` one: v' or the bound was set from
        outside."""
        state, most = self._state, self._terms.max_staleness
        opened = (item for item in state.items.values() if item.state in OPEN and item.number != but)
        items = sorted(opened, key=lambda item: (item.version, item.number))
        sound = [item for item in items if item.version <= state.ceiling]
        kept = schedule.keepable([item.version for item in sound], state.version, self._terms.groups, most)
        void = [item for item, keep in zip(sound, kept, strict=True) if not keep] + items[len(sound) :]
        if void:
            state.take_back(void, f"could not be trained within {most} versions of {state.version}")

    def _wrong_versions(self, item: ItemState, samples: Sequence[SampleStats]) -> str:
        """Why no server can have had the policies that sampled these tokens: newer than any there is, or older than its
        server's at the dispatch, to which only a rewind leads back; "" where one can."""
        state, d = self._state, item.version
        newest = max((sample.newest for sample in samples if sample.newest is not None), default=0)
        oldest = min((sample.oldest for sample in samples if sample.oldest is not None), default=d)
        if newest > (most := max(state.ceiling, state.undone.reached)):
            return f"sampled under version {newest}, and no policy above version {most} exists"
        if oldest < (least := state.undone.least(d)):
            return f"sampled under version {oldest}, and its server had version {least} or a later one"
        return ""

    def _redate(self, item: ItemState, version: int) -> bool:
        """Have the open item count as dispatched under the older `version`, if all stay within the bound."""
        counts = dict(self._state.pool.open)
        counts[item.version] -= 1
        counts[version] = counts.get(version, 0) + 1
        if not schedule.feasible(counts, self._state.version, self._terms.groups, self._terms.max_staleness):
            return False
        self._state.redate(item, version)
        return True
