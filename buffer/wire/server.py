"""The buffer's socket: a ZeroMQ ROUTER in one event loop, in front of `requests.py`. Run by `python -m buffer`.

Waits for messages, for the next lease to end, or for the disk. It reads all messages that are there, applies them to
the pending requests, commits what they changed in one transaction, and only then sends the answers: what is
acknowledged is on disk. Then it makes a few parts for the Takes of a batch that is formed: nobody else waits for those.
Messages that arrive meanwhile wait in ZeroMQ's queues for the next commit. The commit runs in
the event loop: in a thread of its own it was slower, because between two waits for the disk it holds the GIL. While the
disk is full, nothing is received or answered, and the commit is tried again until there is room.
"""

import asyncio
import logging
import os
import sqlite3
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from buffer.curve import LOCAL, LOCK, endpoint, judge_connections, split
from buffer.keys import ServerKeys
from buffer.resources import MemoryWatch
from buffer.store.failures import remedy
from buffer.store.lock import InUse, locked
from buffer.wire.clock import TICK_S, ListeningClock
from buffer.wire.connection import DEAD_NETWORK
from buffer.wire.connection_events import ConnectionEvents
from buffer.wire.connections import ConnectionLimits, ConnectionTracker, UnsentAnswers
from buffer.wire.handlers import LoopTurn, Peer
from buffer.wire.message import Frame
from buffer.wire.requests import PendingRequests
from configs.entrypoint import unless
from configs.flow.capacity import COMMIT_BYTES, IN_FLIGHT_BYTES, PARKED_BYTES

log = logging.getLogger(__name__)
MAX_MESSAGES = 1024
"""Most messages of one commit, which also has at most COMMIT_BYTES."""
COPY_BELOW = 2**16
"""Bytes; larger answers are sent without a copy."""
TURN_S = 0.005, 0.02
"""How long parts are made for Takes before messages are looked at again: as long as all else took in this turn, within
these bounds."""
RETRY_S = 1.0, 15.0
"""First and longest wait before a failed commit is tried again."""
LOOK_S, IDLE_LOOK_S, LOOK_SHARE = 0.02, 0.1, 20
"""Shortest time between two looks at the bytes of strangers' connections, the same without strangers, and how many
times as long as a look."""

OPTIONS = {
    zmq.ROUTER_HANDOVER: 1,  # a client that reconnects keeps its identity
    # Small answers that one client has not read. Its connection is closed when it asks for more: an answer that was
    # dropped, and a group that was to be sent again, would be missed.
    zmq.SNDHWM: 2048,
    # Most messages of one client that wait to be read: a group has megabytes, and there are thousands of servers.
    # One place is for the ZAP domain, so the end of a connection is noticed although two messages wait.
    zmq.RCVHWM: 3,
    zmq.LINGER: 1000,
    zmq.BACKLOG: 65535,  # all clients connect again at once; the kernel takes less where net.core.somaxconn is less
    **DEAD_NETWORK,
}


class ListenError(ValueError):
    """The address cannot be listened on; the text names it and the remedy."""


