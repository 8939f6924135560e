"""How attempts and groups went lately, and whether the run was given up for it. Part of the ledger's state.

A run in which nothing succeeds must end, and say why; but a failure now and then, or a hundred fast ones beside slow
groups, must end no run. The counts are kept here, `view.py` compares them with the bounds.
"""

from collections import Counter
from typing import TypeVar

from buffer.ledger.types import FailureKind

GIVEN_UP_FAILED, GIVEN_UP_FLAT, GIVEN_UP_QUARANTINED, GIVEN_UP_ROWS = 1, 2, 3, 4
"""Why a run was given up: all attempts fail; all groups lack variance; none can be trained; all rows are left out."""
EXAMPLES = 3
"""Rows kept whose attempts failed last."""
REMEMBERED = 1024
"""Request and lease numbers kept of each server, so that repeated messages are recognised."""
T = TypeVar("T")


class Trend:
    """Counts since the last success of each kind, and since the last batch was formed."""

    def __init__(self) -> None:
        self.failures_in_row = 0
        """Attempts that failed since a group was made or the learner was started; failures of the infrastructure do not
        count."""
        self.flat_in_row = 0
        """Groups without variance in a row, since a group had variance or the learner was started."""
        self.quarantined_in_row = 0
        """Groups put into quarantine since a batch was trained or the learner was started."""
        self.given_up = 0
        """0, or why the run was given up: GIVEN_UP_FAILED for `failures_in_row`, GIVEN_UP_FLAT for `flat_in_row`,
        GIVEN_UP_QUARANTINED for `quarantined_in_row`, GIVEN_UP_ROWS."""
        self.is_announced = False
        """Whether the learner has been answered that the run was given up."""
        self.last_quarantined = ""
        """Why the last group was put into quarantine; not written down."""
        self.examples: dict[int, str] = {}
        """By row of the data set: `KIND: REASON` of the rows that failed last."""
        self.recent_failures: Counter[str] = Counter()
        """Attempts that failed since the last batch was formed, by `KIND: REASON`."""
        self.recent_groups = Counter[str]()
        """Groups made since the last batch was formed: `varied`, and groups that were left out, by the reason."""
        self.flat_groups = self.new_groups = 0
        """Groups made between the last two batches that were formed, and how many had equal rewards; not written
        down."""
        self._flat = self._made = 0

    def note_failure(self, row: int, kind: FailureKind, failure: str, counted_as: str) -> None:
        """An attempt at this row failed; `counted_as` in the totals."""
        self.recent_failures[counted_as] += 1
        if kind != "infrastructure":
            self.failures_in_row += 1
            self.examples.pop(row, None)
            remember(self.examples, row, failure, EXAMPLES)

    def note_group(self, unwanted: str | None, is_flat: bool) -> None:
        """A group was made; `unwanted`: why it is left out, `is_flat`: its rewards are equal."""
        self.failures_in_row = 0
        self.flat_in_row = 0 if unwanted is None else self.flat_in_row + 1
        self.recent_groups["varied" if unwanted is None else unwanted] += 1
        self._made, self._flat = self._made + 1, self._flat + is_flat

    def note_quarantine(self, reason: str) -> None:
        """A group was put into quarantine."""
        self.quarantined_in_row += 1
        self.last_quarantined = reason

    def note_batch(self) -> None:
        """A batch was formed."""
        self.recent_failures.clear()
        self.recent_groups.clear()
        self.flat_groups, self.new_groups, self._flat, self._made = self._flat, self._made, 0, 0

    def begin_anew(self) -> None:
        """The learner was started: whoever did so has mended what failed."""
        self.failures_in_row = self.flat_in_row = self.quarantined_in_row = self.given_up = 0
        self.is_announced = False


def remember(memory: dict[int, T], number: int, what: T, most: int = REMEMBERED) -> None:
    """Note `what` under its number; the oldest makes room."""
    memory[number] = what
    if len(memory) > most:
        del memory[next(iter(memory))]
