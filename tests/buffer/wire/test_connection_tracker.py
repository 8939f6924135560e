"""The end of a process is known by the end of its connection, whatever became of earlier ones of it, or of others that
had the same file descriptor."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from buffer.wire import router
from buffer.wire.message import Message, pack
from buffer.wire.protocol import Status
from buffer.wire.requests import PendingRequests
from buffer.wire.router import ConnectionTracker
from buffer.wire.server import BufferServer
from tests.buffer.wire.test_many import hello
from tests.harness.buffer_process import in_loop, make_requests
from tests.harness.keys import server_keys, unlock

ON, OFF = zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED
A, B, RENAMED = b"a", b"b", b"\0made"
Look = tuple[dict[bytes, int], list[tuple[int, int]], list[bytes]]
"""Whose messages came over which descriptor, the events, and whose connections have ended."""


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([({A: 5}, [(ON, 5)], []), ({}, [(OFF, 5)], [A]), ({}, [(OFF, 5)], [])], id="ends"),
        pytest.param([({A: 5}, [(ON, 5), (OFF, 5)], [A])], id="says one thing and ends"),
        pytest.param(
            [({A: 5}, [], []), ({B: 5}, [(OFF, 5), (ON, 5)], [A]), ({}, [(OFF, 5)], [B])],
            id="another has its descriptor at once",
        ),
        pytest.param(
            [({A: 5}, [], []), ({A: 7}, [(ON, 7)], []), ({}, [(OFF, 7)], [A])], id="a new connection, the old is open"
        ),
        pytest.param(
            [({A: 5}, [], []), ({A: 7}, [(ON, 7)], []), ({B: 5}, [(ON, 5)], []), ({}, [(OFF, 5)], [B])],
            id="a descriptor that was closed without an event",
        ),
        pytest.param(
            [({A: 5}, [], []), ({A: 5}, [(OFF, 5), (ON, 5)], []), ({}, [(OFF, 5)], [A])], id="again over the same"
        ),
        pytest.param(
            [
                ({A: 5}, [(ON, 5), (OFF, 5)], [A]),
                ({A: 5}, [], [A]),
                ({B: 5}, [(ON, 5)], []),
                ({}, [(OFF, 5)], [B]),
            ],
            id="read after its end",
        ),
        pytest.param(
            [
                ({A: 5}, [], []),
                ({A: 7, RENAMED: 5}, [(ON, 7)], []),
                ({B: 5}, [(OFF, 5), (ON, 5)], [RENAMED]),
                ({}, [(OFF, 5), (OFF, 7)], [B, A]),
            ],
            id="renamed before its end",
        ),
        pytest.param(
            [
                ({A: 5}, [], []),
                ({A: 7}, [(OFF, 5), (ON, 7)], []),
                ({RENAMED: 5}, [], [RENAMED]),
                ({B: 5}, [(ON, 5)], []),
                ({}, [(OFF, 5)], [B]),
            ],
            id="renamed after its end",
        ),
        pytest.param(
            [({A: 5}, [], []), ({A: 5}, [(OFF, 5), (ON, 5)], []), ({B: 5}, [], [A]), ({}, [(OFF, 5)], [B])],
            id="its last words and another's connection at one look",
        ),
        pytest.param([({A: 5, B: 5}, [(ON, 5), (OFF, 5), (ON, 5)], [A]), ({}, [(OFF, 5)], [B])], id="both at one look"),
        pytest.param(
            [({A: 5}, [], []), ({}, [(OFF, 5), (ON, 5)], [A]), ({A: 5}, [], []), ({B: 5}, [], [A])],
            id="last words read after another has its descriptor",
        ),
        pytest.param(
            [
                ({A: 5}, [], []),
                ({B: 5}, [(OFF, 5), (ON, 5)], [A]),
                ({A: 5}, [], [B]),
                ({B: 5}, [], [A]),
                ({}, [(OFF, 5)], [B]),
            ],
            id="last words read after another has spoken",
        ),
    ],
)
def test_who_has_ended(looks: list[Look]) -> None:
    tracker = ConnectionTracker()
    for heard, events, ended in looks:
        assert sorted(tracker.ended(heard, events)) == sorted(ended)


class Peers:
    """Processes that send to the buffer over bare sockets, which never connect again."""

    def __init__(self, server: BufferServer, requests: PendingRequests, context: zmq.asyncio.Context) -> None:
        self.server, self.requests, self.context = server, requests, context

    async def connect(self, identity: bytes, *messages: Message) -> zmq.asyncio.Socket:
        """One that has said Hello, and then `messages`."""
        dealer = self.context.socket(zmq.DEALER)
        for option, value in {zmq.IDENTITY: identity, zmq.LINGER: 60_000, zmq.RECONNECT_IVL: -1}.items():
            dealer.setsockopt(option, value)
        unlock(dealer).connect(self.server.address)
        for number, message in enumerate((hello(identity.decode()), *messages)):
            await dealer.send(pack(number, message))
        return dealer

    async def welcomed(self, identity: bytes) -> zmq.asyncio.Socket:
        """One that the buffer has answered."""
        dealer = await self.connect(identity)
        await asyncio.wait_for(dealer.recv(), 60)
        return dealer

    def broke(self, identity: bytes) -> bool:
        """Whether the buffer knows that its connection broke."""
        return self.requests.handlers.peers.known[identity].broke is not None

    async def is_missed(self, identity: bytes) -> None:
        """Wait for that."""
        async with asyncio.timeout(60):
            while identity not in self.requests.handlers.peers.known or not self.broke(identity):
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """While the buffer reads what they say."""
        serving = asyncio.create_task(self.server.serve(self.requests))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait({serving})


@asynccontextmanager
async def peers() -> AsyncIterator[Peers]:
    requests, context = make_requests(), zmq.asyncio.Context()
    async with BufferServer("tcp://127.0.0.1:*", 2**20, server_keys()) as server:
        try:
            yield Peers(server, requests, context)
        finally:
            context.destroy(0)
    requests.handlers.store.close()


@in_loop
async def test_a_process_that_ends_is_missed_although_an_earlier_connection_of_it_is_still_open() -> None:
    """ZeroMQ says nothing of the end of a connection whose process has made another one."""
    async with peers() as them, them.served():
        await them.welcomed(A)
        second = await them.welcomed(A)
        assert not them.broke(A)
        second.close(0)
        await them.is_missed(A)


@in_loop
async def test_what_is_read_after_the_end_of_its_process_hides_neither_that_nor_the_end_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop reads nothing before the first process has ended, as while a commit takes long, and little at a time."""
    monkeypatch.setattr(router, "MAX_MESSAGES", 1)
    async with peers() as them:
        (await them.connect(A, Status())).close()
        seen: list[tuple[int, int]] = []
        while OFF not in dict(seen):
            assert them.server._router.events.poll(60_000)
            them.server._router.read_events(0.0)
            seen += them.server._router.events_read
            them.server._router.events_read.clear()
        assert them.server._router._tracker.ended({}, seen) == []
        async with them.served():
            await them.is_missed(A)
            (await them.welcomed(B)).close(0)
            await them.is_missed(B)


@in_loop
async def test_a_process_that_connects_again_is_not_missed() -> None:
    async with peers() as them, them.served():
        for _ in range(20):
            one = await them.welcomed(A)
            await one.send(pack(9, Status()))
            await asyncio.wait_for(one.recv(), 60)
            assert not them.broke(A)
            one.close(0)


@in_loop
async def test_a_commit_is_no_larger_for_reading_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bound holds for all passes: only one message goes beyond it."""
    monkeypatch.setattr(router, "COMMIT_BYTES", 2)
    async with peers() as them:
        said, turns = list[int](), [0]
        receive, answer = them.requests.receive, them.server._answer

        def counted(*given: Any) -> None:
            turns[-1] += 1
            said.append(1)
            receive(*given)

        async def answered(*given: Any) -> bool:
            turns.append(0)
            return await answer(*given)

        monkeypatch.setattr(them.requests, "receive", counted)
        monkeypatch.setattr(them.server, "_answer", answered)
        clients = [await them.connect(who, Status()) for who in (A, B)]
        for client in clients:
            for number in range(2):
                await client.send(pack(number + 2, Status()))
        async with them.served():
            while len(said) < 6:
                await asyncio.sleep(0.01)
        for client in clients:
            client.close(0)
    assert max(turns) == 1
