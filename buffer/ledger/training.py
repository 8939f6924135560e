"""The learner's requests: batches that are taken, trained, rewound, forgotten, and groups in quarantine.

A batch once formed changes only when it loses a group that cannot be trained. A killed learner names no cause. So the
ledger counts the starts that took a batch and never trained it. A batch that ended MOST_ENDS starts is *suspect*: the
next learner tries each of its groups alone. A group whose trial ended MOST_ENDS starts is the culprit.
"""

from collections.abc import Callable
from dataclasses import dataclass

from buffer.ledger.counts import GIVEN_UP_QUARANTINED
from buffer.ledger.state import LedgerState
from buffer.ledger.types import FormedBatch, ItemState, LedgerError, Terms
from buffer.ledger.view import LedgerView

MOST_ENDS = 2


@dataclass
class Suspicion:
    """Counts the starts of the learner that ended; -1 stands for none."""

    taken: int = -1
    suspect: int = -1
    suspect_ends: int = 0
    tried: int = -1
    alone: int = -1
    alone_ends: int = 0

    def is_suspect(self, version: int) -> bool:
        return version == self.suspect and self.suspect_ends >= MOST_ENDS

    def try_alone(self, item: int | None) -> None:
        self.tried = -1 if item is None else item

    def begin(self) -> int | None:
        """Count the end of the learner before; returns the culprit. Only the first rank's call counts."""
        if self.taken >= 0:
            self.suspect_ends = self.suspect_ends + 1 if self.taken == self.suspect else 1
            self.suspect = self.taken
        if self.tried >= 0:
            self.alone_ends = self.alone_ends + 1 if self.tried == self.alone else 1
            self.alone = self.tried
        self.taken = self.tried = -1
        return self.alone if self.alone_ends >= MOST_ENDS else None

    def clear(self, version: int) -> None:
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
        """Batch `version`, formed now if it is the next one. None: not ready yet, or never (`view.finished()`).

        Raises LedgerError for a version beyond the next, or pruned.
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
        if state.ceiling <= version:
            state.ceiling = version + 1
            state.revision += 1
        if version > state.last_trained:
            self.suspicion.taken = version
        return state.batches[version]

    def trained(self, version: int) -> list[int]:
        """Mark batches up to `version` as trained; returns their items.

        Only the first rank's call has an effect. A replaced learner's call has none: after a rewind a batch must be
        taken again.
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
        """Count batches from `version` on as untrained; returns how many will be served again.

        Raises LedgerError for a version that the ledger does not reach or has pruned.
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
        """Forget older batches; returns the oldest that is left."""
        state = self._state
        state.prune(max(state.oldest, min(oldest_kept, state.last_trained + 1)))
        return state.oldest

    def try_alone(self, version: int, number: int | None) -> None:
        batch = self._state.batches.get(version)
        if number is not None and (batch is None or number not in batch.items):
            raise LedgerError(f"item {number} is not in batch {version}: take the batch again")
        self.suspicion.try_alone(number)

    def quarantine(self, number: int, reason: str) -> bool:
        """Keep a group and never train it; returns whether that is news.

        Raises LedgerError if there is no group, or its batch was trained.
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
        """Batches are consecutive: if no group is left, this batch and all later ones are formed anew."""
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
