"""Ends a run by signal: the first ends it after the current version and a checkpoint, the second at once."""

import os
import signal
from typing import Protocol

from learner.train import collectives


class Stoppable(Protocol):
    """What a rank may wait for."""

    def stop(self) -> None: ...


class Stopping:
    """Whether a signal ends the run. `batches`: stopped with this rank."""

    def __init__(self, batches: Stoppable | None = None) -> None:
        self._batches = batches
        self.begun = False
        """Never taken back: a signal may arrive while the ranks agree."""

    def begin(self, number: int) -> None:
        self._stop()
        name = signal.Signals(number).name
        line = f"learner: {name}: finishing this version and its checkpoint; once more ends at once\n"
        os.write(2, line.encode())  # a signal may interrupt a print: buffered streams are not reentrant

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
