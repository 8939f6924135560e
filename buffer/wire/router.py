"""The buffer's ZeroMQ socket: a ROUTER, the events of its connections, and what one connection may hold.

`ZMQ_MAXMSGSIZE` holds for a whole socket, so half a message of a stranger could reserve as much memory as a group. The
kernel counts the bytes of each connection (TCP_INFO); one that brings more than its role may send is closed.
"""

import asyncio
import logging
import os
import socket
import struct
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf

import numpy as np
import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from buffer.curve import LOCAL, LOCK, endpoint, judge_connections, split
from buffer.keys import ServerKeys
from buffer.resources import OpenFiles
from buffer.store.lock import InUse, locked
from buffer.wire.connection import DEAD_NETWORK
from buffer.wire.message import Frame
from configs.flow.capacity import COMMIT_BYTES, IN_FLIGHT_BYTES, OWN_FILES

log = logging.getLogger(__name__)
UNKNOWN_BYTES = 2**16
"""Bytes before a Hello is read."""
SMALL_BYTES = 2**22
HELLO_S = 60.0
FRAME_OVERHEAD = 64
"""Most bytes of the wire beside a message, with CURVE."""
UNSENT_BYTES = 32 * 2**20
KEPT_FILES = OWN_FILES // 2
"""Kept for the disk: below, connections without a Hello are closed."""
REPEAT_S = 10.0
BYTES_RECEIVED = 128
"""Offset in Linux's `struct tcp_info`."""
PASSES = 2
"""How often messages are read for one commit. ZeroMQ queues few of each client, so others arrive while the first are
judged; together they wait for the disk once."""
MAX_MESSAGES = 1024
COPY_BELOW = 2**16
"""Larger answers are sent without a copy."""

OPTIONS = {
    zmq.ROUTER_HANDOVER: 1,  # a client that reconnects keeps its identity
    # Small answers that one client has not read. Its connection is closed when it asks for more: an answer that was
    # dropped, and a group that was to be sent again, would be missed.
    zmq.SNDHWM: 2048,
    # Unread messages of one client: a group has megabytes, and there are thousands of servers.
    # One place is for the ZAP domain, so the end of a connection is noticed although two messages wait.
    zmq.RCVHWM: 3,
    zmq.LINGER: 1000,
    zmq.BACKLOG: 65535,  # all clients connect again at once; the kernel takes less where net.core.somaxconn is less
    **DEAD_NETWORK,
}
CONNECTIONS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class ListenError(ValueError):
    """The text names the address and the remedy."""

    pass


@dataclass
class CommitRoom:
    """What one commit may still read, in all its passes. The last message is taken whole."""

    messages: int = field(default_factory=lambda: MAX_MESSAGES)
    size: int = field(default_factory=lambda: COMMIT_BYTES)
    """Bytes."""


class Router:
    """`on_room` is called when large answers have left."""

    def __init__(self, address: str, max_message: int, keys: ServerKeys, on_room: Callable[[], None]) -> None:
        self.address, self._keys, self._on_room = address, keys, on_room
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self.plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        """For calls that do not wait: futures would cost more."""
        self._auth: ThreadAuthenticator | None = None
        self._lock: int | None = None
        """ZeroMQ would take the path of the Unix socket from another buffer."""
        self.unsent, self.limits, self._tracker = UnsentAnswers(), ConnectionLimits(), ConnectionTracker()
        self.strangers = asyncio.Event()
        self.events_read: deque[tuple[int, int]] = deque()
        self._heard: dict[bytes, int] = {}
        """File descriptors of those that sent something since the last look."""
        self._socket.monitor("inproc://connections", CONNECTIONS)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's thread would wait until there is room for an event
        self._monitor.connect("inproc://connections")
        self.events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self.poller = zmq.asyncio.Poller()
        for polled in self._socket, self._monitor:
            self.poller.register(polled, zmq.POLLIN)
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

    def receive(self, room: CommitRoom) -> tuple[list[tuple[str, list[Frame]]], bool]:
        """The messages of one pass, each with the role of its key; and whether there may be more."""
        received: list[tuple[str, list[Frame]]] = []
        while room.messages > 0 and room.size > 0:
            try:
                identity, *rest = self.plain.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return received, False
            who = identity.bytes
            self._heard.pop(who, None)  # a dict keeps the order of first insertions
            self._heard[who] = descriptor = int(identity.get(zmq.SRCFD))
            frames: list[Frame] = [who, *[frame.buffer for frame in rest]]
            received.append((str(identity.get("User-Id")), frames))
            size = sum(map(len, rest))
            room.messages, room.size = room.messages - 1, room.size - size
            if descriptor in self.limits.read:
                self.limits.read[descriptor] += size + FRAME_OVERHEAD
        return received, True

    def ended(self, role_of: Callable[[bytes], str | None], now: float) -> list[bytes]:
        """Identities whose connection has ended. `role_of`: the role of those that said Hello."""
        heard, self._heard = self._heard, {}
        self.read_events(now)
        events, self.events_read = self.events_read, deque()
        for identity, descriptor in heard.items():
            most, role = self.limits.most.get(descriptor), role_of(identity)
            if role and most is not None and (role == "rollout" or most != SMALL_BYTES):
                self.limits.admit(descriptor, large=role == "rollout")
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
        """Large frames are not copied. A process that reads none of its answers loses its connection, and asks again on
        its next one."""
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


