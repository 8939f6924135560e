"""The end of a run by signal: the first SIGTERM or SIGINT drains, the second ends the process at once.

`Draining` stands between the loop and the buffer. After the first signal the current version is finished and `take`
returns None, so that the loop writes its checkpoint and ends. The ranks agree on it once per version. Built by
`learner/__main__.py`.
"""

import os
import signal
from collections.abc import Sequence

from buffer.wire.client import LearnerClient
from buffer.wire.protocol import EvaluationResult, Finished, Part
from learner.train import collectives


class Draining:
    """`batches` until `begin` is called, by the handler of the first signal in the main thread."""

    def __init__(self, batches: LearnerClient) -> None:
        self.batches, self._begun = batches, False

    @property
    def interrupted(self) -> bool:
        """Whether a signal ends the run."""
        return self._begun

    @property
    def finished(self) -> Finished | None:
        """How the run ended; None if it did not: a signal, or the last version."""
        return None if self._begun else self.batches.finished

    def rewind(self, version: int) -> None:
        """As in LearnerClient, for all ranks: none goes on to take a batch before all have said it. To the buffer, a
        Rewind after a Take undoes what may have come of that batch."""
        self.batches.rewind(version)
        collectives.all_reduce_max(0)

    def take(self, version: int) -> Part | None:
        """This rank's part of batch `version`; None if there will be none, and once any rank has got a signal."""
        part = None if self._begun else self.batches.take(version)
        (begun,) = collectives.all_reduce_max(self._begun)
        if begun:  # a signal that another rank got ends this one's later waits as well
            self._begun = True  # and is never taken back: one may arrive while the ranks agree
        return None if begun else part

    def trained(self, version: int, oldest_kept: int) -> None:
        """As in LearnerClient."""
        self.batches.trained(version, oldest_kept)

    def quarantine(self, item: int, reason: str) -> None:
        """As in LearnerClient."""
        self.batches.quarantine(item, reason)

    def try_alone(self, version: int, item: int | None) -> None:
        """As in LearnerClient."""
        self.batches.try_alone(version, item)

    def follow_evaluations(self, known: Sequence[int]) -> None:
        """As in LearnerClient."""
        self.batches.follow_evaluations(known)

    def evaluations(self) -> list[EvaluationResult]:
        """As in LearnerClient."""
        return self.batches.evaluations()

    def last_evaluations(self) -> list[EvaluationResult]:
        """Wait for those that are still to come, the last version's among them, unless a signal ends the run."""
        return self.batches.evaluations() if self._begun else self.batches.last_evaluations()

    def begin(self, number: int) -> None:
        """Let `take` return None from now on, also where it waits. `number`: the signal."""
        self._begun = True
        self.batches.interrupt()
        name = signal.Signals(number).name
        line = f"learner: {name}: finishing this version and its checkpoint; once more ends at once\n"
        os.write(2, line.encode())  # the signal may interrupt a print, and buffered streams are not reentrant
