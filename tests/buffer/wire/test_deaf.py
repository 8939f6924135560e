"""A buffer that could not listen for a while: what was said meanwhile counts, and silence is nobody's fault."""

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from buffer.__main__ import restored
from buffer.ledger.types import Transaction
from buffer.problems import Problems
from buffer.store.sqlite import Store
from buffer.wire import connection
from buffer.wire.message import pack, unpack
from buffer.wire.protocol import ANSWERS, Ask, Evaluate, Fail, Heartbeat, News, Put, Scale, Stored
from buffer.wire.server import TICK_S, BufferServer, ListeningClock
from tests.buffer.wire.test_many import Clients, hello
from tests.buffer.wire.test_scale import kept
from tests.buffer.wire.test_turns import Scripted
from tests.harness.buffer_process import PROBLEMS, group, in_loop, make_requests
from tests.harness.keys import server_keys, unlock
from tests.harness.watched import make_config

LEASE_S, STALL_S = 1.0, 2.5


class SlowDisk:
    """A buffer in a thread, one of whose commits takes STALL_S."""

    def __init__(self) -> None:
        self.ready, self.slow = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        requests = make_requests(groups=10, max_staleness=4, lease_s=LEASE_S, max_message=2**24)
        commit = requests.handlers.store.commit

        def slowly(transaction) -> None:
            if self.slow.is_set():
                self.slow.clear()
                time.sleep(STALL_S)
            commit(transaction)

        requests.handlers.store.commit = slowly  # type: ignore[method-assign]
        async with BufferServer("tcp://127.0.0.1:*", requests.max_message, server_keys()) as server:
            self.loop, self.address = asyncio.get_running_loop(), server.address
            self.serving = asyncio.create_task(server.serve(requests))
            self.ready.set()
            await asyncio.wait({self.serving})

    def __enter__(self) -> "SlowDisk":
        self.thread.start()
        assert self.ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.serving.cancel)
        self.thread.join()


def test_what_a_server_said_while_a_commit_was_slow_is_heard_before_its_leases_end() -> None:
    """Groups of megabytes stand in front of its heartbeat, and the buffer reads few messages of a server at a time."""
    context = zmq.Context()
    with SlowDisk() as disk, context.socket(zmq.DEALER) as dealer:
        for option, value in connection.OPTIONS.items():
            dealer.setsockopt(option, value)
        unlock(dealer).connect(disk.address)
        got = {}

        def until(number: int):
            while number not in got:
                first, *rest = dealer.recv_multipart()
                answered, answer = unpack(first, ANSWERS, rest)
                got[answered] = answer
            return got[number]

        dealer.send(pack(1, hello("rollout-0")))
        until(1)
        dealer.send(pack(2, Ask(request=1, version=0, room=10)))
        items = until(2).items
        puts = [
            pack(
                10 + at,
                Put(item=it.item, lease=it.lease, samples=[one.pack() for one in group(it.item, tokens=20_000)]),
            )
            for at, it in enumerate(items[:7])
        ]
        disk.slow.set()
        for put in puts:
            dealer.send(put)
        dealer.send(pack(99, Heartbeat(version=0, holding=[it.lease for it in items[7:]])))
        news, stored = until(99), [until(10 + at) for at in range(7)]
    context.term()
    assert isinstance(news, News) and news.revoked == []
    assert all(isinstance(one, Stored) and one.accepted for one in stored)