class BufferServer:
    """Async context manager: bound once entered, closed when left. `address` is the bound one. `clock` must be the
    clock with which the ledger was restored."""

    def __init__(self, address: str, max_message: int, keys: ServerKeys, clock: ListeningClock | None = None) -> None:
        self.address, self.keys, self.clock = address, keys, clock or ListeningClock()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        """The same socket for calls that do not wait: a future for each message would cost more than the message."""
        self._auth: ThreadAuthenticator | None = None
        self._lock: int | None = None
        """Holds the lock of the Unix socket, whose path ZeroMQ would take from another buffer."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._polling: asyncio.Future[Any] | None = None
        self._due: float | None = None
        """When the next deadline is reached, by `clock`."""
        self._news = False
        self._unsent = UnsentAnswers()
        self._limits, self._strangers = ConnectionLimits(), asyncio.Event()
        self._read_events: deque[tuple[int, int]] = deque()
        """Events of connections that were read and not yet passed to the tracker."""
        self._tracker = ConnectionTracker()
        self._heard: dict[bytes, int] = {}
        """Identities that sent something since the last look, and the file descriptors of their connections."""
        self._events = ConnectionEvents(self._context, self._socket)
        self._poller = zmq.asyncio.Poller()
        for socket in self._socket, self._events.monitor:
            self._poller.register(socket, zmq.POLLIN)
        for option, value in OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending raises where a client does not read
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_message)  # above max_message it is refused in words

    async def __aenter__(self) -> "BufferServer":
        try:
            self._auth = judge_connections(self._context, self._socket, self.keys, self.address)
            self._bind_local() if self.address == LOCAL else self._bind()
            self._limits.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._auth:
            self._auth.stop()
        self._events.close()
        self._socket.close()
        self._context.term()
        if self._lock is not None:
            os.close(self._lock)

    def _bind_local(self) -> None:
        folder = self.keys.folder
        try:
            self._lock = locked(folder / LOCK)
            self._socket.bind(endpoint(self.address, folder))
        except InUse as error:
            problem = f"{folder / LOCK} is {error}, another buffer of this run; stop it"
            raise ListenError(f"buffer.address {self.address}: {problem}") from None
        except (OSError, zmq.ZMQError) as error:
            problem = f"{error.strerror}; if {folder} cannot hold a Unix socket, set it to tcp://127.0.0.1:5600"
            raise ListenError(f"buffer.address {self.address}: {problem}") from None

    def _bind(self) -> None:
        host, port = split(self.address)
        try:
            self._socket.bind(f"tcp://127.0.0.1:{port}" if host == "localhost" else self.address)
        except zmq.ZMQError as error:
            busy = error.errno == zmq.EADDRINUSE
            advice = (
                "another process listens there: stop it, or choose another port"
                if busy
                else "it must be of this machine"
            )
            raise ListenError(f"buffer.address {self.address}: {error.strerror}; {advice}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def serve(self, requests: PendingRequests) -> None:
        """Serve until cancelled. Everything received by then is committed and answered, unless the disk is full."""
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
        memory = MemoryWatch(self.clock.now())
        while True:
            self.clock.mark()
            await self._wake(at_once=requests.postponed and self._unsent.total < IN_FLIGHT_BYTES)
            self.clock.mark()
            began = time.monotonic()
            requests.begin_turn(LoopTurn(seconds=0.0))
            received, more = self._receive()
            if not received:  # a commit looks for itself
                requests.handlers.store.require_same_files()
            now, requests.unsent_bytes = self.clock.now(), self._unsent.total
            for role, frames in received:
                requests.receive(frames, now, role)
            for identity in self._ended(requests.handlers.peers, now):
                requests.disconnected(identity, now)
            if not more:  # a server is silent only if no message of it waits to be read
                requests.expire(now)
            await self._answer(requests, now, more)
            if requests.postponed and self._unsent.total < IN_FLIGHT_BYTES:
                seconds = min(max(time.monotonic() - began, TURN_S[0]), TURN_S[1])
                requests.begin_turn(LoopTurn(seconds, IN_FLIGHT_BYTES - self._unsent.total))
                await self._answer(requests, now, more)
            requests.handlers.ledger.draw_ahead()
            requests.handlers.let_go()
            memory.look(requests.held | {"answers on their way": self._unsent.total}, now)

    async def _answer(self, requests: PendingRequests, now: float, more: bool) -> None:
        """Try what is parked, write what changed, and send the answers. `more`: messages wait to be read."""
        requests.retry(now)
        if not more:
            self._due = requests.expire(now)  # what was tried again may wait for the clock too
        await self._commit(requests)

    async def _wake(self, at_once: bool) -> None:
        """Wait for a message or for the clock; not at all if there is something to do `at_once`."""
        if at_once or self._plain.poll(0):
            return await asyncio.sleep(0)  # signal handlers run in the loop too
        wait_s = TICK_S if self._due is None else min(max(0.0, self._due - self.clock.now()), TICK_S)
        self.clock.mark(wait_s)
        if not self.has_news():
            polling = self._poller.poll(round(wait_s * 1000) + 1)
            self._polling = asyncio.ensure_future(polling)
            try:
                await self._polling
            except asyncio.CancelledError:
                cancelled = asyncio.current_task()
                if not self.has_news() or (cancelled and cancelled.cancelling()):
                    raise
        self._news = False

    def wake(self) -> None:
        """Have pending requests tried again, if `revision` has moved. May be called from any thread."""
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_news)

    def has_news(self) -> bool:
        """Whether `wake` was called since the last wait."""
        return self._news

    def _ended(self, peers: Mapping[bytes, Peer], now: float) -> list[bytes]:
        """Identities whose connections have ended since the last call; notes which connections are known ones."""
        heard, self._heard = self._heard, {}
        self._read_new_events(now)
        events, self._read_events = self._read_events, deque()
        for identity, descriptor in heard.items():
            if peer := peers.get(identity):
                self._limits.admit(descriptor, large=peer.hello.role == "rollout")
        self._limits.close_silent(now)
        return self._tracker.ended(heard, events)

    def _read_new_events(self, now: float) -> None:
        for kind, descriptor in self._events.new():
            self._read_events.append((kind, descriptor))
            self._limits.on_event(kind, descriptor, now)
        if self._limits.unknown:
            self._strangers.set()

    async def _watch_strangers(self) -> None:
        """Close connections that hold more than they may, also while a commit waits for the disk."""
        pause_s = LOOK_S
        while True:
            self._strangers.clear()
            await asyncio.sleep(pause_s)
            if not self._limits.unknown:
                await unless(self._strangers, asyncio.sleep(IDLE_LOOK_S))
            began, now = time.monotonic(), self.clock.now()
            self._read_new_events(now)
            if self._read_events:
                self._on_news()
            self._limits.close_large(now)
            self._limits.keep_files()
            pause_s = max(LOOK_S, LOOK_SHARE * (time.monotonic() - began))

    def _on_news(self) -> None:
        self._news = True
        if self._polling:
            self._polling.cancel()

    def _receive(self) -> tuple[list[tuple[str, list[Frame]]], bool]:
        """All messages that are there, up to what one commit gathers, each with the role of its connection's key; and
        whether there may be more."""
        received: list[tuple[str, list[Frame]]] = []
        gathered = 0
        while len(received) < MAX_MESSAGES and gathered < COMMIT_BYTES:
            try:
                identity, *rest = self._plain.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return received, False
            self._heard.pop(identity.bytes, None)  # a dict keeps the order of first insertions
            self._heard[identity.bytes] = descriptor = int(identity.get(zmq.SRCFD))
            frames: list[Frame] = [identity.bytes, *(frame.buffer for frame in rest)]
            received.append((str(identity.get("User-Id")), frames))
            gathered += (size := sum(map(len, rest)))
            self._limits.on_message(descriptor, size)
        return received, True

    async def _commit(self, requests: PendingRequests) -> None:
        """Write what changed, then answer."""
        wait_s, longest_s = RETRY_S
        transaction = requests.changes()
        while transaction:
            try:
                requests.commit(transaction)
                break
            except (sqlite3.OperationalError, OSError) as error:
                if not (advice := remedy(error)):
                    raise
                log.error("%s: %s; nothing is acknowledged until this ends: %s", requests.path, error, advice)
                await asyncio.sleep(wait_s)  # there is no event for free space
                wait_s = min(2 * wait_s, longest_s)
        self._unsent.budget = PARKED_BYTES - requests.parked_bytes
        for answer in requests.answers():
            self._send(answer)

    def _send(self, answer: Sequence[Frame]) -> None:
        """Hand an answer over to ZeroMQ. Large frames are not copied, and count until their bytes have left. A process
        that reads none of its answers loses its connection; on its next one it asks again."""
        identity, size = bytes(answer[0]), sum(map(len, answer))
        try:
            if size < COPY_BELOW:
                self._plain.send_multipart(answer, zmq.DONTWAIT)
            elif not self._unsent.too_many(identity):
                return self._send_large(identity, answer, size)
            else:
                self._tracker.close(identity, self._limits)
        except zmq.Again:
            self._tracker.close(identity, self._limits)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the process has ended
                raise

    def _send_large(self, identity: bytes, answer: Sequence[Frame], size: int) -> None:
        largest = max(range(len(answer)), key=lambda at: len(answer[at]))
        tracked = np.frombuffer(answer[largest], np.uint8)
        # ZeroMQ lets go of it in a thread of its own
        weakref.finalize(tracked, self._on_sent, identity, size).atexit = False
        self._unsent.add(identity, size)
        frames = [*answer[:largest], tracked.data, *answer[largest + 1 :]]
        self._plain.send_multipart(frames, zmq.DONTWAIT, copy=False)

    def _on_sent(self, identity: bytes, size: int) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing is sent any more
            assert self._loop
            self._loop.call_soon_threadsafe(self._let_go, identity, size)

    def _let_go(self, identity: bytes, size: int) -> None:
        was = self._unsent.total
        self._unsent.remove(identity, size)
        if self._unsent.total < IN_FLIGHT_BYTES <= was:
            self._on_news()
