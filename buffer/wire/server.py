"""The buffer's event loop: a socket (`router.py`) in front of `requests.py`.

Each turn reads all messages that are there, and once more those that came meanwhile, commits what they changed in one
transaction, and only then sends the answers: what is acknowledged is on disk. A thread for commits was slower: it holds
the GIL between two waits for the disk.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from buffer.keys import ServerKeys
from buffer.resources import MemoryWatch
from buffer.store.failures import remedy
from buffer.wire.batches import FREE_AT_ONCE, LoopTurn
from buffer.wire.requests import PendingRequests
from buffer.wire.router import PASSES, CommitRoom, Router
from configs.entrypoint import made_progress, unless
from configs.flow.capacity import IN_FLIGHT_BYTES, PARKED_BYTES

log = logging.getLogger(__name__)
TURN_S = 0.005, 0.02
"""Bounds of the time for parts; within them it is as long as all else took."""
RETRY_S = 1.0, 15.0
LOOK_S, IDLE_LOOK_S, LOOK_SHARE = 0.02, 0.1, 20
"""Shortest time between two looks at strangers' connections, the same without strangers, and in lengths of a look."""

DEAF_S = 0.5
"""The clock leaves out a gap that is so much longer than the announced wait."""
TICK_S = 0.5
"""The clock sees a stop only as a gap between two marks."""


class ListeningClock:
    """The buffer's one clock: it stands still while the process cannot receive, as while a commit waits for the disk.
    That time must not end any silence, lease, claim or wait."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._deaf_s, self._may_wait_s, self._marked_at = 0.0, 0.0, monotonic()

    def now(self) -> float:
        return self._monotonic() - self._deaf_s

    def mark(self, wait_s: float = 0.0) -> float:
        """A wait of at most `wait_s` begins, or (0) has ended. Returns `now`."""
        at = self._monotonic()
        gap_s = at - self._marked_at - self._may_wait_s
        if gap_s > DEAF_S:
            self._deaf_s += gap_s
        self._marked_at, self._may_wait_s = at, wait_s
        return at - self._deaf_s


class BufferServer:
    """`clock` is the one with which the ledger was restored."""

    def __init__(self, address: str, max_message: int, keys: ServerKeys, clock: ListeningClock | None = None) -> None:
        self.address, self.clock = address, clock or ListeningClock()
        self._router = Router(address, max_message, keys, self._on_news)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._polling: asyncio.Future[Any] | None = None
        self._due: float | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> "BufferServer":
        self.address = self._router.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._router.close()

    async def serve(self, requests: PendingRequests) -> None:
        """All that was received is committed and answered, unless the disk is full."""
        self._loop = asyncio.get_running_loop()
        tasks = {asyncio.ensure_future(self._serve(requests)), asyncio.ensure_future(self._watch_strangers())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()

    async def _serve(self, requests: PendingRequests) -> None:
        memory, handlers, has_parts = MemoryWatch(self.clock.now()), requests.handlers, False
        known = handlers.peers.known
        while True:
            await self._wake(self.clock.mark(), at_once=has_parts)
            now = self.clock.mark()
            began, handlers.groups.turn = time.monotonic(), LoopTurn(seconds=0.0)
            requests.unsent_bytes = self._router.unsent.total
            room = CommitRoom()
            for _ in range(PASSES):
                received, more = self._router.receive(room)
                for role, frames in received:
                    requests.receive(frames, now, role)
                if not received:  # a commit looks for itself
                    handlers.store.files.require()
                    break
            for identity in self._router.ended(lambda who: known[who].hello.role if who in known else None, now):
                handlers.peers.on_disconnect(identity, now)
            if not more:  # a server is silent only if no message of it waits to be read
                requests.expire(now)
            has_parts = await self._answer(requests, now, more)
            if has_parts:
                seconds = min(max(time.monotonic() - began, TURN_S[0]), TURN_S[1])
                handlers.groups.turn = LoopTurn(seconds, IN_FLIGHT_BYTES - self._router.unsent.total)
                has_parts = await self._answer(requests, now, more)
            del handlers.groups.cache.forgotten[-FREE_AT_ONCE:]
            if now >= memory.due:
                held = {
                    "groups until they are trained": handlers.groups.cache.bytes,
                    "groups that wait for room": requests.parked_bytes,
                    "answers on their way": self._router.unsent.total,
                }
                memory.look(held, now)

    async def _wake(self, now: float, at_once: bool) -> None:
        if at_once or self._router.plain.poll(0):
            return await asyncio.sleep(0)  # signal handlers run in the loop too
        wait_s = TICK_S if self._due is None else min(max(0.0, self._due - now), TICK_S)
        self.clock.mark(wait_s)
        if not self._news.is_set():
            polling = self._router.poller.poll(round(wait_s * 1000) + 1)
            self._polling = asyncio.ensure_future(polling)
            try:
                await self._polling
            except asyncio.CancelledError:
                cancelled = asyncio.current_task()
                if not self._news.is_set() or (cancelled and cancelled.cancelling()):
                    raise
        self._news.clear()

    def wake(self) -> None:
        """Try pending requests again. May be called from any thread."""
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_news)

    async def _watch_strangers(self) -> None:
        pause_s = LOOK_S
        while True:
            self._router.strangers.clear()
            await asyncio.sleep(pause_s)
            if not self._router.limits.unknown:
                await unless(self._router.strangers, asyncio.sleep(IDLE_LOOK_S))
            began, now = time.monotonic(), self.clock.now()
            self._router.read_events(now)
            if self._router.events_read:
                self._on_news()
            self._router.limits.close_large(now)
            self._router.limits.keep_files()
            pause_s = max(LOOK_S, LOOK_SHARE * (time.monotonic() - began))

    def _on_news(self) -> None:
        self._news.set()
        if self._polling:
            self._polling.cancel()

    async def _answer(self, requests: PendingRequests, now: float, more: bool) -> bool:
        """Returns whether there is work for Takes, or for parked groups, now."""
        requests.retry(now)
        if not more:
            self._due = requests.expire(now)  # what was tried again may wait for the clock too
        wait_s, longest_s = RETRY_S
        transaction = requests.handlers.changes()
        while transaction:
            try:
                requests.handlers.store.commit(transaction)
                break
            except (sqlite3.OperationalError, OSError) as error:
                if not (advice := remedy(error)):
                    raise
                path = requests.handlers.store.path
                log.error("%s: %s; nothing is acknowledged until this ends: %s", path, error, advice)
                await asyncio.sleep(wait_s)  # there is no event for free space
                wait_s = min(2 * wait_s, longest_s)
        if transaction and transaction.payloads:
            made_progress()
        self._router.unsent.budget = PARKED_BYTES - requests.parked_bytes
        while requests.out:
            self._router.send(requests.out.popleft())
        return requests.handlers.groups.turn.postponed and self._router.unsent.total < IN_FLIGHT_BYTES
