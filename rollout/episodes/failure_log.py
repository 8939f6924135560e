"""Logs failed attempts."""

import logging
import time
from collections import Counter

from rollout.errors import EpisodeError

log = logging.getLogger(__name__)
REPEAT_S = 30.0


class FailureLog:
    """Logs the first failure of each kind and exception type; counts later ones."""

    def __init__(self, repeat_s: float = REPEAT_S) -> None:
        self.repeat_s = repeat_s
        self._seen: set[tuple[str, str]] = set()
        self._unlogged: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def record(self, error: EpisodeError, reason: str) -> None:
        kind, now = error.kind, time.monotonic()
        if (kind, error.origin) not in self._seen:
            self._seen.add((kind, error.origin))
            log.warning("an attempt failed, kind %s: %s", kind, reason, exc_info=error)
        else:
            self._unlogged[kind] += 1
            if now - self._logged_at[kind] < self.repeat_s:
                return
            log.warning("%d more attempts failed, kind %s; the last: %s", self._unlogged.pop(kind), kind, reason)
        self._logged_at[kind] = now
