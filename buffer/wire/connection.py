"""One process's connection to the buffer.

A request is repeated until it is answered: on a new connection, when the buffer has restarted, and every now and then
in between. There is no timeout.
"""

import asyncio
import itertools
import logging
import struct
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar, overload

import zmq
import zmq.asyncio

from buffer.curve import endpoint, identify
from buffer.keys import ClientKeys
from buffer.wire.message import Frame, Message, pack, unpack
from buffer.wire.protocol import ANSWERS, PROTOCOL, Again, Hello, Later, NotRegistered, Refused, Welcome

log = logging.getLogger(__name__)
MAX_RETRY = 12
"""In units of `retry_s`."""
ANEW = 6
"""Repeated Hellos until the socket connects anew: a busy buffer may be slow to shake hands."""
Answer = TypeVar("Answer", bound=Message)
Other = TypeVar("Other", bound=Message)

# Both ends leave dead networks to the kernel. No ZMQ_HEARTBEAT_IVL at either: libzmq 4.3.5 aborts the buffer where its
# own timer, or the ping of a client, meets a connection that broke while RCVHWM stopped its reading, as when a client
# ends during a long commit, or gives up a buffer that is stopped (`stream_engine_base.cpp: !_io_error`).
DEAD_NETWORK = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,  # s
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 2,
    zmq.TCP_MAXRT: 15000,  # ms that sent bytes may stay unacknowledged
}
OPTIONS = {
    zmq.IMMEDIATE: 1,  # unanswered requests are sent again on the next connection
    zmq.LINGER: 0,
    zmq.SNDHWM: 0,
    zmq.RCVHWM: 0,
    zmq.RECONNECT_IVL: 50,  # ms
    zmq.RECONNECT_IVL_MAX: 250,  # a buffer that was started again serves all clients at once
    **DEAD_NETWORK,
}
LOST: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection broke",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ended the handshake: does it have other keys (<run>/keys), or none?",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it uses no keys: another program, or an older Headrace, listens there",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know our key: copy <run>/keys from the buffer's machine",
}


async def broken(socket: zmq.asyncio.Socket) -> AsyncGenerator[int, None]:
    """The file descriptor of each connection that breaks: the kernel reports at once when a process ends."""
    async with aclosing(events_of(socket, zmq.EVENT_DISCONNECTED)) as events:
        async for _, descriptor in events:
            yield descriptor


async def events_of(socket: zmq.asyncio.Socket, kinds: int) -> AsyncGenerator[tuple[int, int], None]:
    """Kind and file descriptor of each event of these kinds, until cancelled."""
    monitor = socket.get_monitor_socket(kinds)
    try:
        while True:
            kind, descriptor = struct.unpack("=hi", (await monitor.recv_multipart())[0])
            yield kind, descriptor
    finally:
        socket.disable_monitor()
        monitor.close(0)


