"""What a run knows of each row of its data set: how often it was drawn, its solved share, and whether it only fails.

Part of the ledger (`state.py` notes what happens, `difficulty.py` draws by it); stored in the table `rows`. A row that
was never drawn has no record.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from buffer.ledger.types import FailureKind, RowValues

BANDS = ("unseen", "unsolved", "between", "solved")
"""No group yet; none of its samples solved; some; all."""
OWN_FAILURES = ("reward", "task", "prompt")
"""Kinds of failures that may come from the row. Failures of vLLM and of the infrastructure may not."""


class Marks(NamedTuple):
    """When a sample is solved, and when a row is always or never solved."""

    solved_at: float = 1.0
    """Reward from which on a sample is solved."""
    streak: int = 2
    """Groups in a row after which older ones count no longer."""


@dataclass(slots=True)
class RowRecord:
    """One row of the data set, and a row of the store's table `rows`."""

    row: int
    drawn: int = 0
    """Items that were made of it."""
    groups: int = 0
    samples: int = 0
    solved: int = 0
    streak: int = 0
    """Groups in a row with all samples solved; negative: with none solved; 0: the last group had both."""
    last_item: int = -1
    last_version: int = 0
    """The next batch to be formed when `last_item` was drawn."""
    failed: int = 0
    """Attempts that failed by a kind of OWN_FAILURES."""
    hopeless: int = 0
    """1: such a failure was permanent."""
    reason: str = ""
    """`KIND: REASON` of the last one."""

    def row_values(self) -> RowValues:
        """What the store writes, in the order of the fields."""
        counts = (self.row, self.drawn, self.groups, self.samples, self.solved, self.streak)
        return (*counts, self.last_item, self.last_version, self.failed, self.hopeless, self.reason)

    def band(self, streak: int) -> str:
        """Return the band (BANDS). After `streak` equal groups in a row, earlier groups count no longer."""
        if not self.groups:
            return "unseen"
        if self.solved == self.samples or self.streak >= streak:
            return "solved"
        return "unsolved" if self.solved == 0 or self.streak <= -streak else "between"

    def is_left_out(self, attempts: int) -> bool:
        """Whether it failed all its attempts, at least `attempts` of them, and never made a group."""
        return not self.groups and bool(self.hopeless or self.failed >= attempts)


class Rows:
    """The records of all rows that were drawn. `attempts`: as many failures leave a row out."""

    def __init__(self, problems: int = 0, marks: Marks | None = None, attempts: int = 3) -> None:
        self.problems, self.marks, self.attempts = problems, marks or Marks(), attempts
        self.records: dict[int, RowRecord] = {}
        self.left_out: dict[int, str] = {}
        """`KIND: REASON` by row that is not drawn any more."""
        self.news: list[int] = []
        """Rows that were left out since the list was last cleared; not written down."""
        self.moved: set[int] = set()
        """Rows of items that have changed since whoever draws has last looked; not written down."""
        self._bands: Counter[str] = Counter()
        self._changed: set[int] = set()

    @property
    def all_left_out(self) -> bool:
        """Whether no row is left to draw."""
        return 0 < self.problems <= len(self.left_out)

    def bands(self) -> dict[str, int]:
        """How many rows are in each of BANDS. Rows that are left out are in none."""
        known = {band: self._bands[band] for band in BANDS}
        return known | {"unseen": self.problems - len(self.records) + self._bands["unseen"]}

    def note_drawn(self, row: int, item: int, version: int) -> None:
        """An item was made of the row."""
        record = self._edited(row)
        record.drawn, record.last_item, record.last_version = record.drawn + 1, item, version
        self._count(record, 1)

    def note_group(self, row: int, rewards: Sequence[float]) -> None:
        """A group was made of the row: if it was left out, it is drawn again."""
        if self.left_out.pop(row, None) is not None:
            self._count(self.records[row], 1)
        solved = sum(reward >= self.marks.solved_at for reward in rewards)
        record = self._edited(row)
        record.groups, record.samples = record.groups + 1, record.samples + len(rewards)
        record.solved += solved
        sign = 1 if solved == len(rewards) else -1 if not solved else 0
        record.streak = record.streak + sign if sign * record.streak > 0 else sign
        self._count(record, 1)

    def note_failure(self, row: int, kind: FailureKind, failure: str, permanent: bool) -> bool:
        """An attempt at the row failed. Returns whether the row is left out from now on."""
        if kind not in OWN_FAILURES:
            return False
        record = self._edited(row)
        record.failed, record.reason = record.failed + 1, failure
        record.hopeless |= permanent
        self._count(record, 1)
        if record.is_left_out(self.attempts) and row not in self.left_out:
            self.news.append(row)
            self._count(record, -1)
            self.left_out[row] = failure
        elif row in self.left_out:
            self.left_out[row] = failure
        return row in self.left_out

    def draw_again(self) -> None:
        """Rows that are left out are drawn again: their failures count no longer."""
        back, self.left_out = list(self.left_out), {}
        for row in back:
            record = self.records[row]
            record.failed, record.hopeless = 0, 0
            self._changed.add(row)
            self._count(record, 1)
        self.moved.update(back)

    def drain(self) -> dict[int, RowValues]:
        """The records that changed since the last call."""
        changed, self._changed = self._changed, set()
        return {row: self.records[row].row_values() for row in changed}

    def restore(self, saved: Iterable[RowValues]) -> None:
        """Continue with what the store kept; this must be new. A row whose failures are fewer than `attempts` now is
        drawn again."""
        for values in saved:
            record = RowRecord(*values)  # type: ignore[arg-type]
            self.records[record.row] = record
            if record.is_left_out(self.attempts):
                self.left_out[record.row] = record.reason
            else:
                self._count(record, 1)

    def _edited(self, row: int) -> RowRecord:
        """The record, which is about to change: it is in no band until it is counted again."""
        if (record := self.records.get(row)) is None:
            record = self.records[row] = RowRecord(row)
        else:
            self._count(record, -1)
        self._changed.add(row)
        return record

    def _count(self, record: RowRecord, times: int) -> None:
        if record.row not in self.left_out:
            self._bands[record.band(self.marks.streak)] += times
