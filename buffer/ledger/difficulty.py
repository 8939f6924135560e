"""Draws problems by how hard they are: each band of solved share gets its share of the draws (docs/difficulty.md).

A row is not drawn while its item is open or waiting, nor while it rests. If no row is ready, the one whose rest ends
first comes, then the one that was drawn longest ago. A buffer that is started again draws the same rows.
"""

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from buffer.ledger import schedule
from buffer.ledger.counts import BANDS
from buffer.ledger.state import LedgerState

PARTS = 10**6
"""Turns are whole numbers, of millionths."""
RESTING = ("resting", "retired")
OPEN_OR_WAITING = ("waiting", "leased", "stored")


class Shares(NamedTuple):
    """`data.difficulty`; `bands` has the weight of each of BANDS."""

    bands: Mapping[str, float]
    rest: int = 2
    return_after: int = 50


class RowPlace(NamedTuple):
    kind: str
    """A band, if the row may be drawn; or `busy`, `resting`, `retired`."""
    last_item: int
    due: int = 0


class Turns:
    """Smooth weighted round robin: each turn adds its weight to every ready name; the largest sum comes, and pays all
    weights."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._weights = {name: max(1, round(PARTS * weight / total)) for name, weight in weights.items()}
        self.sums = dict.fromkeys(weights, 0)

    def next(self, ready: Sequence[str]) -> str:
        for name in ready:
            self.sums[name] += self._weights[name]
        chosen = max(ready, key=lambda name: self.sums[name])
        self.sums[chosen] -= sum(self._weights[name] for name in ready)
        return chosen


@dataclass
class SourceRows:
    fresh: Sequence[int]
    turns: Turns
    begun: int = 0
    ready: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {band: [] for band in BANDS})
    """A heap of (last item, row), with outdated entries."""


class DifficultyOrder:
    """Draws by difficulty. `shares` has rows and weight of each source."""

    def __init__(
        self,
        problems: int,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        shares: Sequence[tuple[int, float]],
        difficulty: Shares,
    ) -> None:
        self._problems, self._epochs, self._difficulty = problems, epochs, difficulty
        sizes = [rows for rows, _ in shares] or [problems]
        self._starts = list(accumulate(sizes, initial=0))
        weights = [weight for _, weight in shares] or [1.0]
        self._turns = Turns({str(part): weight for part, weight in enumerate(weights)})
        self._sources = []
        for part, (start, number) in enumerate(zip(self._starts, sizes, strict=False)):
            rows = schedule.order(number, f"{seed}/{part}" if shares else seed, 0, shuffle)
            self._sources.append(SourceRows(array("q", (start + row for row in rows)), Turns(difficulty.bands)))
        self._places: dict[int, RowPlace] = {}
        self._resting: list[tuple[int, int, int]] = []
        """A heap of (due, last item, row), with outdated entries."""
        self._busy: set[int] = set()
        self._retired = 0
        self._version = -1
        """The next batch when the index was made; -1: not made."""

    def draw(self, state: LedgerState) -> int | None:
        if self._is_over(state):
            return None
        self._update(state)
        return self._drawn(state)

    def upcoming(self, state: LedgerState, number: int) -> Sequence[int]:
        """Draws the next rows, and puts them back."""
        if self._is_over(state):
            return ()
        self._update(state)
        turns = [self._turns, *(source.turns for source in self._sources)]
        sums, begun = [dict(each.sums) for each in turns], [source.begun for source in self._sources]
        if self._epochs is not None:
            number = min(number, self._problems * self._epochs - state.next_item)
        rows = list[int]()
        for item in range(state.next_item, state.next_item + number):
            if (row := self._drawn(state)) is None:
                break
            rows.append(row)
            self._put(row, RowPlace("busy", item))
        for each, before in zip(turns, sums, strict=True):
            each.sums = before
        for source, place in zip(self._sources, begun, strict=True):
            source.begun = place
        for row in {*rows}:
            self._put(row, self._place_of(state, row))
        return rows

    def skip(self, state: LedgerState) -> None:
        """Does nothing."""

    @property
    def counters(self) -> dict[str, int]:
        found = {f"turns/{name}": number for name, number in self._turns.sums.items()}
        for part, source in enumerate(self._sources):
            found |= {f"turns/{part}/{band}": number for band, number in source.turns.sums.items()}
        return found

    def restore(self, scalars: Mapping[str, int]) -> None:
        for name in self._turns.sums:
            self._turns.sums[name] = scalars.get(f"turns/{name}", 0)
        for part, source in enumerate(self._sources):
            source.turns.sums = {band: scalars.get(f"turns/{part}/{band}", 0) for band in BANDS}
        self._version = -1

    def counts(self, state: LedgerState) -> dict[str, int]:
        self._update(state)
        return {"retired": self._retired}

    def _is_over(self, state: LedgerState) -> bool:
        past = self._epochs is not None and state.next_item >= self._problems * self._epochs
        return past or state.rows.all_left_out

    def _drawn(self, state: LedgerState) -> int | None:
        parts = [part for part, source in enumerate(self._sources) if self._ready_bands(state, source)]
        if parts:
            source = self._sources[int(self._turns.next([str(part) for part in parts]))]
            band = source.turns.next(self._ready_bands(state, source))
            fresh = self._first_fresh(state, source) if band == "unseen" else None
            row = heapq.heappop(source.ready[band])[1] if fresh is None else fresh
        elif self._first_resting() is not None:
            row = heapq.heappop(self._resting)[-1]
        elif self._busy:
            row = min(self._busy, key=lambda row: self._places[row].last_item)
        else:
            return None
        self._put(row, None)
        return row

    def _ready_bands(self, state: LedgerState, source: SourceRows) -> list[str]:
        for band, heap in source.ready.items():
            while heap and self._places.get(heap[0][1]) != RowPlace(band, heap[0][0]):
                heapq.heappop(heap)
        fresh = self._first_fresh(state, source) is not None
        return [band for band in BANDS if source.ready[band] or (band == "unseen" and fresh)]

    def _first_fresh(self, state: LedgerState, source: SourceRows) -> int | None:
        rows = state.rows
        while source.begun < len(source.fresh):
            row = source.fresh[source.begun]
            if row not in rows.records and row not in self._places:
                return row
            source.begun += 1
        return None

    def _first_resting(self) -> tuple[int, int, int] | None:
        while self._resting:
            due, last_item, row = self._resting[0]
            place = self._places.get(row)
            if place is not None and place.kind in RESTING and (place.due, place.last_item) == (due, last_item):
                return due, last_item, row
            heapq.heappop(self._resting)
        return None

    def _update(self, state: LedgerState) -> None:
        if self._version < 0 or state.version < self._version:  # a lower version: rests that were over go on
            self._clear()
            state.rows.moved.update(state.rows.records)
        self._version = state.version
        for row in sorted(state.rows.moved):
            self._put(row, self._place_of(state, row))
        state.rows.moved.clear()
        while (first := self._first_resting()) and first[0] <= state.version:
            heapq.heappop(self._resting)
            self._put(first[-1], self._place_of(state, first[-1]))

    def _clear(self) -> None:
        self._places.clear()
        self._resting.clear()
        self._busy.clear()
        self._retired = 0
        for source in self._sources:
            source.begun, source.ready = 0, {band: [] for band in BANDS}

    def _place_of(self, state: LedgerState, row: int) -> RowPlace | None:
        record = state.rows.records.get(row)
        if record is None or row in state.rows.left_out:
            return None
        item = state.items.get(record.last_item)
        if item is not None and item.state in OPEN_OR_WAITING:
            return RowPlace("busy", record.last_item)
        marks, difficulty = state.rows.marks, self._difficulty
        is_retired = record.streak >= marks.streak
        due = record.last_version + difficulty.rest + difficulty.return_after * is_retired
        if due > state.version:
            return RowPlace("retired" if is_retired else "resting", record.last_item, due)
        return RowPlace(record.band(marks.streak), record.last_item)

    def _put(self, row: int, place: RowPlace | None) -> None:
        before = self._places.pop(row, None)
        if before is not None:
            self._busy.discard(row)
            self._retired -= before.kind == "retired"
        if place is None:
            return
        self._places[row] = place
        self._retired += place.kind == "retired"
        if place.kind == "busy":
            self._busy.add(row)
        elif place.kind in RESTING:
            heapq.heappush(self._resting, (place.due, place.last_item, row))
        else:
            source = self._sources[bisect_right(self._starts, row) - 1]
            heapq.heappush(source.ready[place.kind], (place.last_item, row))
