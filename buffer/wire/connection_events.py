"""Reads from ZeroMQ's monitor which connections of a socket were made and which have ended."""

import struct

import zmq
import zmq.asyncio


class ConnectionEvents:
    """`socket` has no other monitor."""

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
        self._socket, address = socket, f"inproc://connections-{id(self)}"
        socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's thread would wait until there is room for an event
        self.monitor.connect(address)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self.monitor)

    async def wait(self) -> None:
        await self.monitor.poll()

    def poll(self, timeout_ms: int) -> bool:
        return bool(self._plain.poll(timeout_ms))

    def new(self) -> list[tuple[int, int]]:
        events = list[tuple[int, int]]()
        while self._plain.poll(0):
            kind, descriptor = struct.unpack("=hi", self._plain.recv_multipart()[0])
            events.append((kind, descriptor))
        return events

    def close(self) -> None:
        """Call it before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close(0)
