"""The running totals of the ledger: how many groups, and how much text, were generated, trained, dropped and why.

Lengths are counted with everything, so that a loss of long answers shows: compare the means of generated, trained and
dropped samples (`python -m buffer stats`). Part of the ledger (`buffer/ledger/rules.py`); stored in the table `totals`.
"""

from collections.abc import Mapping

from buffer.ledger.types import Lengths

MANY_REASONS = 64
LONG_REASON = 200
OTHER = "other reasons"


class Totals:
    """Totals by (what, which). `what` is one of

    - `generated`: accepted groups, whatever became of them;  `trained`: groups of trained batches;
    - `dropped`, by reason;  `discarded`, by reason: groups generated, then thrown away, whose problem is tried again;
    - `age`, by age: groups of formed batches, trained or about to be.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], Lengths] = {}
        self._changed: set[tuple[str, str]] = set()

    def add(self, what: str, lengths: Lengths, which: str = "", times: int = 1) -> None:
        """Count one group more, or with `times=-1` one less."""
        key = (what, which)
        if what in ("dropped", "discarded"):
            key = (what, self._reason(what, which))
        self._totals[key] = self._totals.get(key, Lengths()).plus(lengths, times)
        self._changed.add(key)

    def _reason(self, what: str, reason: str) -> str:
        """Reasons are written by people's reward functions: one line each, and a bounded number of them."""
        line = (reason.strip().splitlines() or ["no reason given"])[0][:LONG_REASON]
        if (what, line) in self._totals or len(self.by(what)) < MANY_REASONS:
            return line
        return OTHER

    def by(self, what: str) -> dict[str, Lengths]:
        """The totals of `what`. Example: `by("dropped")` -> `{"zero variance": Lengths(groups=3, ...)}`."""
        return {which: lengths for (kind, which), lengths in self._totals.items() if kind == what and lengths.groups}

    def total(self, what: str) -> Lengths:
        """The sum over all of `what`."""
        whole = Lengths()
        for lengths in self.by(what).values():
            whole = whole.plus(lengths)
        return whole

    def lengths(self) -> dict[str, Lengths]:
        """For people: by `generated`, `trained`, `dropped: REASON`, `discarded: REASON`."""
        kinds = ("generated", "trained", "dropped", "discarded")
        return {f"{kind}: {which}" if which else kind: n for kind in kinds for which, n in self.by(kind).items()}

    def drain(self) -> dict[tuple[str, str], Lengths]:
        """The totals that changed since the last call."""
        changed, self._changed = self._changed, set()
        return {key: self._totals[key] for key in changed}

    def restore(self, totals: Mapping[tuple[str, str], Lengths]) -> None:
        """Continue from what the store kept."""
        self._totals = dict(totals)
