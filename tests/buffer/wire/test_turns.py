"""A turn of the buffer's event loop: what was put is answered first, parts are made after that and for a bounded time;
the memory of trained groups is freed a little at a time; all clients may connect at once."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from buffer.ledger.types import Transaction
from buffer.wire import server as wire
from buffer.wire.batches import FREE_AT_ONCE, GroupCache
from buffer.wire.message import Frame, pack, unpack
from buffer.wire.protocol import ANSWERS, Ask, Heartbeat, Hello, Put, Take, Trained, Work
from buffer.wire.requests import PendingRequests
from buffer.wire.router import CommitRoom
from buffer.wire.server import BufferServer
from tests.buffer.wire.test_many import hello
from tests.harness.buffer_process import group, in_loop, make_requests
from tests.harness.keys import server_keys

RANKS = 4


class Over(Exception):
    """All turns are done."""


class Scripted(BufferServer):
    """Gets the messages of each turn from a list, and notes what it does in which order."""

    def __init__(self, requests: PendingRequests) -> None:
        super().__init__("tcp://127.0.0.1:*", 2**20, server_keys())
        self.requests, self.number = requests, 0
        self.turns: list[list[tuple[str, list[Frame]]]] = []
        self.roles = dict[str, str]()
        self.did: list[str] = []
        self.answers: list[object] = []
        make = requests.handlers.groups.part

        def noted(*given):
            part = make(*given)
            self.did += ["made"] if part else []
            return part

        requests.handlers.groups.part = noted  # type: ignore[method-assign]
        self._router.receive, self._router.send = self._received, self._sent  # type: ignore[method-assign]

    async def turn(self, *said: tuple[str, object]) -> None:
        """One turn that finds all of this, and those in which parts are made for it."""
        self.turns.append([])
        for who, message in said:
            self.number += 1
            if isinstance(message, Hello):
                self.roles[who] = message.role
            frames: list[Frame] = [who.encode(), pack(self.number, message)]  # type: ignore[arg-type]
            self.turns[-1].append((self.roles.get(who, "rollout"), frames))
        with suppress(Over):
            await self.serve(self.requests)

    async def _wake(self, now: float, at_once: bool) -> None:
        if not self.turns and not at_once:
            raise Over

    def _received(self, room: CommitRoom) -> tuple[list[tuple[str, list[Frame]]], bool]:
        return (self.turns.pop(0) if self.turns else []), False

    def _sent(self, answer) -> None:
        message = unpack(answer[1], ANSWERS, [bytes(one) for one in answer[2:]])[1]
        self.did.append(type(message).__name__)
        self.answers.append(message)


@in_loop
async def test_what_was_put_is_answered_before_a_batch_is_cut_and_its_parts_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "TURN_S", (60.0, 60.0))  # all parts in one turn, however busy the machine
    requests = make_requests(groups=1, max_staleness=4)
    async with Scripted(requests) as server:
        await server.turn(("a", hello("a")), *((f"l{rank}", hello(f"l{rank}", "learner")) for rank in range(RANKS)))
        await server.turn(("a", Ask(request=1, version=0, room=2)))
        (work,) = [one for one in server.answers if isinstance(one, Work)]
        puts = [Put(item=it.item, lease=it.lease, samples=[one.pack() for one in group(it.item)]) for it in work.items]
        await server.turn(("a", puts[0]))
        server.did.clear()
        takes = [(f"l{rank}", Take(version=0, rank=rank, world=RANKS)) for rank in range(RANKS)]
        beat = Heartbeat(version=0, holding=[work.items[1].lease])
        await server.turn(*takes[:2], ("a", puts[1]), *takes[2:], ("a", beat))
    assert server.did[:2] == ["Stored", "News"]
    assert server.did[2:] == ["made"] * RANKS + ["Part"] * RANKS
    requests.handlers.store.close()


@in_loop
async def test_no_part_is_made_while_too_much_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(groups=1)
    async with Scripted(requests) as server:
        await server.turn(("a", hello("a")), ("l0", hello("l0", "learner")), ("a", Ask(request=1, version=0, room=1)))
        (work,) = [one for one in server.answers if isinstance(one, Work)]
        (it,) = work.items
        await server.turn(("a", Put(item=it.item, lease=it.lease, samples=[one.pack() for one in group(it.item)])))
        server._router.unsent.total = wire.IN_FLIGHT_BYTES
        await server.turn(("l0", Take(version=0, rank=0, world=1)))
        assert "made" not in server.did and requests.handlers.groups.turn.postponed
        server._router.unsent.total = 0
        await server.turn()
        assert server.did[-2:] == ["made", "Part"]
    requests.handlers.store.close()


@in_loop
async def test_groups_that_come_while_others_are_judged_share_their_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit waits for the disk twice, and ZeroMQ queues few messages of each client."""
    requests, commits = make_requests(), list[int]()
    commit = requests.handlers.store.commit

    def counted(transaction: Transaction) -> None:
        commits.append(len(transaction.payloads))
        commit(transaction)

    async with Scripted(requests) as server:
        await server.turn(("a", hello("a")), ("a", Ask(request=1, version=0, room=3)))
        (work,) = [one for one in server.answers if isinstance(one, Work)]
        puts = [Put(item=it.item, lease=it.lease, samples=[s.pack() for s in group(it.item)]) for it in work.items]
        monkeypatch.setattr(requests.handlers.store, "commit", counted)
        server.turns += [[("rollout", [b"a", pack(10 + at, put)])] for at, put in enumerate(puts[:2])]
        await server.turn(("a", puts[2]))
    assert commits == [2, 1] and server.did.count("Stored") == 3
    requests.handlers.store.close()


