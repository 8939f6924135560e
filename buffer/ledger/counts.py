"""What the ledger counts: over the whole run, lately, and by row of the data set."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple, TypeVar

from buffer.ledger.types import FailureKind, Lengths, RowValues

MANY_REASONS = 64
LONG_REASON = 200
OTHER = "other reasons"
NONE = Lengths()
GIVEN_UP_FAILED, GIVEN_UP_FLAT, GIVEN_UP_QUARANTINED, GIVEN_UP_ROWS = 1, 2, 3, 4
"""Why a run was given up."""
EXAMPLES = 3
REMEMBERED = 1024
"""Numbers kept for each server, to recognise repeats."""
T = TypeVar("T")
BANDS = ("unseen", "unsolved", "between", "solved")
"""No group yet; no sample solved; some; all."""
OWN_FAILURES = ("reward", "task", "prompt")


class Totals:
    """Totals by (what, which).

    `retried`: groups that were not made at the first attempt; `age`: groups of formed batches by age; `discarded`:
    groups whose problem is tried again; `quarantined`: groups that are kept and never trained; `failed`: attempts by
    `KIND: REASON`.
    """

    def __init__(self) -> None:
        self.known: dict[str, dict[str, Lengths]] = defaultdict(dict)
        self.changed: set[tuple[str, str]] = set()

    def add(self, what: str, lengths: Lengths, which: str = "", times: int = 1) -> str:
        """Count `times` groups; returns the `which` they were counted under: users' reasons are cut, and bounded in
        number."""
        known = self.known[what]
        if what in ("dropped", "discarded", "failed"):
            which = (which.strip().splitlines() or ["no reason given"])[0][:LONG_REASON]
            which = which if which in known or len(known) < MANY_REASONS else OTHER
        now = known.get(which, NONE)
        known[which] = Lengths(
            now.groups + times * lengths.groups,
            now.samples + times * lengths.samples,
            now.tokens + times * lengths.tokens,
            now.sampled + times * lengths.sampled,
            now.truncated + times * lengths.truncated,
        )
        self.changed.add((what, which))
        return which

    def by(self, what: str) -> dict[str, Lengths]:
        return {which: lengths for which, lengths in self.known[what].items() if lengths.groups}

    def groups(self, what: str) -> int:
        return sum(lengths.groups for lengths in self.known[what].values())

    def lengths(self) -> dict[str, Lengths]:
        kinds = ("generated", "trained", "dropped", "discarded", "quarantined")
        return {f"{kind}: {which}" if which else kind: n for kind in kinds for which, n in self.by(kind).items()}

    def restore(self, totals: Mapping[tuple[str, str], Lengths]) -> None:
        for (what, which), lengths in totals.items():
            self.known[what][which] = lengths


class Trend:
    def __init__(self) -> None:
        self.failures_in_row = 0
        """Failures of the infrastructure do not count."""
        self.flat_in_row = 0
        """Groups without variance in a row."""
        self.quarantined_in_row = 0
        """Groups since a batch was trained."""
        self.given_up = 0
        self.is_announced = False
        self.last_quarantined = ""
        self.examples: dict[int, str] = {}
        """`KIND: REASON` by row."""
        self.recent_failures: Counter[str] = Counter()
        self.recent_groups = Counter[str]()
        self.flat_groups = self.new_groups = 0
        """Groups with equal rewards, and all groups, between the last two batches."""
        self._flat = self._made = 0

    def note_failure(self, row: int, kind: FailureKind, failure: str, counted_as: str) -> None:
        self.recent_failures[counted_as] += 1
        if kind != "infrastructure":
            self.failures_in_row += 1
            self.examples.pop(row, None)
            remember(self.examples, row, failure, EXAMPLES)

    def note_group(self, unwanted: str | None, is_flat: bool) -> None:
        self.failures_in_row = 0
        self.flat_in_row = 0 if unwanted is None else self.flat_in_row + 1
        self.recent_groups["varied" if unwanted is None else unwanted] += 1
        self._made, self._flat = self._made + 1, self._flat + is_flat

    def note_quarantine(self, reason: str) -> None:
        self.quarantined_in_row += 1
        self.last_quarantined = reason

    def note_batch(self) -> None:
        self.recent_failures.clear()
        self.recent_groups.clear()
        self.flat_groups, self.new_groups, self._flat, self._made = self._flat, self._made, 0, 0

    def begin_anew(self) -> None:
        self.failures_in_row = self.flat_in_row = self.quarantined_in_row = self.given_up = 0
        self.is_announced = False


def remember(memory: dict[int, T], number: int, what: T, most: int = REMEMBERED) -> None:
    """Note `what` under its number; the oldest makes room."""
    memory[number] = what
    if len(memory) > most:
        del memory[next(iter(memory))]


class Marks(NamedTuple):
    """When a sample is solved, and when a row is always or never solved."""

    solved_at: float = 1.0
    streak: int = 2
    """Equal groups in a row after which older ones do not count."""


@dataclass(slots=True)
class RowRecord:
    row: int
    drawn: int = 0
    groups: int = 0
    samples: int = 0
    solved: int = 0
    streak: int = 0
    """Groups in a row with all samples solved; negative: with none."""
    last_item: int = -1
    last_version: int = 0
    """The next batch when `last_item` was drawn."""
    failed: int = 0
    hopeless: int = 0
    reason: str = ""
    counted: str = "unseen"
    """The band, or `left_out`, in which `Rows.bands` counts it; not stored."""

    def band(self, streak: int) -> str:
        if not self.groups:
            return "unseen"
        if self.solved == self.samples or self.streak >= streak:
            return "solved"
        return "unsolved" if self.solved == 0 or self.streak <= -streak else "between"

    def is_left_out(self, attempts: int) -> bool:
        return not self.groups and bool(self.hopeless or self.failed >= attempts)


row_values: Callable[[RowRecord], RowValues] = attrgetter(*[one.name for one in fields(RowRecord)][:-1])


class Rows:
    """`attempts` failures without a group leave a row out."""

    def __init__(self, problems: int = 0, marks: Marks | None = None, attempts: int = 3) -> None:
        self.problems, self.marks, self.attempts = problems, marks or Marks(), attempts
        self.records: dict[int, RowRecord] = {}
        self.left_out: dict[int, str] = {}
        """`KIND: REASON` by row."""
        self.news: list[int] = []
        """Rows left out that the log has not named yet."""
        self.moved: set[int] = set()
        """Rows whose items changed since the order last looked."""
        self.bands = dict.fromkeys((*BANDS, "left_out"), 0) | {"unseen": problems}
        """Rows in each; a row that was never drawn is unseen."""
        self.changed: set[int] = set()

    @property
    def all_left_out(self) -> bool:
        return 0 < self.problems <= len(self.left_out)

    def note_drawn(self, row: int, item: int, version: int) -> None:
        record = self.records.setdefault(row, RowRecord(row))
        record.drawn, record.last_item, record.last_version = record.drawn + 1, item, version
        self._note_change(record)

    def note_group(self, row: int, rewards: Sequence[float]) -> None:
        """Count a group. A row that was left out is drawn again."""
        self.left_out.pop(row, None)
        solved = sum([reward >= self.marks.solved_at for reward in rewards])
        record = self.records.setdefault(row, RowRecord(row))
        record.groups, record.samples = record.groups + 1, record.samples + len(rewards)
        record.solved += solved
        sign = 1 if solved == len(rewards) else -1 if not solved else 0
        record.streak = record.streak + sign if sign * record.streak > 0 else sign
        self._note_change(record)

    def note_failure(self, row: int, kind: FailureKind, failure: str, permanent: bool) -> bool:
        if kind not in OWN_FAILURES:
            return False
        record = self.records.setdefault(row, RowRecord(row))
        record.failed, record.reason = record.failed + 1, failure
        record.hopeless |= permanent
        if record.is_left_out(self.attempts) and row not in self.left_out:
            self.news.append(row)
            self.left_out[row] = failure
        elif row in self.left_out:
            self.left_out[row] = failure
        self._note_change(record)
        return row in self.left_out

    def draw_again(self) -> None:
        back, self.left_out = list(self.left_out), {}
        for row in back:
            record = self.records[row]
            record.failed, record.hopeless = 0, 0
            self._note_change(record)
        self.moved.update(back)

    def restore(self, saved: Iterable[RowValues]) -> None:
        """Rows with fewer failures than `attempts` are drawn again."""
        for values in saved:
            record = RowRecord(*values)  # type: ignore[arg-type]
            self.records[record.row] = record
            if record.is_left_out(self.attempts):
                self.left_out[record.row] = record.reason
            self._note_change(record)
        self.changed.clear()

    def _note_change(self, record: RowRecord) -> None:
        self.changed.add(record.row)
        self.bands[record.counted] -= 1
        record.counted = "left_out" if record.row in self.left_out else record.band(self.marks.streak)
        self.bands[record.counted] += 1
