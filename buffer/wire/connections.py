"""What one connection to the buffer may hold: unread bytes, unread answers and an open file.

`ZMQ_MAXMSGSIZE` holds for a whole socket, so half a message of a stranger could reserve as much memory as a group. The
kernel counts the bytes of each connection (TCP_INFO); one that brings more than its role may send is closed.
"""

import logging
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf

import zmq

from buffer.resources import OpenFiles
from configs.flow.capacity import OWN_FILES

log = logging.getLogger(__name__)
UNKNOWN_BYTES = 2**16
"""Bytes before a Hello is read."""
SMALL_BYTES = 2**22
"""Unread bytes of a learner's or an observer's connection."""
HELLO_S = 60.0
FRAME_OVERHEAD = 64
"""Most bytes of the wire for a message beside itself, with CURVE."""
UNSENT_BYTES = 32 * 2**20
KEPT_FILES = OWN_FILES // 2
"""Open files that are kept for the disk: below, connections without a Hello are closed."""
REPEAT_S = 10.0
BYTES_RECEIVED = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


class ConnectionLimits:
    """The connections of one ZeroMQ socket, by their file descriptors.

    The kernel may give a descriptor to another socket before ZeroMQ's event is read. So only a socket whose own address
    is `endpoint` is shut down.
    """

    def __init__(self, files: OpenFiles | None = None) -> None:
        self.files = files or OpenFiles()
        self.endpoint = ""
        """`tcp://127.0.0.1:5600`, `ipc://PATH`."""
        self.unknown: dict[int, float] = {}
        """The oldest first, and when they were made."""
        self._most: dict[int, int] = {}
        """Unread bytes; absent if the socket's own limit is enough."""
        self._read: dict[int, int] = {}
        self._closed: Counter[str] = Counter()
        self._logged_at = -inf

    def on_event(self, kind: int, descriptor: int, now: float) -> None:
        for known in (self.unknown, self._most, self._read):
            known.pop(descriptor, None)
        if kind == zmq.EVENT_ACCEPTED:
            self.unknown[descriptor], self._most[descriptor], self._read[descriptor] = now, UNKNOWN_BYTES, 0

    def on_message(self, descriptor: int, size: int) -> None:
        if descriptor in self._read:
            self._read[descriptor] += size + FRAME_OVERHEAD

    def admit(self, descriptor: int, large: bool) -> None:
        self.unknown.pop(descriptor, None)
        if large:
            self._most.pop(descriptor, None)
            self._read.pop(descriptor, None)
        elif descriptor in self._most:
            self._most[descriptor] = SMALL_BYTES

    def close_large(self, now: float) -> None:
        for descriptor, most in list(self._most.items()):
            arrived = bytes_received(descriptor)
            self._read[descriptor] = min(self._read[descriptor], arrived)
            if arrived - self._read[descriptor] > most:
                self.close(descriptor, "sent too much before a Hello" if most == UNKNOWN_BYTES else "sent too much")
        self.log(now)

    def close_silent(self, now: float) -> None:
        """Call it only while messages are read."""
        for descriptor in [one for one, since in self.unknown.items() if now - since > HELLO_S]:
            self.close(descriptor, f"said no Hello within {HELLO_S:g} s")

    def keep_files(self) -> None:
        """The oldest connections without a Hello make room."""
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
    """Bytes of large answers that ZeroMQ has not yet handed to the network, by who asked for them."""

    def __init__(self) -> None:
        self.total, self.budget = 0, inf
        """Groups that wait for room share the budget."""
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

    ZeroMQ names connections by file descriptors, which are not unique: the kernel gives a descriptor to the next
    connection at once; a message may be read long after the end of its connection; and a connection whose process makes
    another one is closed without an event. So `ended` is given the messages read and, after them, all events up to
    then: a connection is accepted before it says anything, so its own event is among them. The next message corrects a
    wrong guess.
    """

    def __init__(self) -> None:
        self._over: dict[bytes, int] = {}
        """The descriptor of the last message, by identity."""
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
    """Whether the socket's own address is the path, or has the port, of `endpoint`."""
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
