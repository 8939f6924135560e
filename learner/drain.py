"""The end of a run by signal: the first SIGTERM or SIGINT drains, the second forces.

`Draining` stands between the loop and the buffer. A drained learner finishes the version it trains and is told that no
more batches come, so that it writes its checkpoint and ends well. The ranks agree on it once a version. Built by
`learner/__main__.py`.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from buffer.wire.protocol import Part
from learner import collectives
from learner.interfaces import Batches

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Drained(BaseException):
    """Raised in `take`, so that a signal ends the wait for a batch that may be long in coming."""


class Draining:
    """`batches` until a signal asks for the end. A context manager, of the main thread."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.asked, self._waiting = batches, False, False
        self._before: dict[int, Any] = {}

    def rewind(self, version: int) -> object:
        return self.batches.rewind(version)

    def take(self, version: int) -> Part | None:
        """This rank's part, or None once any rank is to end."""
        try:
            part = self._take(version)
        except Drained:
            part = None
        return None if collectives.all_reduce_max(float(self.asked)) else part

    def _take(self, version: int) -> Part | None:
        self._waiting = True
        try:
            return None if self.asked else self.batches.take(version)
        finally:
            self._waiting = False

    def trained(self, version: int, oldest_kept: int) -> None:
        self.batches.trained(version, oldest_kept)

    def __enter__(self) -> "Draining":
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)  # threads and collectives may never end
        self.asked = True
        name = signal.Signals(number).name
        said = f"learner: {name}: finishing this version and its checkpoint; once more ends at once\n"
        os.write(2, said.encode())  # print may be what the signal interrupts, and must not be entered twice
        if self._waiting:
            raise Drained