class Deaf(Scripted):
    """A buffer with a fake clock. Time passes only if a test sets it: in the next commit or the next wait."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(make_requests(groups=10, max_staleness=4, lease_s=10.0, **changes))
        self.time = self.commit_s = self.stopped_s = 0.0
        self.clock = ListeningClock(lambda: self.time)
        commit = self.requests.handlers.store.commit

        def slowly(transaction: Transaction) -> None:
            self.time += self.commit_s
            commit(transaction)

        self.requests.handlers.store.commit = slowly  # type: ignore[method-assign]

    async def _wake(self, now: float, at_once: bool) -> None:
        await super()._wake(now, at_once)
        self.clock.mark(TICK_S)
        self.time += self.stopped_s

    async def said(self, *said: tuple[str, Any], commit_s: float = 0.0, stopped_s: float = 0.0) -> list[Any]:
        """Return the answers of one turn, after a stop of `stopped_s` and with a commit of `commit_s`."""
        self.answers.clear()
        self.commit_s, self.stopped_s = commit_s, stopped_s
        await self.turn(*said)
        self.commit_s = self.stopped_s = 0.0
        return self.answers


SLOW = [{"commit_s": 35.0}, {"stopped_s": 35.0}]
"""Three and a half leases."""


@pytest.mark.parametrize("deaf", SLOW)
@in_loop
async def test_an_item_dispatched_before_a_long_silence_of_the_buffer_keeps_its_lease(deaf: dict[str, float]) -> None:
    """The heartbeat that was sent while the answer was delayed has no lease, and is read first."""
    async with Deaf() as server:
        await server.said(("a", hello("a")), ("b", hello("b")))
        ask = Ask(request=1, version=0, room=4)
        (work,) = await server.said(("a", ask), **({} if "stopped_s" in deaf else deaf))
        leases = [item.lease for item in work.items]
        (first,) = await server.said(("a", Heartbeat(version=0, holding=[])), **({} if "commit_s" in deaf else deaf))
        (second,) = await server.said(("a", Heartbeat(version=0, holding=leases)))
        assert first.revoked == second.revoked == [] and not server.requests.handlers.ledger.view.failed()
        server.time += 0.4  # as between any two turns
        puts = [Put(item=it.item, lease=it.lease, samples=[s.pack() for s in group(it.item)]) for it in work.items]
        assert all(stored.accepted for stored in await server.said(*(("a", put) for put in puts)))


@pytest.mark.parametrize("deaf", SLOW)
@in_loop
async def test_a_claim_outlives_a_long_silence_of_the_buffer(deaf: dict[str, float]) -> None:
    async with Deaf(eval_every=2) as server:
        await server.said(("a", hello("a")), ("b", hello("b")))
        (due,) = await server.said(("a", Evaluate(version=0)), **({} if "stopped_s" in deaf else deaf))
        assert due.due == 0
        beat = ("b", Heartbeat(version=0, holding=[]))
        news, claimed = await server.said(beat, ("b", Evaluate(version=0)), **({} if "commit_s" in deaf else deaf))
        assert news.evaluation == "none" and claimed.due is None
        (own,) = await server.said(("a", Heartbeat(version=0, holding=[], evaluating=0)))
        assert own.evaluation == "none"


@pytest.mark.parametrize("deaf", SLOW)
@in_loop
async def test_a_failed_item_still_goes_to_another_server_after_a_long_silence_of_the_buffer(
    deaf: dict[str, float],
) -> None:
    async with Deaf() as server:
        await server.said(("a", hello("a")), ("b", hello("b")), ("b", Heartbeat(version=0, holding=[])))
        (work,) = await server.said(("a", Ask(request=1, version=0, room=1)))
        (failed,) = work.items
        fail = Fail(item=failed.item, lease=failed.lease, reason="it broke")
        await server.said(("a", fail), **({} if "stopped_s" in deaf else deaf))
        await server.said(**({} if "commit_s" in deaf else deaf))
        (work,) = await server.said(("a", Ask(request=2, version=0, room=1)))
        assert [item.item for item in work.items] != [failed.item]
        (work,) = await server.said(("b", Ask(request=1, version=0, room=1)))
        assert [item.item for item in work.items] == [failed.item]


@in_loop
async def test_silence_of_a_server_ends_its_leases_while_the_buffer_receives() -> None:
    async with Deaf() as server:
        await server.said(("a", hello("a")), ("a", Ask(request=1, version=0, room=2)))
        for _ in range(25):
            assert not server.requests.handlers.ledger.view.failed()
            server.time += 0.4
            await server.said()
        assert sum(server.requests.handlers.ledger.view.failed().values()) == 2


def test_the_clock_stands_still_while_the_process_cannot_receive() -> None:
    time = 100.0
    clock = ListeningClock(lambda: time)
    for wait_s, passed_s, counted_s in [(0.0, 0.4, 0.4), (0.0, 60.0, 0.0), (0.5, 0.6, 0.6), (0.5, 60.0, 0.5)]:
        clock.mark(wait_s)
        before = clock.now()
        time += passed_s
        clock.mark()
        assert clock.now() - before == pytest.approx(counted_s)


def test_a_scale_waits_for_room_on_the_disk_like_everything_else(tmp_path: Path) -> None:
    requests = make_requests(tmp_path / "buffer.sqlite")
    clients, database = Clients(requests), requests.handlers.store._db
    clients.say("o", hello("o", "launcher"))
    clients.say("o", kept("rollout-0"))
    requests.handlers.store.commit(requests.handlers.changes())
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count={pages}")
    clients.say("o", Scale(servers=2))
    transaction = requests.handlers.changes()
    with pytest.raises(sqlite3.OperationalError, match="full"):
        requests.handlers.store.commit(transaction)
    database.execute("PRAGMA max_page_count=1000000")
    requests.handlers.store.commit(transaction)
    assert [tuple(row)[:3] for row in database.execute("SELECT key, old, new FROM changes")] == [
        ("rollout.servers", "1", '"2 (asked for by hand)"')
    ]


def test_a_name_given_up_and_taken_again_is_no_surprise() -> None:
    clients = Clients(make_requests())
    for who, name in (("x", "x1"), ("x", "x2"), ("y", "x2"), ("z", "x1")):
        clients.say(who, hello(name).model_copy(update={"token": who + name}))


def test_the_time_in_which_the_data_are_read_is_no_part_of_the_first_lease(tmp_path: Path) -> None:
    """A server that is gone when the buffer is started again loses its lease after that time, however long the start
    took."""
    requests = make_requests(tmp_path / "buffer.sqlite", groups=1)
    Clients(requests).work("a", 1)
    requests.handlers.store.close()
    passed_s = 100.0
    clock = ListeningClock(lambda: passed_s)
    passed_s += 600
    problems = Problems(len(PROBLEMS), PROBLEMS.__getitem__, "")
    with Store(tmp_path / "buffer.sqlite", fsync=False) as store:
        ledger = restored(make_config(tmp_path, "data.shuffle=false"), store, problems, clock)
    passed_s += 60
    clock.mark()
    due = ledger.expire(clock.now())
    assert due is not None and due - clock.now() == pytest.approx(ledger.terms.lease_s)
