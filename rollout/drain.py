"""Stopping a rollout server gently: what is in flight is finished, or given back; nothing new is begun.

`Drain` stands between `roll` and the buffer. `Signals` turns signals into calls: the first drains, the second
forces. Built by `rollout/__main__.py`; waits for nothing but its deadlines.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from buffer.wire.protocol import WorkItem
from buffer.wire.sample import Sample
from rollout.interfaces import Episodes, Samples

log = logging.getLogger(__name__)
DRAIN_S = 30.0
"""Time for groups in flight to be finished, after the first signal; the rest is given back."""
TELL_S = 5.0
"""Time after that to tell the buffer; then its leases are left to expire."""
FORCE_S = 10.0
"""Time after the second signal for engine and workers to close."""
FORCED = 130
"""Exit code of a server that was forced."""
REASON = "draining: the server stops"


class Drain:
    """The buffer as `roll` sees it. Once `begin` was called it has no more items."""

    def __init__(
        self, samples: Samples, episodes: Episodes, force: Callable[[], Any], drain_s: float = DRAIN_S
    ) -> None:
        self.samples, self.episodes, self.force, self.drain_s = samples, episodes, force, drain_s
        self.begun = asyncio.Event()
        self._returning: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Take nothing new; after `drain_s` give back what is not finished, `TELL_S` later force the end."""
        self.begun.set()
        loop = asyncio.get_running_loop()
        loop.call_later(self.drain_s, self.episodes.abandon_all, REASON)
        loop.call_later(self.drain_s + TELL_S, self.force)

    async def ask(self, room: int) -> list[WorkItem] | None:
        """Items, or None once the buffer has no more or the drain began."""
        if self.begun.is_set():
            return None
        asking = asyncio.ensure_future(self.samples.ask(room))
        beginning = asyncio.create_task(self.begun.wait())
        try:
            await asyncio.wait({asking, beginning}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        finally:
            beginning.cancel()
        if asking.done():
            return asking.result()
        self._returning = asyncio.create_task(self._return(asking))
        return None

    async def put(self, item: WorkItem, samples: list[Sample]) -> Any:
        """As the buffer has it."""
        return await self.samples.put(item, samples)

    async def fail(self, item: WorkItem, reason: str, permanent: bool = False, returned: bool = False) -> None:
        """As the buffer has it; what draining cut short counts as no attempt."""
        await self.samples.fail(item, reason, permanent, returned or reason == REASON)

    async def close(self) -> None:
        """Stop waiting for the answer to the last question."""
        if self._returning:
            self._returning.cancel()
            await asyncio.wait({self._returning})

    async def _return(self, asking: "asyncio.Future[list[WorkItem] | None]") -> None:
        """The last question may still be answered with items: others shall have them at once."""
        for item in await asking or []:
            await self.samples.fail(item, REASON, returned=True)


class Signals:
    """A context manager over SIGINT and SIGTERM. Until there is something to drain, the first one cancels the task."""

    def __init__(self) -> None:
        self.heard = 0
        self.gently: Callable[[], Any] = self.now
        """What the first signal does."""

    def __enter__(self) -> "Signals":
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._hear, number)
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def now(self) -> None:
        """Cancel everything, and do not wait long for it."""
        assert self._task is not None
        self._task.cancel()
        self._loop.call_later(FORCE_S, os._exit, FORCED)

    def _hear(self, number: int) -> None:
        self.heard += 1
        if self.heard == 1:
            log.info("%s: draining (once more to force quit)", signal.Signals(number).name)
            self.gently()
        else:
            self.now()
