"""The buffer's one clock: it stands still while the process cannot receive. `server.py` marks it; all other modules
read it.

The process cannot receive while a commit waits for the disk, while it is stopped (SIGSTOP, a frozen container) or
starved. That time must not end any silence, lease, claim or wait. The clock sees a stop only as a gap between two
marks, so the event loop never waits for longer than TICK_S.
"""

import time
from collections.abc import Callable

DEAF_S = 0.5
"""If a gap between two marks exceeds the announced wait by more than this, the clock leaves out the excess."""
TICK_S = 0.5
"""Longest wait of the event loop. A stop adds at most TICK_S + DEAF_S to the clock."""


class ListeningClock:
    """Counts the seconds in which the process could receive; gaps of up to DEAF_S are included.

    Example: `clock.mark(5.0)` before a wait for messages of at most 5 s, `clock.mark()` after it. If 65 s lie between
    the two, `clock.now()` has moved by 5.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._deaf_s, self._may_wait_s, self._marked_at = 0.0, 0.0, monotonic()

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        return self._monotonic() - self._deaf_s

    def mark(self, wait_s: float = 0.0) -> None:
        """Mark that a wait for messages of at most `wait_s` begins, or (0) that it has ended."""
        at = self._monotonic()
        gap_s = at - self._marked_at - self._may_wait_s
        if gap_s > DEAF_S:
            self._deaf_s += gap_s
        self._marked_at, self._may_wait_s = at, wait_s
