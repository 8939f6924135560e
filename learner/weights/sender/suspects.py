"""Leaves out members that were ready and did not answer, longer each time: each costs all others the timeout."""

from collections.abc import Callable

from buffer.wire.quotas import Remembered

MOST_NAMES = 2**14
MOST_PAUSE_S = 3600.0
NEWCOMERS = ""
"""Servers that never loaded a version are one suspect: names cost nothing."""


class Suspects:
    """Pauses by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._proven: Remembered[str] = Remembered(MOST_NAMES)
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def blame(self, name: str, cost_s: float) -> float:
        """The server spoilt a round that took `cost_s`. Returns the seconds for which it is left out."""
        key = self._key(name)
        self._failures[key] = self._failures.get(key, 0) + 1
        pause_s = min(cost_s * 2.0 ** (self._failures[key] - 1), MOST_PAUSE_S)
        self._until[key] = self._clock() + pause_s
        return pause_s

    def clear(self, name: str) -> None:
        self._proven.add(name)
        self._failures.pop(name, None)
        self._until.pop(name, None)

    def out(self, name: str) -> bool:
        return self._clock() < self._until.get(self._key(name), 0.0)

    def _key(self, name: str) -> str:
        return name if name in self._proven else NEWCOMERS