class RefusedError(RuntimeError):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ProtocolFault(RuntimeError):
    """The answer does not fit the request."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; install the same Headrace everywhere, or report it")

    @classmethod
    def of(cls, message: Message, answer: Message) -> "ProtocolFault":
        return cls(f"the buffer answered {type(message).__name__} with {type(answer).__name__}")


class MessageTooLarge(RefusedError):
    """Above `buffer.max_message_mib`; not sent."""


@dataclass
class PendingAnswer:
    frame: Frame
    answer: "asyncio.Future[Message]"
    is_put_off: bool = False


class Dealer:
    """One process, one `identity`, through all connections."""

    def __init__(self, identity: str) -> None:
        self.socket = zmq.asyncio.Context().socket(zmq.DEALER)
        for option, value in OPTIONS.items():
            self.socket.setsockopt(option, value)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._monitor = self.socket.get_monitor_socket(sum(LOST) | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def connect(self, address: str, keys: ClientKeys) -> None:
        self.socket.setsockopt(zmq.IPV6, "[" in address)
        identify(self.socket, keys, address)
        self.socket.connect(endpoint(address, keys.folder))

    def connect_anew(self, address: str, keys: ClientKeys) -> None:
        """libzmq does not connect again by itself after a refused handshake, or one with another program."""
        with suppress(zmq.ZMQError):  # that it is not connected to it
            self.socket.disconnect(endpoint(address, keys.folder))
        self.socket.connect(endpoint(address, keys.folder))

    def send(self, frame: Frame) -> None:
        """Does nothing without a connection."""
        sent = self.socket.send(frame, zmq.DONTWAIT)  # with DONTWAIT it is done at once
        assert isinstance(sent, asyncio.Future)
        error = sent.exception()
        if error and not isinstance(error, zmq.Again):  # Again: not connected
            raise error

    async def event(self) -> int:
        kind, _ = struct.unpack("=hi", (await self._monitor.recv_multipart())[0])
        return int(kind)

    def close(self) -> None:
        context = self.socket.context
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)
        context.term()


class Connection:
    """Entered once the buffer has said Welcome. Raises RefusedError."""

    def __init__(
        self,
        address: str,
        name: str,
        role: Literal["rollout", "learner", "launcher", "observer"],
        fingerprint: str = "",
        serves: str | None = None,
        retry_s: float = 5.0,
        late_s: float = 10.0,
        *,
        keys: ClientKeys,
    ) -> None:
        self.address, self.name, self.retry_s, self.keys = address, name, retry_s, keys
        self.late_s = late_s
        """Silence before the first warning; each further one after twice the time."""
        self.welcome: Welcome | None = None
        token = uuid.uuid4().hex
        self._hello = Hello(
            name=name, token=token, role=role, protocol=PROTOCOL, fingerprint=fingerprint, serves=serves
        )
        self._hello_number, self._numbers = 0, itertools.count(1)
        self._pending: dict[int, PendingAnswer] = {}
        self._welcomed, self._lost = asyncio.Event(), asyncio.Event()
        self.problem = "nobody answers"
        self._connected = False
        self._fatal: BaseException | None = None

    async def __aenter__(self) -> "Connection":
        self._dealer = Dealer(self._hello.token)
        self._lost.set()
        self._dealer.connect(self.address, self.keys)
        self._tasks = [
            asyncio.create_task(task) for task in (self._read(), self._watch_connection(), self._repeat_hello())
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        try:
            await self._welcomed.wait()
            if self._fatal:
                raise self._fatal
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for pending in self._pending.values():
            pending.answer.cancel()  # no answer will come; tasks that still wait for it are cancelled too
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._dealer.close()

    @overload
    async def expect(self, message: Message, kind: type[Answer], /) -> Answer: ...
    @overload
    async def expect(self, message: Message, kind: type[Answer], other: type[Other], /) -> Answer | Other: ...
    async def expect(self, message: Message, /, *kinds: type[Message]) -> Message:
        """Return the answer, of one of these kinds. Raises RefusedError, ProtocolFault."""
        if self._fatal:
            raise self._fatal
        frame = pack(number := next(self._numbers), message)
        if self.welcome and len(frame) > self.welcome.max_message:
            limit = self.welcome.max_message / 2**20
            size = f"{type(message).__name__} of {len(frame) / 2**20:.1f} MiB"
            raise MessageTooLarge(
                f"{size} exceeds buffer.max_message_mib ({limit:g}): raise it, or make answers shorter"
            )
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        wait_s = self.retry_s
        pending = self._pending[number] = PendingAnswer(frame, answer)
        try:
            if self._welcomed.is_set():  # else it goes out after Welcome
                self._dealer.send(frame)
            while not (await asyncio.wait({answer}, timeout=wait_s))[0]:
                wait_s = min(2 * wait_s, MAX_RETRY * self.retry_s)
                if self._welcomed.is_set() and not pending.is_put_off:
                    self._dealer.send(frame)
        finally:
            del self._pending[number]
        if not isinstance(found := answer.result(), kinds):
            raise ProtocolFault.of(message, found)
        return found

    def _say_hello(self) -> None:
        self._welcomed.clear()
        self._lost.set()
        self._hello_number = next(self._numbers)
        self._dealer.send(pack(self._hello_number, self._hello))

    async def _read(self) -> None:
        while True:
            first, *large = await self._dealer.socket.recv_multipart()
            try:
                number, answer = unpack(first, ANSWERS, large)
            except ValueError as error:
                raise ProtocolFault(f"the buffer's message cannot be read: {error}") from None
            if number == self._hello_number:
                self._on_hello_answer(answer)
            elif isinstance(answer, NotRegistered):
                if self._welcomed.is_set():  # else a Hello is pending already
                    self._say_hello()
            elif not (pending := self._pending.get(number)) or pending.answer.done():
                continue  # nobody waits for it any more
            elif isinstance(answer, Later):
                pending.is_put_off = True
            elif isinstance(answer, Again):
                pending.is_put_off = False
                self._dealer.send(pending.frame)
            elif isinstance(answer, Refused):
                pending.answer.set_exception(RefusedError(answer.reason))
            else:
                pending.answer.set_result(answer)

    def _on_hello_answer(self, answer: Message) -> None:
        if isinstance(answer, Refused):
            raise RefusedError(answer.reason)
        if not isinstance(answer, Welcome):
            raise ProtocolFault.of(self._hello, answer)
        self.welcome = answer
        self._lost.clear()
        self._welcomed.set()
        for pending in self._pending.values():
            pending.is_put_off = False
            self._dealer.send(pending.frame)

    async def _watch_connection(self) -> None:
        while True:
            event = await self._dealer.event()
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._say_hello()
            else:
                if event != zmq.EVENT_DISCONNECTED or self._welcomed.is_set():  # else an earlier event says more
                    self.problem = LOST[event]
                self._welcomed.clear()
                self._lost.set()

    async def _repeat_hello(self) -> None:
        while True:
            await self._lost.wait()
            since, due_s, hellos = time.monotonic(), self.late_s, 0
            while self._lost.is_set():
                try:
                    async with asyncio.timeout(self.retry_s):
                        await self._welcomed.wait()
                except TimeoutError:
                    hellos += 1
                    if not self._connected and hellos % ANEW == 0:
                        self._dealer.connect_anew(self.address, self.keys)
                    self._dealer.send(pack(self._hello_number, self._hello))  # the same: its answer may be on its way
                    if (silent_s := time.monotonic() - since) >= due_s:
                        log.warning("buffer %s out of reach for %.0f s: %s", self.address, silent_s, self.problem)
                        due_s = silent_s + min(silent_s, 600.0)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or not (error := task.exception()):
            return
        self._fatal = error
        for other in self._tasks:
            other.cancel()
        self._welcomed.set()  # wakes `__aenter__`, which raises it
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)
