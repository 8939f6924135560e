"""A buffer that could not listen for a while: what was said meanwhile counts, and silence is nobody's fault."""

import asyncio
import sqlite3
import threading
import time
from pathlib import Path

import pytest
import zmq

from buffer.wire import connection
from buffer.wire.message import pack, unpack
from buffer.wire.protocol import ANSWERS, Ask, Heartbeat, News, Put, Scale, Stored
from buffer.wire.server import BufferServer
from tests.buffer.wire.test_many import Clients, hello
from tests.buffer.wire.test_scale import kept
from tests.harness.buffer_process import group, make_requests

LEASE_S, STALL_S = 1.0, 2.5


class SlowDisk:
    """A buffer in a thread, one of whose commits takes STALL_S."""

    def __init__(self) -> None:
        self.ready, self.slow = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        requests = make_requests(groups=10, max_staleness=4, lease_s=LEASE_S, max_message=2**24)
        commit = requests.commit

        def slowly(transaction) -> None:
            if self.slow.is_set():
                self.slow.clear()
                time.sleep(STALL_S)
            commit(transaction)

        requests.commit = slowly  # type: ignore[method-assign]
        async with BufferServer("tcp://127.0.0.1:*", requests.max_message) as server:
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
        dealer.connect(disk.address)
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


def test_silence_in_which_nobody_listened_ends_no_lease() -> None:
    requests = make_requests(lease_s=10.0)
    clients, ledger = Clients(requests), requests.handlers.ledger
    clients.say("a", Ask(request=1, version=0, room=2))
    requests.handlers.forgive(100.0)
    requests.expire(105.0)
    assert any(server.leases for server in ledger.servers.values())
    requests.expire(111.0)
    assert not any(server.leases for server in ledger.servers.values())


def test_a_scale_waits_for_room_on_the_disk_like_everything_else(tmp_path: Path) -> None:
    requests = make_requests(tmp_path / "buffer.sqlite")
    clients, database = Clients(requests), requests.handlers.store._db
    clients.say("o", hello("o", "observer"))
    clients.say("o", kept("rollout-0"))
    requests.commit(requests.changes())
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count={pages}")
    clients.say("o", Scale(servers=2))
    transaction = requests.changes()
    with pytest.raises(sqlite3.OperationalError, match="full"):
        requests.commit(transaction)
    database.execute("PRAGMA max_page_count=1000000")
    requests.commit(transaction)
    assert [tuple(row)[:3] for row in database.execute("SELECT key, old, new FROM changes")] == [
        ("rollout.servers", "1", '"2 (asked for by hand)"')
    ]


def test_a_name_given_up_and_taken_again_is_no_surprise() -> None:
    clients = Clients(make_requests())
    for who, name in (("x", "x1"), ("x", "x2"), ("y", "x2"), ("z", "x1")):
        clients.say(who, hello(name).model_copy(update={"token": who + name}))
