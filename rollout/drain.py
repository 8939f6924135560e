"""Stops a rollout server: groups in flight are finished or given back. The first signal drains, the second forces."""

import asyncio
import logging
import os
import signal
from typing import Any

from buffer.wire.client import RolloutClient
from buffer.wire.protocol import WorkItem
from configs.entrypoint import notice_s
from rollout.episodes.episode import Episodes, Failure

log = logging.getLogger(__name__)
REPORT_S = 5.0
"""Seconds to report to the buffer; later, leases expire."""
CLOSE_S = 5.0
"""Seconds of a notice that are left for engine and workers to close."""
FORCE_S = 10.0
FORCED = 130
RETURNED = Failure("draining: the server stops", returned=True)


class Drain:
    """A signal before there is anything to drain ends the main task."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s, self.begun = drain_s, asyncio.Event()
        self.episodes: Episodes | None = None
        self._server, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self._returning: asyncio.Task[None] | None = None  # kept from the garbage collector

    def begin(self, number: int) -> None:
        """Begin nothing new. After `drain_s`, or what a notice leaves of it, give back unfinished groups; REPORT_S
        later force the end."""
        log.info("%s: draining (once more to force quit)", signal.Signals(number).name)
        if self.episodes is None:
            self.force()
            return
        self.begun.set()
        notice = notice_s()
        drain_s = self.drain_s if notice is None else max(0.0, min(self.drain_s, notice - REPORT_S - CLOSE_S))
        self._loop.call_later(drain_s, self.episodes.abandon_all, RETURNED)
        self._loop.call_later(drain_s + REPORT_S, self.force)

    def force(self, number: int = 0) -> None:
        assert self._server is not None
        self._server.cancel()
        self._loop.call_later(FORCE_S, os._exit, FORCED)

    async def wait(self, waiting: "asyncio.Future[Any]") -> None:
        beginning = asyncio.ensure_future(self.begun.wait())
        try:
            await asyncio.wait({waiting, beginning}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            beginning.cancel()

    async def ask(self, buffer: RolloutClient, room: int) -> list[WorkItem] | None:
        """Return at most `room` items; None once there are no more or the drain began."""
        if self.begun.is_set():
            return None
        asking = asyncio.ensure_future(buffer.ask(room))
        await self.wait(asking)
        if asking.done():
            return asking.result()
        self._returning = asyncio.create_task(self._return(asking, buffer))
        return None

    async def _return(self, asking: "asyncio.Future[list[WorkItem] | None]", buffer: RolloutClient) -> None:
        for item in await asking or []:
            await RETURNED.deliver(buffer, item)
