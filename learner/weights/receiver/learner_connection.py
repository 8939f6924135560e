"""A server's connection to the learner: heartbeats, joining, silence. After a long silence it takes another socket,
since libzmq gives up after a refused handshake."""

import asyncio
import math
from typing import Any

import zmq.asyncio

from buffer.keys import ClientKeys
from buffer.wire.awake import AwakeClock, wait_awake
from buffer.wire.connection import broken
from buffer.wire.message import Message
from learner.weights.protocol import BEATS, TO_SERVER, Join, KeepAlive, Leave, dealer, pack, unpack

BEATS_ANEW = 3 * BEATS
"""Heartbeats of silence before the server connects anew; a paused learner keeps its servers so long."""


class LearnerConnection:
    """`joined`: the server is a member. `lost`: the learner was silent, said Bye or broke the connection."""

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: ClientKeys, heartbeat_s: float) -> None:
        self.address, self.heartbeat_s = address, heartbeat_s
        self.joined = self.lost = False
        self._context, self._keys = context, keys
        self._clock = AwakeClock()
        self._open()

    def _open(self) -> None:
        self._socket = dealer(self._context, self.address, self._keys)
        self._heard_at, self._said_at = self._clock.now(), -math.inf
        self._next: asyncio.Future[bytes] | None = None
        self._breaks = broken(self._socket)
        self._break = asyncio.ensure_future(anext(self._breaks))

    async def receive(self, join: Join, other: asyncio.Future[Any] | None) -> Message | None:
        """The next message; None after a heartbeat without one, or once `other` is done."""
        if self._clock.now() - self._said_at >= self.heartbeat_s:
            self._said_at = self._clock.now()
            self.say(KeepAlive() if self.joined else join)
        if self._next is None:
            self._next = asyncio.ensure_future(self._socket.recv())
        waited: list[asyncio.Future[Any]] = [self._next, self._break, *([other] if other else [])]
        await wait_awake(waited, self.heartbeat_s, self._clock)
        if self._break.done() and not self._next.done():
            self._break = asyncio.ensure_future(anext(self._breaks))
            self.leave(lost=True)
        if not self._next.done():
            silent = (self._clock.now() - self._heard_at) / self.heartbeat_s
            if silent > BEATS:
                self.leave(lost=True)
            if silent > BEATS_ANEW:
                await self.close()
                self._open()
            return None
        data, self._next = self._next.result(), None
        self._heard_at = self._clock.now()
        return unpack(data, TO_SERVER)

    def leave(self, lost: bool) -> None:
        self.joined, self.lost, self._said_at = False, lost, -math.inf

    def say(self, message: Message) -> None:
        self._socket.send(pack(message))

    async def close(self) -> None:
        """Leave, and close the socket. A cancellation meanwhile is raised once the socket is closed."""
        self.say(Leave())
        ending: list[asyncio.Future[Any]] = [self._break, *([self._next] if self._next else [])]
        for one in ending:
            one.cancel()
        cancelled: asyncio.CancelledError | None = None
        while any(not one.done() for one in ending):
            try:
                await asyncio.wait(ending)
            except asyncio.CancelledError as error:
                cancelled = error
        await self._breaks.aclose()  # before its socket: a break may have ended it
        self._socket.close()
        if cancelled:
            raise cancelled
