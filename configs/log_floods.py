"""Summarises floods in a log: peers or users' code must not fill the disk."""

import logging
import time
from collections.abc import Callable

MOST_LINES, MOST_NEWS, WINDOW_S = 100, 1000, 60.0
"""Warnings of one format, and lines below a warning, in so many seconds."""
MOST_FORMATS = 1000
MOST_CHARACTERS = 16_000


class FloodFilter(logging.Filter):
    """Counts what exceeds a number of lines of a format in each window."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._windows: dict[object, tuple[float, int]] = {}
        """Begin and number of lines, by format."""

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, record.levelno, record.msg if record.args else record.lineno), self._monotonic()
        began, number = self._windows.pop(key, (now, 0))
        most = MOST_LINES if record.levelno >= logging.WARNING else MOST_NEWS
        left_out = max(0, number - most)
        if now >= began + WINDOW_S:
            began, number = now, 0
        else:
            left_out = 0
        self._windows[key] = began, number + 1  # the latest ones are last
        while len(self._windows) > MOST_FORMATS:
            del self._windows[next(iter(self._windows))]
        if number >= most:
            return False
        text = record.getMessage()
        if left_out or len(text) > MOST_CHARACTERS:
            more = f" ({left_out:,} lines like this one were left out)" if left_out else ""
            record.msg, record.args = f"{text[:MOST_CHARACTERS]}{more}", None
        return True
