"""The buffer's ZeroMQ socket: a ROUTER, and the events of its connections."""

import asyncio
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from buffer.curve import LOCAL, LOCK, endpoint, judge_connections, split
from buffer.keys import ServerKeys
from buffer.store.lock import InUse, locked
from buffer.wire.connection import DEAD_NETWORK
from buffer.wire.connections import ConnectionLimits, ConnectionTracker, UnsentAnswers
from buffer.wire.message import Frame
from buffer.wire.peers import Peer
from configs.flow.capacity import COMMIT_BYTES, IN_FLIGHT_BYTES

MAX_MESSAGES = 1024
COPY_BELOW = 2**16
"""Bytes; larger answers are sent without a copy."""

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
CONNECTIONS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class ListenError(ValueError):
    """The address cannot be listened on; the text names it and the remedy."""

    pass


class Router:
    """`on_room` is called when large answers have left."""

    def __init__(self, address: str, max_message: int, keys: ServerKeys, on_room: Callable[[], None]) -> None:
        self.address, self._keys, self._on_room = address, keys, on_room
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self.plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        """For calls that do not wait: a future for each message would cost more."""
        self._auth: ThreadAuthenticator | None = None
        self._lock: int | None = None
        """ZeroMQ would take the path of the Unix socket from another buffer."""
        self.unsent, self.limits, self._tracker = UnsentAnswers(), ConnectionLimits(), ConnectionTracker()
        self.strangers = asyncio.Event()
        """Set while a process has not said Hello."""
        self.events_read: deque[tuple[int, int]] = deque()
        self._heard: dict[bytes, int] = {}
        """File descriptors of identities that sent something since the last look."""
        self._socket.monitor("inproc://connections", CONNECTIONS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's thread would wait until there is room for an event
        self._monitor.connect("inproc://connections")
        self.events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self.poller = zmq.asyncio.Poller()
        for socket in self._socket, self._monitor:
            self.poller.register(socket, zmq.POLLIN)
        for option, value in OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending raises where a client does not read
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_message)  # above max_message it is refused in words

    def open(self) -> str:
        """Bind the socket; returns the bound address. Raises ListenError."""
        try:
            self._auth = judge_connections(self._socket.context, self._socket, self._keys, self.address)
            self._bind_local() if self.address == LOCAL else self._bind()
            self.limits.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self.close()
            raise
        return self.address

    def close(self) -> None:
        if self._auth:
            self._auth.stop()
        self._socket.disable_monitor()
        self._monitor.close(0)
        context = self._socket.context
        self._socket.close()
        context.term()
        if self._lock is not None:
            os.close(self._lock)

    def _bind_local(self) -> None:
        folder = self._keys.folder
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

    def receive(self) -> tuple[list[tuple[str, list[Frame]]], bool]:
        """The messages of one commit, each with the role of its key; and whether there may be more."""
        received: list[tuple[str, list[Frame]]] = []
        gathered = 0
        while len(received) < MAX_MESSAGES and gathered < COMMIT_BYTES:
            try:
                identity, *rest = self.plain.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return received, False
            who = identity.bytes
            self._heard.pop(who, None)  # a dict keeps the order of first insertions
            self._heard[who] = descriptor = int(identity.get(zmq.SRCFD))
            frames: list[Frame] = [who, *[frame.buffer for frame in rest]]
            received.append((str(identity.get("User-Id")), frames))
            gathered += (size := sum(map(len, rest)))
            self.limits.on_message(descriptor, size)
        return received, True

    def ended(self, peers: Mapping[bytes, Peer], now: float) -> list[bytes]:
        heard, self._heard = self._heard, {}
        self.read_events(now)
        events, self.events_read = self.events_read, deque()
        for identity, descriptor in heard.items():
            if peer := peers.get(identity):
                self.limits.admit(descriptor, large=peer.hello.role == "rollout")
        if self.limits.unknown:
            self.limits.close_silent(now)
        return self._tracker.ended(heard, events)

    def read_events(self, now: float) -> None:
        while self.events.poll(0):
            kind, descriptor = struct.unpack("=hi", self.events.recv_multipart()[0])
            self.events_read.append((kind, descriptor))
            self.limits.on_event(kind, descriptor, now)
        if self.limits.unknown:
            self.strangers.set()

    def send(self, answer: Sequence[Frame]) -> None:
        """Large frames are not copied. A process that reads none of its answers loses its connection; on its next one
        it asks again."""
        identity, size = bytes(answer[0]), sum(map(len, answer))
        try:
            if size < COPY_BELOW:
                self.plain.send_multipart(answer, zmq.DONTWAIT)
            elif not self.unsent.too_many(identity):
                return self._send_large(identity, answer, size)
            else:
                self._tracker.close(identity, self.limits)
        except zmq.Again:
            self._tracker.close(identity, self.limits)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the process has ended
                raise

    def _send_large(self, identity: bytes, answer: Sequence[Frame], size: int) -> None:
        largest = max(range(len(answer)), key=lambda at: len(answer[at]))
        tracked = np.frombuffer(answer[largest], np.uint8)
        # ZeroMQ lets go of it in a thread of its own
        weakref.finalize(tracked, self._on_sent, asyncio.get_running_loop(), identity, size).atexit = False
        self.unsent.add(identity, size)
        frames = [*answer[:largest], tracked.data, *answer[largest + 1 :]]
        self.plain.send_multipart(frames, zmq.DONTWAIT, copy=False)

    def _on_sent(self, loop: asyncio.AbstractEventLoop, identity: bytes, size: int) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing is sent any more
            loop.call_soon_threadsafe(self._let_go, identity, size)

    def _let_go(self, identity: bytes, size: int) -> None:
        was = self.unsent.total
        self.unsent.remove(identity, size)
        if self.unsent.total < IN_FLIGHT_BYTES <= was:
            self._on_room()
