"""Whose connection to a ROUTER has ended: a peer that is killed is missed at once, long before its silence is noticed.

`ConnectionEvents` reads what ZeroMQ's monitor reports of a socket's connections, `ConnectionTracker` finds out which
peers they belong to. Used by the sockets of the buffer (`server.py`) and the learner (`learner/weights/sender/
members.py`). Only `ConnectionEvents.wait` waits.
"""

import struct
from collections.abc import Iterable, Mapping

import zmq
import zmq.asyncio

from buffer.wire.connections import ConnectionLimits


class ConnectionEvents:
    """What happens to connections of `socket`, which has no other monitor: (kind, file descriptor) of each that is
    accepted (`zmq.EVENT_ACCEPTED`) or ends (`zmq.EVENT_DISCONNECTED`)."""

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
        self._socket, address = socket, f"inproc://connections-{id(self)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.monitor = context.socket(zmq.PAIR)
        """Readable while there are events that were not read."""
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's thread would wait until there is room for an event
        self.monitor.connect(address)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self.monitor)

    async def wait(self) -> None:
        """Return once there are events that were not read."""
        await self.monitor.poll()

    def poll(self, timeout_ms: int) -> bool:
        """Block until there are events that were not read, or for `timeout_ms`. Returns whether there are."""
        return bool(self._plain.poll(timeout_ms))

    def new(self) -> list[tuple[int, int]]:
        """The events since the last call, in order."""
        events = list[tuple[int, int]]()
        while self._plain.poll(0):
            kind, descriptor = struct.unpack("=hi", self._plain.recv_multipart()[0])
            events.append((kind, descriptor))
        return events

    def close(self) -> None:
        """Call it before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)


class ConnectionTracker:
    """Which peer uses which connection of a ROUTER, and whose connection has ended.

    ZeroMQ names connections by their file descriptors, in messages (`frame.get(zmq.SRCFD)`) and in a monitor's events.
    Such a name is not unique: the kernel gives it to the next connection at once; what came over a connection may be
    read long after its end, under a name that ZeroMQ makes if its process has another one by then; and a connection
    whose process makes another one is closed without an event. So `ended` is given the messages read and, after them,
    all events up to then: a connection is accepted before it says anything, so its own event is among them. If
    two identities sent over one descriptor, the later one has it. A wrong guess is corrected by the next message.

    Example: `ConnectionTracker().ended({b"a": 20}, [(zmq.EVENT_ACCEPTED, 20), (zmq.EVENT_DISCONNECTED, 20)]) == [b"a"]`
    """

    def __init__(self) -> None:
        self._over: dict[bytes, int] = {}
        """By identity: the descriptor over which its last message came."""
        self._last: dict[int, bytes] = {}
        """By descriptor: the identity of the last message that came over it."""
        self._closed: set[int] = set()
        """Descriptors without a connection."""

    def ended(self, heard: Mapping[bytes, int], events: Iterable[tuple[int, int]]) -> list[bytes]:
        """Identities whose connections have ended since the last call. `heard`: descriptors of the messages read since,
        by identity, in the order of the last ones; `events`: (kind, descriptor) of the events since, in order."""
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
        """End the connection of a process that does not read."""
        if (descriptor := self._over.get(identity)) is not None and self._last.get(descriptor) == identity:
            limits.close(descriptor, "read none of its answers")
