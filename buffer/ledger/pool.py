"""The open items as sets: which wait to be dispatched, which are stored, how many are open under each dispatch version.

Part of the ledger (`buffer/ledger/state.py` moves the items); here they are counted and kept in order. Every operation costs
the logarithm of the number of items, or the number of distinct dispatch versions.
"""

import heapq
from collections import Counter
from collections.abc import Iterable

from buffer.ledger import schedule
from buffer.ledger.types import OPEN, ItemState


class Pool:
    """Open items are leased or stored; waiting ones were open and failed, or were taken back."""

    def __init__(self, entries: Iterable[ItemState] = ()) -> None:
        entries = list(entries)
        self.open = Counter(entry.version for entry in entries if entry.state in OPEN)
        """Open items by dispatch version."""
        self._waiting = [entry.item for entry in entries if entry.state == "waiting"]
        self._stored = [(entry.version, entry.item) for entry in entries if entry.state == "stored"]
        heapq.heapify(self._waiting)
        heapq.heapify(self._stored)
        self._stored_by = Counter(version for version, _ in self._stored)

    @property
    def num_open(self) -> int:
        """Items leased or stored."""
        return self.open.total()

    @property
    def num_stored(self) -> int:
        """Items stored."""
        return len(self._stored)

    @property
    def num_waiting(self) -> int:
        """Items to be dispatched again."""
        return len(self._waiting)

    def wait(self, item: int) -> None:
        """The item waits to be dispatched again."""
        heapq.heappush(self._waiting, item)

    def next_waiting(self) -> int | None:
        """Take out the waiting item that comes first."""
        return heapq.heappop(self._waiting) if self._waiting else None

    def opens(self, version: int) -> None:
        """An item was leased under `version`."""
        self.open[version] += 1

    def closes(self, version: int) -> None:
        """A leased item of `version` is open no more."""
        _less(self.open, version)

    def stores(self, version: int, item: int) -> None:
        """A leased item is stored."""
        heapq.heappush(self._stored, (version, item))
        self._stored_by[version] += 1

    def takes(self, number: int) -> list[tuple[int, int]]:
        """Take out the `number` stored items with the smallest (d, sequence), in that order."""
        taken = [heapq.heappop(self._stored) for _ in range(number)]
        for version, _ in taken:
            _less(self._stored_by, version)
            _less(self.open, version)
        return taken

    def ready(self, version: int, groups: int, staleness: int) -> bool:
        """Whether batch `version` may take its groups: there are enough, and those left behind keep the bound."""
        if len(self._stored) < groups:
            return False
        left = schedule.left_behind(self.open, self._stored_by, groups)
        return schedule.feasible(left, version + 1, groups, staleness)


def _less(counts: Counter[int], version: int) -> None:
    counts[version] -= 1
    if not counts[version]:
        del counts[version]