@in_loop
async def test_the_memory_of_a_trained_batch_is_freed_over_several_turns() -> None:
    groups = 2 * FREE_AT_ONCE + 1
    requests = make_requests(groups=groups)
    async with Scripted(requests) as server:
        ask = Ask(request=1, version=0, room=groups)
        await server.turn(("a", hello("a")), ("l0", hello("l0", "learner")), ("a", ask))
        (work,) = [one for one in server.answers if isinstance(one, Work)]
        puts = [Put(item=it.item, lease=it.lease, samples=[s.pack() for s in group(it.item)]) for it in work.items]
        await server.turn(*(("a", put) for put in puts), ("l0", Take(version=0, rank=0, world=1)))
        cache = requests.handlers.groups.cache
        left = []
        await server.turn(("l0", Trained(version=0, oldest_kept=0)))
        for _ in range(3):
            left.append(len(cache.forgotten))
            await server.turn()
    assert left == [FREE_AT_ONCE + 1, 1, 0] and requests.handlers.groups.cache.bytes == 0
    requests.handlers.store.close()


def test_what_is_to_be_freed_is_neither_found_nor_counted() -> None:
    cache = GroupCache(100)
    for item in range(4):
        cache.add(item, [bytes(10)])
    cache.forget([0, 1, 2])
    assert cache.groups.get(0) is None and cache.bytes == 10 and len(cache.forgotten) == 3
    cache.add(0, [bytes(20)])
    del cache.forgotten[-8:]
    assert cache.groups.get(0) and cache.groups.get(3) and cache.bytes == 30 and not cache.forgotten


def listening() -> Iterator[tuple[int, int]]:
    """Port and length of the queue of each socket on which this process listens."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
                yield one.getsockname()[1], struct.unpack_from("=I", info, 28)[0]  # tcpi_sacked


@in_loop
async def test_as_many_may_connect_at_once_as_the_kernel_allows() -> None:
    """Thousands do when the buffer is started again; those beyond the queue wait for seconds."""
    async with BufferServer("tcp://127.0.0.1:*", 2**20, server_keys()) as server:
        queues = dict(listening())
        assert queues[int(server.address.rpartition(":")[2])] == int(Path("/proc/sys/net/core/somaxconn").read_text())
