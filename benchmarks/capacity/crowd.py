"""Many clients of the samples wire in one process: real sockets, real messages, nothing behind them.

Used by `servers.py` and `ranks.py`. A `Connection` of `buffer/wire` has a ZeroMQ context and three tasks of its own;
two thousand of them would measure themselves. These share one context, and repeat what is unanswered when the buffer
has forgotten them. They wait in one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

import zmq

from buffer.wire.message import Frame, Message, number_of, pack, unpack
from buffer.wire.protocol import ANSWERS, PROTOCOL, Hello, NotRegistered, Refused, Welcome

Heard = Callable[[int, int, Message, float, int], None]
"""Called with the client, the number of its request, the answer, the seconds that it took, and its bytes."""


class Crowd:
    """`size` clients of one role."""

    def __init__(
        self,
        address: str,
        fingerprint: str,
        role: Literal["rollout", "learner", "observer"],
        size: int,
        heard: Heard,
        start: str,
    ) -> None:
        self.size, self._heard = size, heard
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * size + 64)
        self._numbers = [0] * size
        self._pending: list[dict[int, tuple[float, Frame]]] = [{} for _ in range(size)]
        self._known = [False] * size
        """Whether the buffer knows the client: it said Welcome, and not yet that it has forgotten it."""
        self._hellos = [
            Hello(
                name=f"{role}-{at}", token=f"{start}-{role}-{at}", role=role, protocol=PROTOCOL, fingerprint=fingerprint
            )
            for at in range(size)
        ]
        self._sockets = [self._connected(address, hello.token) for hello in self._hellos]

    def _connected(self, address: str, token: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        for option, value in {zmq.LINGER: 0, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.RECONNECT_IVL: 50}.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IDENTITY, token.encode())
        socket.connect(address)
        return socket

    @property
    def welcomed(self) -> bool:
        """Whether the buffer knows all of them."""
        return all(self._known)

    def waits(self, client: int, number: int) -> bool:
        """Whether this request of a client is unanswered."""
        return number in self._pending[client]

    def start(self) -> None:
        """Say Hello, all of them; call it in the loop."""
        loop = asyncio.get_running_loop()
        for client, socket in enumerate(self._sockets):
            loop.add_reader(socket.fileno(), self._read, client)
            self._say_hello(client)

    def close(self) -> None:
        """End all connections."""
        for socket in self._sockets:
            asyncio.get_running_loop().remove_reader(socket.fileno())
            socket.close(0)
        self._context.term()

    def send(self, client: int, message: Message) -> int:
        """A request of one client; returns its number."""
        return self.send_frame(client, lambda number: pack(number, message))

    def send_frame(self, client: int, frame_of: Callable[[int], Frame]) -> int:
        """The same for a frame that is packed by hand, given the number of the request."""
        self._numbers[client] += 1
        number = self._numbers[client]
        self._pending[client][number] = time.perf_counter(), frame_of(number)
        if self._known[client]:  # else it goes out after Welcome
            self._say(client, self._pending[client][number][1])
        return number

    def _say_hello(self, client: int) -> None:
        self._numbers[client] += 1
        self._say(client, pack(self._numbers[client], self._hellos[client]))

    def _say(self, client: int, frame: Frame) -> None:
        self._sockets[client].send(frame, copy=False)
        asyncio.get_running_loop().call_soon(self._read, client)  # a sent message may have used up the reader's event

    def _read(self, client: int) -> None:
        socket = self._sockets[client]
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._take_in(client, [frame.buffer for frame in socket.recv_multipart(copy=False)])

    def _take_in(self, client: int, frames: Sequence[Frame]) -> None:
        size, part = sum(map(len, frames)), PartArrived()
        number: int
        answer: Message
        if size > 2**16:  # a Part, whose samples nobody looks at here
            number, answer = number_of(frames[0]), part
        else:
            number, answer = unpack(frames[0], ANSWERS)
        if isinstance(answer, NotRegistered):
            if self._known[client]:
                self._known[client] = False
                self._say_hello(client)
        elif isinstance(answer, Welcome):
            self._known[client] = True
            for _, frame in self._pending[client].values():
                self._say(client, frame)
        elif isinstance(answer, Refused):
            raise RuntimeError(answer.reason)
        elif number in self._pending[client]:
            self._heard(client, number, answer, time.perf_counter() - self._pending[client].pop(number)[0], size)


class PartArrived(Message):
    """Stands for a Part."""
