"""The clock of a process that judges others: it stands still while the process itself is stopped.

When a stopped judge continues, its timers are due and answers that came meanwhile are unread: it must look again.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

TICK_S = 0.5
STOPPED_S = 1.0
"""A longer time between two looks means that the process could not listen."""


class AwakeClock:
    """Seconds in which the process was awake. Somebody must read it every TICK_S: `tick` does."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._stopped_s, self._seen_at = monotonic, 0.0, monotonic()

    def now(self) -> float:
        at = self._monotonic()
        if at - self._seen_at > STOPPED_S:
            self._stopped_s += at - self._seen_at
        self._seen_at = at
        return at - self._stopped_s

    async def tick(self) -> None:
        while True:
            self.now()
            await asyncio.sleep(TICK_S)


async def wait_awake(
    futures: Iterable["asyncio.Future[Any]"], timeout_s: float | None, clock: AwakeClock | None = None
) -> None:
    clock, waited = clock or AwakeClock(), list(futures)
    until = None if timeout_s is None else clock.now() + timeout_s
    while True:
        left_s = TICK_S if until is None else min(TICK_S, until - clock.now())
        done, _ = await asyncio.wait(waited, timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        if done or left_s <= 0:
            return
