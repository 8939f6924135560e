"""Which batch ends the learner, and which of its groups: counts of starts that took a batch and never trained it.

A process that is killed, by the system for its memory or by a fault of its GPU, names no cause. So the ledger counts: a
batch with which MOST_ENDS starts ended is *suspect*, and the learner tries each of its groups by itself before it
trains the batch (`learner/sound.py`). A group during whose trial MOST_ENDS starts ended is the culprit. Starts
are counted at their successor's Rewind. Pure; part of the ledger (`training.py`), stored with its counters.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

MOST_ENDS = 2
"""Ends of the learner from which on a batch is suspect, and a group that was tried by itself is the culprit."""


@dataclass
class Suspicion:
    """-1 stands for no batch or item."""

    taken: int = -1
    """Batch that the learner took and has not trained."""
    suspect: int = -1
    """Batch with which the learner ended last."""
    suspect_ends: int = 0
    """How many starts ended with it, one after another."""
    tried: int = -1
    """Item that the learner tries by itself."""
    alone: int = -1
    """Item during whose trial the learner ended last."""
    alone_ends: int = 0

    def take(self, version: int) -> None:
        """The learner has the batch."""
        self.taken = version

    def is_suspect(self, version: int) -> bool:
        """Whether MOST_ENDS starts of the learner ended with this batch."""
        return version == self.suspect and self.suspect_ends >= MOST_ENDS

    def try_alone(self, item: int | None) -> None:
        """The learner tries this item by itself from now on; None: it has tried all of the batch."""
        self.tried = -1 if item is None else item

    def begin(self) -> int | None:
        """A learner has started: count the end of the one before it. Returns the item that is the culprit.

        Every rank says that it has started; only the first one counts.
        """
        if self.taken >= 0:
            self.suspect_ends = self.suspect_ends + 1 if self.taken == self.suspect else 1
            self.suspect = self.taken
        if self.tried >= 0:
            self.alone_ends = self.alone_ends + 1 if self.tried == self.alone else 1
            self.alone = self.tried
        self.taken = self.tried = -1
        return self.alone if self.alone_ends >= MOST_ENDS else None

    def clear(self, version: int) -> None:
        """Batch `version` was trained, or is another one now: nothing is held against it or its groups."""
        if version >= self.taken:
            self.taken = self.tried = -1
        if version >= self.suspect:
            self.suspect = self.alone = -1
            self.suspect_ends = self.alone_ends = 0

    def counters(self) -> dict[str, int]:
        """What the store keeps, by name."""
        return {f"suspicion_{name}": value for name, value in asdict(self).items()}

    @classmethod
    def restored(cls, counters: Mapping[str, int]) -> "Suspicion":
        """Undo `counters`; a file of an earlier release has none."""
        new = cls()
        return cls(*(counters.get(name, value) for name, value in new.counters().items()))
