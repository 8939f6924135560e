"""Many clients of the samples wire in one process: real sockets, real messages, nothing behind them.

Used by `servers.py` and `ranks.py`. A `Connection` of `buffer/wire` has a ZeroMQ context and three tasks of its own;
two thousand of them would measure themselves. These share one context and one event loop. As a `Connection` they say
Hello on each new connection, and when the buffer has forgotten them, and repeat what is unanswered.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import zmq

from buffer.curve import endpoint, identify
from buffer.keys import ClientKeys
from buffer.wire.connection import MAX_RETRY, OPTIONS
from buffer.wire.message import Frame, Message, number_of, pack, unpack
from buffer.wire.protocol import ANSWERS, PROTOCOL, Hello, NotRegistered, Refused, Welcome

RETRY_S = 5.0
"""As `Connection.retry_s`."""
Heard = Callable[[int, int, Message, float, int], None]
"""Called with the client, the number of its request, the answer, the seconds that it took, and its bytes."""


@dataclass
class Unanswered:
    """A request that waits for its answer."""

    since: float
    frame: Frame
    wait_s: float
    due: float
    """When it is repeated, and `wait_s` doubled."""


class Crowd:
    """`size` clients of one role. Once one of them got what it should not, `failed` has the error."""

    def __init__(
        self,
        address: str,
        fingerprint: str,
        role: Literal["rollout", "learner", "observer"],
        size: int,
        heard: Heard,
        start: str,
        keys: ClientKeys,
    ) -> None:
        self.size, self._heard, self._keys = size, heard, keys
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * size + 64)
        self._numbers = [0] * size
        self._pending: list[dict[int, Unanswered]] = [{} for _ in range(size)]
        self._connected = [False] * size
        self._known = [False] * size
        """Whether the buffer said Welcome on this connection, and not yet that it has forgotten the client."""
        self._hello_due = [0.0] * size
        """When an unanswered Hello is repeated."""
        self.failed: asyncio.Future[None]
        self._repeating: asyncio.Task[None]
        self._hellos = [
            Hello(
                name=f"{role}-{at}", token=f"{start}-{role}-{at}", role=role, protocol=PROTOCOL, fingerprint=fingerprint
            )
            for at in range(size)
        ]
        self._sockets = [self._connect(address, hello.token) for hello in self._hellos]

    def _connect(self, address: str, token: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        for option, value in OPTIONS.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IDENTITY, token.encode())
        identify(socket, self._keys, address)
        socket.connect(endpoint(address, self._keys.folder))
        return socket

    def waits(self, client: int, number: int) -> bool:
        """Whether this request of a client is unanswered."""
        return number in self._pending[client]

    def start(self) -> None:
        """Say Hello, all of them."""
        loop = asyncio.get_running_loop()
        self.failed = loop.create_future()
        for client, socket in enumerate(self._sockets):
            loop.add_reader(socket.fileno(), self._read, client)
            loop.call_soon(self._read, client)
        self._repeating = asyncio.create_task(self._repeat())

    async def all_welcome(self) -> None:
        """Until the buffer knows all of them; raises what went wrong."""
        while not all(self._known):
            if self.failed.done():
                self.failed.result()
            await asyncio.sleep(0.005)

    async def obey(self, command: Callable[[bytes], None], *work: Coroutine[Any, Any, None]) -> None:
        """Call `command` with each line of this process's input until that ends, and do the `work` meanwhile; raises
        what went wrong in any of it."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

        async def read() -> None:
            while line := await reader.readline():
                command(line)

        ends = {self.failed, self._repeating, *(asyncio.create_task(one) for one in (read(), *work))}
        for end in (await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED))[0]:
            end.result()

    def close(self) -> None:
        """End all connections."""
        self._repeating.cancel()
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
        now = time.perf_counter()
        self._pending[client][number] = Unanswered(now, frame_of(number), RETRY_S, now + RETRY_S)
        if self._known[client]:  # else it goes out after Welcome
            self._say(client, self._pending[client][number].frame)
        return number

    def _say_hello(self, client: int) -> None:
        self._known[client], self._hello_due[client] = False, time.perf_counter() + RETRY_S
        self._numbers[client] += 1
        self._say(client, pack(self._numbers[client], self._hellos[client]))

    async def _repeat(self) -> None:
        """What is unanswered for long, a few clients at a time."""
        for client in itertools.cycle(range(self.size)):
            now = time.perf_counter()
            if self._connected[client] and not self._known[client] and now >= self._hello_due[client]:
                self._say_hello(client)
            for one in self._pending[client].values() if self._known[client] else ():
                if now >= one.due:
                    one.wait_s = min(2 * one.wait_s, MAX_RETRY * RETRY_S)
                    one.due = now + one.wait_s
                    self._say(client, one.frame)
            if client % 16 == 15 or client == self.size - 1:
                await asyncio.sleep(16 / max(self.size, 16))  # all of them each second: a pace

    def _say(self, client: int, frame: Frame) -> None:
        with suppress(zmq.Again):  # the connection broke: on the next one all is said again
            self._sockets[client].send(frame, zmq.DONTWAIT, copy=False)
        asyncio.get_running_loop().call_soon(self._read, client)  # a sent message may have used up the reader's event

    def _read(self, client: int) -> None:
        socket = self._sockets[client]
        if socket.closed or self.failed.done():
            return
        try:
            while (events := int(socket.getsockopt(zmq.EVENTS))) & zmq.POLLIN:
                self._take_in(client, [frame.buffer for frame in socket.recv_multipart(copy=False)])
            was, self._connected[client] = self._connected[client], bool(events & zmq.POLLOUT)
            if self._connected[client] and not was:
                self._say_hello(client)
        except Exception as error:  # in a callback of the loop: it would be logged only
            self.failed.set_exception(error)

    def _take_in(self, client: int, frames: Sequence[Frame]) -> None:
        size, part = sum(map(len, frames)), PartArrived()
        number: int
        answer: Message
        if size > 2**16 and self._hellos[client].role == "learner":  # a Part, whose samples nobody looks at here
            number, answer = number_of(frames[0]), part
        else:
            number, answer = unpack(frames[0], ANSWERS)
        if isinstance(answer, NotRegistered):
            if self._known[client]:
                self._known[client] = False
                self._say_hello(client)
        elif isinstance(answer, Welcome):
            resend, self._known[client] = not self._known[client], True
            for one in self._pending[client].values() if resend else ():
                self._say(client, one.frame)
        elif isinstance(answer, Refused):
            raise RuntimeError(answer.reason)
        elif number in self._pending[client]:
            self._heard(client, number, answer, time.perf_counter() - self._pending[client].pop(number).since, size)


class PartArrived(Message):
    """Stands for a Part."""
