"""The running totals of the run: how many groups, and how much text, were generated, trained, failed, dropped and why.

Lengths are counted with everything, so that a loss of long answers shows: compare the means of generated, trained and
dropped samples (`State.lengths`). Part of the ledger (`state.py`); stored in the table `totals`.
"""

from collections import defaultdict
from collections.abc import Mapping

from buffer.ledger.types import Lengths

MANY_REASONS = 64
LONG_REASON = 200
OTHER = "other reasons"


class Totals:
    """Totals by (what, which). `what` is one of

    - `generated`: accepted groups, whatever became of them;  `trained`: groups of trained batches;
    - `retried`: accepted groups that were not made at the first attempt;
    - `dropped`, by reason;  `discarded`, by reason: groups generated, then thrown away, whose problem is tried again;
    - `quarantined`: groups generated and kept, that are never trained;
    - `failed`, by `KIND: REASON`: attempts;  `age`, by age: groups of formed batches, trained or about to be.
    """

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, Lengths]] = defaultdict(dict)
        self._changed: set[tuple[str, str]] = set()

    def add(self, what: str, lengths: Lengths, which: str = "", times: int = 1) -> str:
        """Count one group more, or with `times=-1` one less; returns the `which` it was counted under.

        Reasons come from users' reward functions: they are cut to one line each, and to a bounded number of them.
        """
        known = self._totals[what]
        if what in ("dropped", "discarded", "failed"):
            which = (which.strip().splitlines() or ["no reason given"])[0][:LONG_REASON]
            which = which if which in known or len(known) < MANY_REASONS else OTHER
        known[which] = known.get(which, Lengths()).plus(lengths, times)
        self._changed.add((what, which))
        return which

    def by(self, what: str) -> dict[str, Lengths]:
        """The totals of `what`. Example: `by("dropped")` -> `{"zero variance": Lengths(groups=3, ...)}`."""
        return {which: lengths for which, lengths in self._totals[what].items() if lengths.groups}

    def groups(self, what: str) -> int:
        """The number of groups, or of failed attempts, over all of `what`."""
        return sum(lengths.groups for lengths in self._totals[what].values())

    def lengths(self) -> dict[str, Lengths]:
        """What became of the samples: by `generated`, `trained`, `quarantined`, `dropped: REASON`,
        `discarded: REASON`."""
        kinds = ("generated", "trained", "dropped", "discarded", "quarantined")
        return {f"{kind}: {which}" if which else kind: n for kind in kinds for which, n in self.by(kind).items()}

    def drain(self) -> dict[tuple[str, str], Lengths]:
        """The totals that changed since the last call."""
        changed, self._changed = self._changed, set()
        return {(what, which): self._totals[what][which] for what, which in changed}

    def restore(self, totals: Mapping[tuple[str, str], Lengths]) -> None:
        """Continue from what the store kept."""
        for (what, which), lengths in totals.items():
            self._totals[what][which] = lengths
