"""The end of a run by signal: the first SIGTERM or SIGINT drains, the second ends the process at once.

After the first signal the ranks finish the version that they have agreed to train, write its checkpoint and end. Used
by both loops: `learner/loop.py` and `learner/sft/tuning.py`, which ask for the ranks' agreement once per version.
"""

import os
import signal
from typing import Protocol

from learner.train import collectives


class Stoppable(Protocol):
    """What a rank may wait for: the buffer's `LearnerClient`."""

    def stop(self) -> None: ...


class Stopping:
    """Whether a signal ends the run. `batches`: what is stopped with this rank, also while it waits there."""

    def __init__(self, batches: Stoppable | None = None) -> None:
        self._batches = batches
        self.begun = False
        """This rank ends. Never taken back: a signal may arrive while the ranks agree."""

    def begin(self, number: int) -> None:
        """End the run after the current version: the handler of the first signal, `number`, in the main thread."""
        self._stop()
        name = signal.Signals(number).name
        line = f"learner: {name}: finishing this version and its checkpoint; once more ends at once\n"
        os.write(2, line.encode())  # the signal may interrupt a print, and buffered streams are not reentrant

    def agreed(self) -> bool:
        """Whether any rank has got a signal: then all ranks end. A collective."""
        (begun,) = collectives.all_reduce_max(self.begun)
        if begun:
            self._stop()
        return bool(begun)

    def _stop(self) -> None:
        self.begun = True
        if self._batches:
            self._batches.stop()
