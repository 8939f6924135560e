"""The learner's requests: batches that are taken, trained, undone by a rewind, forgotten, and groups that are never
trained.

Part of the ledger, as `Ledger.batches`. A batch once formed never changes, but that it loses a group that cannot be
trained.

`Suspicion` finds out which batch ends the learner, and which of its groups. A process that is killed, by the system for
its memory or by a fault of its GPU, names no cause. So the ledger counts the starts that took a batch and never trained
it: a batch with which MOST_ENDS starts ended is *suspect*, and the learner tries each of its groups by itself before it
trains the batch (`learner/sound.py`). A group during whose trial MOST_ENDS starts ended is the culprit. Starts are
counted at their successor's Rewind.
"""

from collections.abc import Callable
from dataclasses import dataclass

from buffer.ledger.counts import GIVEN_UP_QUARANTINED
from buffer.ledger.state import LedgerState
from buffer.ledger.types import FormedBatch, ItemState, LedgerError, Terms
from buffer.ledger.view import LedgerView

MOST_ENDS = 2
"""Ends of the learner from which on a batch is suspect, and a group that was tried by itself is the culprit."""


@dataclass
class Suspicion:
    """Counts of the starts of the learner that ended; -1 stands for no batch or item. The store keeps each field."""

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


class Batches:
    """`find` returns an item, also one that has left memory; `take_back_too_old` is that of `Attempts`."""

    def __init__(
        self,
        terms: Terms,
        state: LedgerState,
        view: LedgerView,
        take_back_too_old: Callable[..., None],
        find: Callable[[int], ItemState | None],
    ) -> None:
        self._terms, self._state, self._view, self._find = terms, state, view, find
        self._take_back_too_old = take_back_too_old
        self.suspicion = Suspicion()

    def take(self, version: int) -> FormedBatch | None:
        """Batch `version`: as it was, if formed before; formed now, if it is the next one and ready; None: not ready
        yet (park it) or, with `view.finished()`, never. Raises LedgerError for a version beyond the next, or pruned.

        At the end of the problems a last, smaller batch is formed of what is left.
        """
        state = self._state
        if version < state.oldest:
            raise LedgerError(self._pruned(version))
        if version > state.version:
            raise LedgerError(
                f"Take({version}): the next batch is {state.version}; restart the learner to rewind it to its "
                "checkpoint"
            )
        if version == state.version:
            if not self._view.ready():
                if state.trend.given_up:
                    state.announce()
                return None
            state.form(self._terms.groups)
        state.raise_ceiling(version + 1)
        if version > state.last_trained:
            self.suspicion.taken = version
        return state.batches[version]

    def trained(self, version: int) -> list[int]:
        """Mark batch `version` as trained; returns the items that count as trained from now on.

        Every rank calls this; only the first call has an effect. A call of a replaced learner has no effect: after a
        rewind a batch must be taken again before it can be trained again.
        """
        state = self._state
        if version >= state.version:
            raise LedgerError(
                f"Trained({version}): the next batch is {state.version}; restart the learner to rewind it"
            )
        if not state.last_trained < version < state.ceiling:
            return []
        newly = range(state.last_trained + 1, version + 1)
        state.mark(version)
        self.suspicion.clear(version)
        return [item for batch in newly for item in state.batches[batch].items]

    def rewind(self, version: int) -> int:
        """The learner restored `version`: batches from there on count as untrained; returns how many will be served
        again. Raises LedgerError if the ledger does not reach that version or has pruned it.

        A run that was given up goes on: whoever started the learner again has mended what failed, or it ends once more.

        A ledger that never formed a batch goes to any version; what it opened too early for that is dispatched again.
        """
        state = self._state
        if version != state.version and not state.num_formed:
            state.start_at(version)
            self._take_back_too_old()
        if version > state.version:
            raise LedgerError(
                f"the learner restored version {version}, but the buffer's next batch is {state.version}: they are not "
                "of one run; remove the run's buffer.sqlite or its checkpoints, or choose another run.name"
            )
        if version < state.oldest:
            raise LedgerError(self._pruned(version))
        state.rewind(version)
        state.begin_anew()
        self.suspicion.clear(version - 1)
        culprit = self.suspicion.begin()
        if culprit is not None and culprit in state.items:
            self.quarantine(culprit, f"the learner ended {MOST_ENDS} times while it tried this group by itself")
        return state.version - version

    def prune(self, oldest_kept: int) -> int:
        """Forget batches before `oldest_kept`, trained ones only; returns the oldest batch that is left.

        The samples of batches before that, and of items that were dropped before it, may go.
        """
        state = self._state
        state.prune(max(state.oldest, min(oldest_kept, state.last_trained + 1)))
        return state.oldest

    def try_alone(self, version: int, number: int | None) -> None:
        """The learner, which has batch `version`, tries the group of this item by itself; None: it has tried all."""
        batch = self._state.batches.get(version)
        if number is not None and (batch is None or number not in batch.items):
            raise LedgerError(f"item {number} is not in batch {version}: take the batch again")
        self.suspicion.try_alone(number)

    def quarantine(self, number: int, reason: str) -> bool:
        """Put the group of this item into quarantine: it is kept and never trained. Returns whether that is news.

        Its batch is trained without it; no other batch changes. A batch that loses its last group is formed anew, and
        those after it too. Raises LedgerError for an item that has no group, or whose batch was trained.
        """
        item = self._find(number)
        if item is not None and item.state == "quarantined":
            return False
        if item is None or item.state not in ("stored", "batched"):
            now = "not known here" if item is None else item.state
            raise LedgerError(f"item {number} is {now}: only a group that is stored or batched goes into quarantine")
        if item.state == "batched" and item.batch <= self._state.last_trained:
            raise LedgerError(f"item {number} was trained in batch {item.batch}: it cannot go into quarantine any more")
        if item.state == "batched":
            self._take_out(item)
        self._state.quarantine(item, reason)
        trend = self._state.trend
        if trend.quarantined_in_row >= self._view.most_quarantined and not trend.given_up:
            self._state.give_up_run(GIVEN_UP_QUARANTINED)
        return True

    def _take_out(self, item: ItemState) -> None:
        """Take the item out of its batch. If it was the last group, the batch and all later ones are formed anew,
        because batches are consecutive; groups that are too new for their batch are dispatched again."""
        batch = item.batch
        self._state.take_out(item)
        self.suspicion.clear(batch)
        if not self._state.batches[batch].items:
            self._state.unform(batch)
            self._take_back_too_old(item.number)

    def _pruned(self, version: int) -> str:
        return (
            f"batch {version} is gone, the buffer keeps those from {self._state.oldest} on: restore a checkpoint of at "
            "least that version, or remove the run's buffer.sqlite and checkpoints to begin anew"
        )
