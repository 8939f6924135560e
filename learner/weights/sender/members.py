"""The sender's view of the rollout servers: admitted, kept by heartbeats, dropped."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import zmq
import zmq.asyncio

from buffer.keys import ServerKeys
from buffer.wire.awake import AwakeClock
from buffer.wire.connection_events import ConnectionEvents
from buffer.wire.message import Message
from buffer.wire.router import ConnectionLimits, ConnectionTracker
from learner.weights import protocol

log = logging.getLogger(__name__)
REPEAT_S = 10.0
FILES_S = 0.1
MOST_MEMBERS = 4096


@dataclass(eq=False)
class Member:
    """A server that joined. `route`: its ZeroMQ identity."""

    route: bytes
    name: str
    workers: int
    holds: tuple[str, int]
    clock: Callable[[], float] = time.monotonic
    heard_at: float = -math.inf
    gone: bool = False
    round: int = -1
    answer: Message | None = None
    holding: bool = False
    asked_at: float | None = None
    ready_s: float = 0.0
    late: bool = False
    """No round waits for it until it answers."""
    spoilt: bool = False
    """It was ready and did not answer, or failed first."""
    failures: int = 0
    """Failed rounds in a row while no member was missing."""

    def on_message(self, message: Message) -> None:
        self.heard_at = self.clock()
        if isinstance(message, protocol.Hold | protocol.Release):
            self.holding = isinstance(message, protocol.Hold)
        if isinstance(
            message, protocol.Ready | protocol.Hold | protocol.Received | protocol.Loaded | protocol.Failed
        ) and (message.round == self.round or (isinstance(message, protocol.Failed) and message.fatal)):
            self.answer = message
            if self.asked_at is not None:
                self.ready_s, self.asked_at, self.late = self.heard_at - self.asked_at, None, False

    def offer(self, round: int) -> protocol.Offer:
        self.round, self.answer = round, None
        self.asked_at = self.clock() if self.asked_at is None else self.asked_at
        return protocol.Offer(round=round)

    def answered_or_gone(self, *kinds: type[Message]) -> bool:
        return self.gone or isinstance(self.answer, (protocol.Failed, *kinds))

    @property
    def fatal(self) -> str:
        return self.answer.reason if isinstance(self.answer, protocol.Failed) and self.answer.fatal else ""


class Members:
    """Iterates over the members. `on_drop` is called with each that leaves or falls silent."""

    def __init__(
        self,
        welcome: protocol.ServerWelcome,
        backend: str,
        host: str,
        keys: ServerKeys,
        on_drop: Callable[[Member], None],
    ) -> None:
        self._welcome, self._backend, self._host, self._keys, self._on_drop = welcome, backend, host, keys, on_drop
        self._by_route: dict[bytes, Member] = {}
        self._tracker = ConnectionTracker()
        self._heard: dict[bytes, int] = {}
        self.changed = asyncio.Event()
        self.clock = AwakeClock()
        self._refused, self._logged_at = 0, -math.inf
        self._limits = ConnectionLimits()
        self.failed = 0

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_route.values()))

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        with zmq.asyncio.Context() as self._context:
            self._socket, authenticator, address = protocol.router(self._context, self._host, self._keys)
            self._limits.endpoint = address
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(work) for work in self._work()]
                    yield address
                    for task in running:
                        task.cancel()
            finally:
                for member in self:
                    self.say(member, protocol.Bye())
                self._socket.close()
                authenticator.stop()

    def _work(self) -> tuple[Coroutine[None, None, None], ...]:
        return self._read(), self._watch(), self._beat(), self._keep_files(), self.clock.tick()

    async def _keep_files(self) -> None:
        """Close connections without a Join when files are scarce."""
        while True:
            await asyncio.sleep(FILES_S)
            self._limits.keep_files()
            self._limits.log(self.clock.now())

    def say(self, member: Member, message: Message) -> None:
        self._send(member.route, message)

    def drop(self, member: Member, reason: str) -> None:
        """Leave `member` out until it joins again. Without a reason it left by itself."""
        self._remove(member)
        self._on_drop(member)
        if reason:
            self.failed += 1
            log.warning("weights: %s is left out: %s", member.name, reason)
            self.say(member, protocol.Rejoin(reason=reason))
        self.changed.set()

    async def until(self, true: Callable[[], bool], timeout_s: float | None = None) -> None:
        until = math.inf if timeout_s is None else self.clock.now() + timeout_s
        while not true() and (left_s := until - self.clock.now()) > 0:
            await self.next_change(None if timeout_s is None else left_s)

    async def next_change(self, timeout_s: float | None = None) -> None:
        self.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()

    async def _read(self) -> None:
        while True:
            first, *_, last = await self._socket.recv_multipart(copy=False)
            descriptor, route = int(first.get(zmq.SRCFD)), first.bytes
            self._heard.pop(route, None)  # a dict keeps the order of first insertions
            self._heard[route] = descriptor
            try:
                message = protocol.unpack(last.bytes, protocol.TO_LEARNER)
                self._limits.admit(descriptor, large=True)
                self._on_message(route, message)
            except ValueError as error:
                self._log_refusal(error)
                self._send(route, protocol.JoinRefused(reason=str(error)))
            self.changed.set()

    def _log_refusal(self, error: ValueError) -> None:
        """A flood must not fill the disk."""
        self._refused += 1
        if (now := self.clock.now()) >= self._logged_at + REPEAT_S:
            self._logged_at = now
            log.error("weights: refused a message, %d since the start: %s", self._refused, error)

    async def _watch(self) -> None:
        events = ConnectionEvents(self._context, self._socket)
        try:
            while True:
                await events.wait()
                while await self._socket.poll(0):  # messages that came before the break count
                    await asyncio.sleep(0)
                self._on_events(events.new())
        finally:
            events.close()

    def _on_events(self, events: list[tuple[int, int]]) -> None:
        for kind, descriptor in events:
            self._limits.on_event(kind, descriptor, self.clock.now())
        heard, self._heard = self._heard, {}
        for route in self._tracker.ended(heard, events):
            if member := self._by_route.get(route):
                self.drop(member, "its connection broke")

    def _on_message(self, route: bytes, message: Message) -> None:
        member = self._by_route.get(route)
        if isinstance(message, protocol.Join):
            self._send(route, self._admit(route, message))
        elif member is None:
            if not isinstance(message, protocol.Leave):
                self._send(route, protocol.Rejoin(reason="not a member"))
        elif isinstance(message, protocol.Leave):
            self.drop(member, member.fatal)
        else:
            member.on_message(message)

    def _admit(self, route: bytes, join: protocol.Join) -> Message:
        if join.protocol != protocol.PROTOCOL:
            return protocol.JoinRefused(
                reason=f"weights protocol {join.protocol} here, {protocol.PROTOCOL} at the learner"
            )
        if self._backend not in ("", join.backend):
            reason = f"{join.name} receives over {join.backend}, the learner sends over {self._backend}"
            return protocol.JoinRefused(reason=f"{reason}: set learner.device and rollout.device alike")
        if route not in self._by_route and len(self._by_route) >= MOST_MEMBERS:
            return protocol.Rejoin(reason=f"{MOST_MEMBERS:,} servers are members already")
        if (join.digest, join.trained) != (self._welcome.digest, self._welcome.trained):
            return self._welcome
        if route not in self._by_route:
            for other in self:
                if other.name == join.name:
                    self._remove(other)
            self._by_route[route] = self._member(route, join)
            log.info("weights: %s joined, %d worker(s), version %d", join.name, join.workers, join.version)
        return protocol.Joined()

    def _member(self, route: bytes, join: protocol.Join) -> Member:
        now = self.clock.now
        return Member(route, join.name, join.workers, (join.session, join.version), now, now())

    async def _beat(self) -> None:
        heartbeat_s = self._welcome.heartbeat_s
        while True:
            await asyncio.sleep(heartbeat_s)
            for member in self:
                silent_s = self.clock.now() - member.heard_at
                if silent_s > protocol.BEATS * heartbeat_s:
                    self.drop(member, f"silent for {silent_s:.1f} s")
                else:
                    self.say(member, protocol.KeepAlive())

    def _remove(self, member: Member) -> None:
        member.gone = True
        self._by_route.pop(member.route, None)

    def _send(self, route: bytes, message: Message) -> None:
        self._socket.send_multipart([route, protocol.pack(message)])
