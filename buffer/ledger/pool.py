"""The open items as sets, and the arithmetic of the bound on their age.

The functions below `Pool` take open items as counts by dispatch version, `{d: number}`. Sorted by d, the item at index
i goes into batch `version + i // groups` at the latest, where `version` is the next batch. The set is *feasible* when
every item meets `d + staleness >= version + i // groups`. Only the last item of each d can break that.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from buffer.ledger.types import OPEN, ItemState, server_name

NOBODY = ""


class Pool:
    """Open items, and those that wait to be dispatched again."""

    def __init__(self, items: Iterable[ItemState] = ()) -> None:
        items = list(items)
        self.open = Counter(item.version for item in items if item.state in OPEN)
        """By dispatch version."""
        self.stored = [(item.version, item.number) for item in items if item.state == "stored"]
        """A heap of (d, item)."""
        heapq.heapify(self.stored)
        self.stored_by = Counter(version for version, _ in self.stored)
        """By dispatch version."""
        self._anywhere: list[int] = []
        self._elsewhere: dict[str, deque[tuple[float, int]]] = {}
        """(until when, item) by the server that failed at them. Items under NOBODY go to no server until then."""
        for item in sorted((item for item in items if item.state == "waiting"), key=lambda item: item.elsewhere_until):
            self.wait(item)

    @property
    def num_open(self) -> int:
        return self.open.total()

    @property
    def num_waiting(self) -> int:
        return len(self._anywhere) + sum(map(len, self._elsewhere.values()))

    def num_elsewhere(self, server: str) -> int:
        """Items that wait for another server."""
        return len(self._elsewhere.get(server_name(server), ()))

    @property
    def num_held(self) -> int:
        """Items that go to no server before their time."""
        return len(self._elsewhere.get(NOBODY, ()))

    def wait(self, item: ItemState) -> None:
        if item.elsewhere_until:
            held = self._elsewhere.setdefault(NOBODY if item.held_back else server_name(item.server), deque())
            held.append((item.elsewhere_until, item.number))
        else:
            heapq.heappush(self._anywhere, item.number)

    @property
    def next_wait_end(self) -> float | None:
        """When the first waiting item may go to any server."""
        return min((held[0][0] for held in self._elsewhere.values()), default=None)

    def end_waits(self, now: float) -> None:
        for name, held in list(self._elsewhere.items()):
            while held and now >= held[0][0]:
                heapq.heappush(self._anywhere, held.popleft()[1])
            if not held:
                del self._elsewhere[name]

    def next_waiting(self, server: str) -> int | None:
        elsewhere = self._elsewhere.items()
        fronts = {held[0][1]: name for name, held in elsewhere if name not in (NOBODY, server_name(server))}
        first = min([*fronts, *self._anywhere[:1]], default=None)
        if first in fronts:
            self._elsewhere[fronts[first]].popleft()
            if not self._elsewhere[fronts[first]]:
                del self._elsewhere[fronts[first]]
        elif first is not None:
            heapq.heappop(self._anywhere)
        return first

    def remove_open(self, version: int) -> None:
        self.open -= Counter((version,))

    def store(self, version: int, item: int) -> None:
        heapq.heappush(self.stored, (version, item))
        self.stored_by[version] += 1

    def take(self, number: int) -> list[tuple[int, int]]:
        """Take out the stored items with the smallest (d, item)."""
        taken = [heapq.heappop(self.stored) for _ in range(number)]
        by_version = Counter(version for version, _ in taken)
        self.open -= by_version
        self.stored_by -= by_version
        return taken


def feasible(counts: Mapping[int, int], version: int, groups: int, staleness: int) -> bool:
    """Whether all open items can still be trained within the bound."""
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
    """The open items that remain after the next batch."""
    left, wanted = dict(counts), groups
    for d in sorted(stored):
        taken = min(stored[d], wanted)
        left[d] -= taken
        wanted -= taken
    return left


def keepable(dispatched: Iterable[int], version: int, groups: int, staleness: int) -> list[bool]:
    """Which items, in order, to keep, so that as many as possible are feasible."""
    kept, verdicts = 0, []
    for d in dispatched:
        verdicts.append(d + staleness >= version + kept // groups)
        kept += verdicts[-1]
    return verdicts