class ConnectionLimits:
    """The connections of one ZeroMQ socket, by file descriptor.

    The kernel may give a descriptor to another socket before ZeroMQ's event is read. So only a socket whose own address
    is `endpoint` is shut down.
    """

    def __init__(self, files: OpenFiles | None = None) -> None:
        self.files = files or OpenFiles()
        self.endpoint = ""
        """`tcp://127.0.0.1:5600`, `ipc://PATH`."""
        self.unknown: dict[int, float] = {}
        """When they were made, the oldest first."""
        self.most: dict[int, int] = {}
        """Absent if the socket's own limit is enough."""
        self.read: dict[int, int] = {}
        self._closed: Counter[str] = Counter()
        self._logged_at = -inf

    def on_event(self, kind: int, descriptor: int, now: float) -> None:
        for known in (self.unknown, self.most, self.read):
            known.pop(descriptor, None)
        if kind == zmq.EVENT_ACCEPTED:
            self.unknown[descriptor], self.most[descriptor], self.read[descriptor] = now, UNKNOWN_BYTES, 0

    def admit(self, descriptor: int, large: bool) -> None:
        self.unknown.pop(descriptor, None)
        if large:
            self.most.pop(descriptor, None)
            self.read.pop(descriptor, None)
        elif descriptor in self.most:
            self.most[descriptor] = SMALL_BYTES

    def close_large(self, now: float) -> None:
        for descriptor, most in list(self.most.items()):
            arrived = bytes_received(descriptor)
            self.read[descriptor] = min(self.read[descriptor], arrived)
            if arrived - self.read[descriptor] > most:
                self.close(descriptor, "sent too much before a Hello" if most == UNKNOWN_BYTES else "sent too much")
        self.log(now)

    def close_silent(self, now: float) -> None:
        for descriptor in [one for one, since in self.unknown.items() if now - since > HELLO_S]:
            self.close(descriptor, f"said no Hello within {HELLO_S:g} s")

    def keep_files(self) -> None:
        if self.unknown and (left := self.files.left()) < KEPT_FILES:
            for descriptor in list(self.unknown)[: int(2 * (KEPT_FILES - left)) + 1]:
                self.close(descriptor, "said no Hello while open files ran out")

    def close(self, descriptor: int, why: str) -> None:
        self.on_event(zmq.EVENT_DISCONNECTED, descriptor, 0.0)
        self._closed[why] += 1
        end(descriptor, self.endpoint)

    def log(self, now: float) -> None:
        if self._closed and now >= self._logged_at + REPEAT_S:
            self._logged_at = now
            what = ", ".join(f"{number} that {why}" for why, number in self._closed.items())
            log.warning("closed connections: %s", what)
            self._closed.clear()


class UnsentAnswers:
    """Bytes of large answers that are not yet in the network, by who asked for them."""

    def __init__(self) -> None:
        self.total, self.budget = 0, inf
        self._of: Counter[bytes] = Counter()

    def add(self, identity: bytes, size: int) -> None:
        self.total += size
        self._of[identity] += size

    def remove(self, identity: bytes, size: int) -> None:
        self.total -= size
        self._of[identity] -= size
        if not self._of[identity]:
            del self._of[identity]

    def too_many(self, identity: bytes) -> bool:
        """The first large answer is always sent."""
        held = self._of.get(identity, 0)
        return held >= UNSENT_BYTES or (held > 0 and self.total >= self.budget)


class ConnectionTracker:
    """Which process sends over which connection of a ROUTER, and whose connection has ended.

    File descriptors are not unique: the kernel gives one to the next connection at once; a message may be read long
    after the end of its connection; and a connection whose process makes another one is closed without an event. So
    `ended` is given the messages read and, after them, all events up to then: a connection is accepted before it says
    anything, so its own event is among them. The next message corrects a wrong guess.
    """

    def __init__(self) -> None:
        self._over: dict[bytes, int] = {}
        """The descriptor of the last message."""
        self._last: dict[int, bytes] = {}
        self._closed: set[int] = set()
        """Descriptors without a connection."""

    def ended(self, heard: Mapping[bytes, int], events: Iterable[tuple[int, int]]) -> list[bytes]:
        """`heard`: descriptors of the messages read since the last call, in order; `events`: (kind, descriptor), in
        order."""
        changed, taken = set(), set()
        for kind, descriptor in events:
            changed.add(descriptor)
            (self._closed.add if kind == zmq.EVENT_DISCONNECTED else self._closed.discard)(descriptor)
        for who, descriptor in heard.items():
            if self._last.get(descriptor, who) != who:
                taken.add(descriptor)
            self._last[descriptor] = who
        self._over.update(heard)
        if not (changed or taken) and self._closed.isdisjoint(heard.values()):
            return []
        ended = [
            who
            for who, descriptor in self._over.items()
            if descriptor in self._closed
            or (descriptor in changed and who not in heard)
            or (descriptor in taken and self._last[descriptor] != who)
        ]
        for who in ended:
            del self._over[who]
        return ended

    def close(self, identity: bytes, limits: ConnectionLimits) -> None:
        if (descriptor := self._over.get(identity)) is not None and self._last.get(descriptor) == identity:
            limits.close(descriptor, "read none of its answers")


def bytes_received(descriptor: int) -> int:
    """0 for a connection that is gone, or is not TCP."""
    with suppress(OSError), _borrowed(descriptor) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
        if len(info) == BYTES_RECEIVED + 8:
            return int(struct.unpack_from("=Q", info, BYTES_RECEIVED)[0])
    return 0


def end(descriptor: int, endpoint: str) -> None:
    """Shut down a connection that was accepted at `endpoint`; its owner closes it."""
    with suppress(OSError), _borrowed(descriptor) as connection:
        if accepted_at(connection, endpoint):
            connection.shutdown(socket.SHUT_RDWR)


def accepted_at(connection: socket.socket, endpoint: str) -> bool:
    own = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        return endpoint == f"ipc://{own}"
    return endpoint.startswith("tcp://") and endpoint.rpartition(":")[2] == str(own[1])


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """ZeroMQ's own socket, which stays open. Raises OSError."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
