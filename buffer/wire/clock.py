"""The buffer's one clock: it stands still while the process could not listen. Marked by `server.py`, read by everybody.

A commit that waits for the disk, a process that is stopped (SIGSTOP, a frozen container) or starved: until it is over,
nobody can be heard, so no silence, lease, claim or wait may end by that time. A stop shows only as a gap between two
marks, which is why the event loop never waits for longer than TICK_S.
"""

import time
from collections.abc import Callable

DEAF_S = 0.5
"""A gap between two marks that is longer than announced by more than this is time in which nobody could be heard."""
TICK_S = 0.5
"""Longest wait of the event loop. Of a stop at most this and DEAF_S count as time."""


class ListeningClock:
    """Seconds that the process spent listening, or nearly: gaps of up to DEAF_S count as well.

    Example: `clock.mark(5.0)` before a wait for messages of at most 5 s, `clock.mark()` after it. If 65 s lie between
    the two, `clock.now()` has moved by 5.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._deaf_s, self._may_wait_s, self._marked_at = 0.0, 0.0, monotonic()

    def now(self) -> float:
        """Seconds, from an arbitrary moment on."""
        return self._monotonic() - self._deaf_s

    def mark(self, wait_s: float = 0.0) -> None:
        """The process begins to listen, for at most `wait_s`, or stops listening to act on what it heard."""
        at = self._monotonic()
        gap_s = at - self._marked_at - self._may_wait_s
        if gap_s > DEAF_S:
            self._deaf_s += gap_s
        self._marked_at, self._may_wait_s = at, wait_s
