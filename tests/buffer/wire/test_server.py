"""The buffer over real sockets: parking and waking, repetition and reordering, limits, restarts."""

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from buffer.keys import Role
from buffer.store.sqlite import Store
from buffer.wire import batches, status
from buffer.wire.client import Connection, RefusedError, RolloutClient, heartbeats
from buffer.wire.message import Message, pack, unpack
from buffer.wire.protocol import (
    ANSWERS,
    PROTOCOL,
    Ack,
    Ask,
    Finished,
    Heartbeat,
    Hello,
    News,
    NotRegistered,
    Part,
    Put,
    Refused,
    Rewind,
    Rewound,
    State,
    Status,
    Stored,
    Take,
    Trained,
    Welcome,
    Work,
    WorkItem,
)
from buffer.wire.router import CommitRoom
from buffer.wire.sample import sample_stats
from buffer.wire.server import BufferServer
from configs.load import load
from configs.resume import fingerprint
from tests.harness.buffer_process import (
    Process,
    buffer,
    client,
    committed,
    group,
    in_loop,
    make_requests,
    process,
    rollout,
    samples_of,
)
from tests.harness.keys import server_keys, unlock


class Wire:
    """A bare socket that sends exactly what a test wants: repetitions, reorderings, nonsense."""

    def __init__(self, address: str, identity: bytes = b"wire", role: Role = "rollout") -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        unlock(self.socket, role).connect(address)

    async def __aenter__(self) -> "Wire":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close(0)
        self.context.term()

    async def say(self, number: int, message: Message) -> None:
        await self.socket.send(pack(number, message))

    async def hear(self) -> tuple[int, Message]:
        return unpack(await asyncio.wait_for(self.socket.recv(), 120), ANSWERS)

    async def ask(self, number: int, message: Message) -> Message:
        await self.say(number, message)
        heard, answer = await self.hear()
        assert heard == number
        return answer

    async def silent(self, seconds: float = 0.15) -> bool:
        return not await self.socket.poll(round(seconds * 1000))


def hello(name: str = "rollout-0", token: str = "t", role: str = "rollout", **changes: object) -> Hello:
    fields = dict(name=name, token=token, role=role, protocol=PROTOCOL, fingerprint="f" * 16)
    return Hello(**fields | changes)  # type: ignore[arg-type]


async def make_groups(samples: RolloutClient, items: list[WorkItem]) -> None:
    for item in items:
        assert (await samples.put(item, group(item.item, item.version))).accepted


async def take(connection: Connection, version: int, rank: int = 0, world: int = 1) -> Part:
    return await connection.expect(Take(version=version, rank=rank, world=world), Part)


async def train(connection: Connection, version: int) -> None:
    await connection.expect(Trained(version=version, oldest_kept=0), Ack)


def items_of(part: Part) -> list[int]:
    return sorted(set(part.rows.item.numpy()[part.positions.numpy()].tolist()))


# who may speak


@in_loop
async def test_a_process_that_is_not_registered_must_say_hello_first():
    async with buffer() as it, Wire(it.address) as wire:
        assert await wire.ask(1, Ask(request=1, version=0, room=1)) == NotRegistered()
        await wire.ask(2, hello())
        assert isinstance(await wire.ask(3, Ask(request=1, version=0, room=1)), Work)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"protocol": PROTOCOL + 1}, (str(PROTOCOL), str(PROTOCOL + 1))),
        ({"fingerprint": "e" * 16}, ("e" * 16, "run test")),
    ],
)
@in_loop
async def test_another_protocol_or_config_is_refused_and_learns_nothing_of_the_right_one(change, values):
    async with buffer() as it, Wire(it.address) as wire:
        answer = await wire.ask(1, hello(**change))
        assert isinstance(answer, Refused)
        assert all(value in answer.reason for value in values) and "f" * 16 not in answer.reason
        assert await wire.ask(2, Status()) == NotRegistered()


@in_loop
async def test_an_observer_needs_no_config():
    async with buffer() as it, client(it.address, "stats", "observer", fingerprint="") as observer:
        state = await observer.expect(Status(), State)
        assert (state.version, state.trained, state.errors) == (0, -1, 0)


@in_loop
async def test_a_restarted_server_ends_the_leases_of_its_former_self_who_may_not_come_back():
    async with buffer() as it, Wire(it.address, b"old") as old, Wire(it.address, b"new") as new:
        await old.ask(1, hello(token="old"))
        first = await old.ask(2, Ask(request=1, version=0, room=2))
        await new.ask(1, hello(token="new"))
        again = await new.ask(2, Ask(request=1, version=0, room=2))
        assert [item.item for item in again.items] == [item.item for item in first.items]
        assert {item.lease for item in again.items}.isdisjoint(item.lease for item in first.items)
        assert await old.ask(3, Status()) == NotRegistered()
        refused = await old.ask(4, hello(token="old"))
        assert isinstance(refused, Refused) and "rollout-0" in refused.reason


# waiting


@in_loop
async def test_an_ask_waits_until_a_batch_is_formed():
    async with (
        buffer(make_requests(max_staleness=0)) as it,
        rollout(it.address) as samples,
        client(it.address, "learner-0", "learner") as learner,
    ):
        items = await samples.ask(8)
        assert len(items) == 2  # batch 0 is all that may be open when synchronous
        more = asyncio.create_task(samples.ask(8))
        await make_groups(samples, items)
        assert not (await asyncio.wait({more}, timeout=0.15))[0]
        await take(learner, 0)
        assert not (await asyncio.wait({more}, timeout=0.15))[0]  # the policy is still version 0
        samples._version = lambda: 1
        await samples.beat({})
        assert [item.version for item in await more] == [1, 1]


@in_loop
async def test_a_heartbeat_with_a_new_version_wakes_the_parked_ask_with_that_version():
    async with (
        buffer(make_requests(max_staleness=0)) as it,
        Wire(it.address) as wire,
        client(it.address, "learner-0", "learner") as learner,
    ):
        await wire.ask(1, hello())
        work = await wire.ask(2, Ask(request=1, version=0, room=2))
        for number, item in enumerate(work.items, 3):
            packed = [sample.pack() for sample in group(item.item)]
            await wire.ask(number, Put(item=item.item, lease=item.lease, samples=packed))
        await take(learner, 0)
        await wire.say(5, Ask(request=2, version=0, room=2))
        assert await wire.silent()
        await wire.say(6, Heartbeat(version=1, holding=[]))
        answers = dict([await wire.hear(), await wire.hear()])
        assert answers[6] == News(revoked=[], learner_waits=False)
        assert [item.version for item in answers[5].items] == [1, 1]


@in_loop
async def test_a_newer_ask_takes_the_place_of_the_parked_one():
    async with (
        buffer(make_requests(max_staleness=0)) as it,
        Wire(it.address) as wire,
        Wire(it.address, b"other") as other,
    ):
        await wire.ask(1, hello())
        await other.ask(1, hello("rollout-1"))
        all_there_is = await other.ask(2, Ask(request=1, version=0, room=9))
        await wire.say(2, Ask(request=1, version=0, room=1))
        assert await wire.silent()
        await wire.say(3, Ask(request=2, version=0, room=9))
        assert await wire.hear() == (2, Work(items=[]))
        await wire.say(4, Ask(request=1, version=0, room=1))  # the older one, arriving late
        assert await wire.hear() == (4, Work(items=[]))
        await other.ask(3, hello("rollout-1", "u"))  # ends its leases
        number, work = await wire.hear()
        assert number == 3
        assert [item.item for item in work.items] == [item.item for item in all_there_is.items]


@in_loop
async def test_a_take_waits_for_its_batch_and_each_rank_gets_its_part():
    async with buffer() as it, rollout(it.address) as samples, client(it.address, "learner-0", "learner") as learner:
        both = asyncio.gather(take(learner, 0, 0, 2), take(learner, 0, 1, 2))
        items = await samples.ask(2)
        await make_groups(samples, items[:1])
        waiters = (await learner.expect(Status(), State)).waiters
        assert {(waiter.who, waiter.kind) for waiter in waiters} == {("learner-0", "Take")}
        assert "1 of 2 groups" in waiters[0].why
        await make_groups(samples, items[1:])
        parts = await both
        assert [part.rank for part in parts] == [0, 1]
        assert sorted(data for part in parts for data in part.samples) == sorted(
            s.pack() for item in items for s in group(item.item)
        )


@in_loop
async def test_leases_end_by_the_clock_and_wake_the_ask_that_waits_for_work():
    async with (
        buffer(make_requests(max_staleness=0, lease_s=1.0)) as it,
        Wire(it.address) as silent,
        rollout(it.address, "rollout-1") as samples,
    ):
        await silent.ask(1, hello())
        held = await silent.ask(2, Ask(request=1, version=0, room=9))
        asked = asyncio.create_task(samples.ask(9))
        began = time.monotonic()
        while not asked.done():
            await asyncio.sleep(0.1)
            await samples.beat({})
        assert time.monotonic() - began > 0.3
        again = asked.result()
        assert [item.item for item in again] == [item.item for item in held.items]
        late = held.items[0]
        put = Put(item=late.item, lease=late.lease, samples=[s.pack() for s in group(late.item)])
        answer = await silent.ask(3, put)
        assert isinstance(answer, Stored) and not answer.accepted and answer.reason


@in_loop
async def test_the_leases_of_a_server_that_ended_end_long_before_the_heartbeats_tell():
    async with (
        buffer(make_requests(max_staleness=0, lease_s=8.0)) as it,
        rollout(it.address, "rollout-1") as samples,
    ):
        async with Wire(it.address) as dead:
            await dead.ask(1, hello())
            held = await dead.ask(2, Ask(request=1, version=0, room=9))
        again = await asyncio.wait_for(samples.ask(9), 120)
        assert [item.item for item in again] == [item.item for item in held.items]
        async with Wire(it.address, b"eye") as eye:
            await eye.ask(1, hello("eye", "e", "observer"))
            seen = await eye.ask(2, Status())
            assert isinstance(seen, State) and "gone_s" in seen.servers["rollout-0"]
        async with Wire(it.address) as late:  # under its old name and token: taken for dead, and let in again
            assert isinstance(await late.ask(3, Heartbeat(version=0, holding=[held.items[0].lease])), News)
            lease = held.items[0]
            put = Put(item=lease.item, lease=lease.lease, samples=[s.pack() for s in group(lease.item)])
            answer = await late.ask(4, put)
            assert isinstance(answer, Stored) and not answer.accepted
            state = await late.ask(5, Status())
            assert isinstance(state, State) and list(state.failed) == ["infrastructure: its server ended"]


def test_a_server_that_connects_again_keeps_its_leases():
    requests = make_requests(lease_s=10.0)
    handlers = requests.handlers
    ended, back, learner = b"ended", b"back", b"learner"
    handlers.peers.hello(ended, hello("rollout-0", "a"), 0.0)
    handlers.peers.hello(back, hello("rollout-1", "b"), 0.0)
    handlers.peers.hello(learner, hello("learner-0", "c", "learner"), 0.0)
    for identity in (ended, back):
        assert handlers.answers[Ask](handlers.peers.known[identity], Ask(request=1, version=0, room=2), 9.0).items
    for identity in (ended, back, learner, b"nobody"):
        handlers.peers.on_disconnect(identity, 10.0)
    assert status.state(handlers, [], 0, 11.0).servers["rollout-0"]["gone_s"] == 1.0
    requests.receive([back, pack(2, Status())], 11.0, "rollout")
    assert requests.expire(11.5) == 12.5
    requests.expire(12.5)
    servers = status.state(handlers, [], 0, 13.0).servers
    assert (servers["rollout-0"]["leases"], servers["rollout-1"]["leases"]) == (0, 2)
    assert "gone_s" in servers["rollout-0"] and "gone_s" not in servers["rollout-1"]
    assert status.state(handlers, [], 0, 13.0).learner_gone_s == 3.0
    handlers.peers.hello(b"next learner", hello("learner-0", "e", "learner"), 13.5)
    assert status.state(handlers, [], 0, 13.0).learner_gone_s is None
    handlers.peers.hello(b"next", hello("rollout-0", "d"), 14.0)
    assert "gone_s" not in status.state(handlers, [], 0, 15.0).servers["rollout-0"]


@pytest.mark.parametrize("role", ["rollout", "learner", "observer"])
def test_a_late_hello_of_a_connection_that_was_replaced_makes_no_second_peer(role):
    """ZeroMQ names the older connection anew, with a zero byte first, when its process makes another one."""
    handlers = make_requests(lease_s=10.0).handlers
    for identity in (b"\0late", b"a", b"\0late"):  # the late one is read before the other's Hello, and after it
        assert isinstance(handlers.peers.hello(identity, hello("0", "a", role), 0.0), Welcome)
    assert [*handlers.peers.known] == [b"a"]
    handlers.peers.hello(b"b", hello("1", "b", role), 0.0)
    assert {*handlers.peers.known} == {b"a", b"b"}


@pytest.mark.parametrize("late_first", [True, False])
def test_the_end_of_a_connection_that_was_replaced_ends_no_lease(late_first):
    requests = make_requests(lease_s=10.0)
    handlers = requests.handlers
    identities = [b"\0late", b"a"] if late_first else [b"a", b"\0late"]
    for identity in identities:
        handlers.peers.hello(identity, hello("rollout-0", "a"), 0.0)
    assert handlers.answers[Ask](handlers.peers.known[b"a"], Ask(request=1, version=0, room=2), 0.0).items
    requests.receive([b"\0late", pack(2, Status())], 0.0, "rollout")
    handlers.peers.on_disconnect(b"\0late", 0.0)
    requests.expire(5.0)
    assert status.state(handlers, [], 0, 5.0).servers["rollout-0"]["leases"] == 2


def test_a_client_without_an_identity_of_its_own_is_known_by_its_latest_connection():
    handlers = make_requests(lease_s=10.0).handlers
    for identity in (b"\0first", b"\0second"):
        handlers.peers.hello(identity, hello("rollout-0", "a"), 0.0)
    assert [*handlers.peers.known] == [b"\0second"] and handlers.peers.left == [b"\0first"]


@in_loop
async def test_what_a_connection_left_unread_makes_no_second_peer_of_its_process():
    """The loop reads nothing while a process connects, breaks off and connects again, as while a commit takes long."""
    context, requests = zmq.Context(), make_requests()

    def connect(*messages: Message) -> "zmq.Socket[bytes]":
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"t")
        dealer.setsockopt(zmq.LINGER, 10_000)
        unlock(dealer).connect(server.address)
        for number, message in enumerate(messages, start=1):
            dealer.send(pack(number, message))
        return dealer

    speakers: list[bytes] = []
    async with BufferServer("tcp://127.0.0.1:*", 2**20, server_keys()) as server:
        with server._router.plain.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            connections: zmq.Socket[bytes] = zmq.Socket.shadow(monitor)
            connect(Status(), hello()).close()
            assert server._router.plain.poll(60_000)
            assert connections.poll(60_000) and connections.recv_multipart()
            assert connections.poll(60_000) and connections.recv_multipart()
            again = connect(hello())
            assert connections.poll(60_000)
            server._router.plain.disable_monitor()
        with again:
            while len(speakers) < 3:
                assert server._router.plain.poll(60_000)
                for role, frames in server._router.receive(CommitRoom())[0]:
                    speakers.append(bytes(frames[0]))
                    requests.receive(frames, 0.0, role)
    context.term()
    assert len({*speakers}) == 2
    assert [*requests.handlers.peers.known] == [b"t"]


@in_loop
async def test_where_waits_for_a_learner_and_for_its_next_address():
    async with buffer() as it, rollout(it.address) as samples:
        where = asyncio.create_task(samples.where(None))
        assert not (await asyncio.wait({where}, timeout=0.1))[0]
        async with client(it.address, "learner-0", "learner", serves="tcp://127.0.0.1:7001"):
            assert await where == "tcp://127.0.0.1:7001"
        where = asyncio.create_task(samples.where("tcp://127.0.0.1:7001"))
        assert not (await asyncio.wait({where}, timeout=0.1))[0]
        async with client(it.address, "learner-0", "learner", serves="tcp://127.0.0.1:7002"):
            assert await where == "tcp://127.0.0.1:7002"


@in_loop
async def test_the_end_is_told_to_both_sides():
    async with (
        buffer(make_requests(versions=1)) as it,
        rollout(it.address) as samples,
        client(it.address, "learner-0", "learner") as learner,
    ):
        await make_groups(samples, await samples.ask(9))
        waiting = asyncio.create_task(samples.ask(1))
        await take(learner, 0)
        assert await waiting is None
        finished = await learner.expect(Take(version=1, rank=0, world=1), Finished)
        assert isinstance(finished, Finished) and finished.outcome == "versions"


@in_loop
async def test_back_pressure_holds_groups_back_but_never_from_a_learner_that_waits():
    async with (
        buffer(make_requests(max_bytes=1)) as it,
        rollout(it.address) as samples,
        client(it.address, "learner-0", "learner") as learner,
    ):
        items = await samples.ask(4)
        await make_groups(samples, items[:1])
        held_back = asyncio.create_task(make_groups(samples, items[1:]))
        assert not (await asyncio.wait({held_back}, timeout=0.15))[0]
        state = await learner.expect(Status(), State)
        assert [(waiter.kind, "buffer.max_gib" in waiter.why) for waiter in state.waiters] == [("Put", True)]
        assert (await samples.beat({})) == []  # other requests go on meanwhile
        assert items_of(await take(learner, 0)) == [items[0].item, items[1].item]
        assert not held_back.done()
        await train(learner, 0)
        assert items_of(await take(learner, 1)) == [items[2].item, items[3].item]
        await held_back


# repetition, reordering, contradiction


@in_loop
async def test_repeated_requests_change_nothing():
    async with buffer() as it, Wire(it.address) as wire, Wire(it.address, b"learner", "learner") as learner:
        await wire.ask(1, hello())
        await learner.ask(1, hello("learner-0", "l", "learner"))
        ask = Ask(request=1, version=0, room=2)
        work = await wire.ask(2, ask)
        assert await wire.ask(2, ask) == work
        puts = [
            Put(item=item.item, lease=item.lease, samples=[s.pack() for s in group(item.item)]) for item in work.items
        ]
        for put in (*puts, *reversed(puts)):
            assert await wire.ask(3, put) == Stored(accepted=True)
        part = await learner.ask(2, Take(version=0, rank=0, world=1))
        assert len(part.samples) == 4
        assert await learner.ask(2, Take(version=0, rank=0, world=1)) == part
        for _ in range(2):
            assert await learner.ask(3, Trained(version=0, oldest_kept=0)) == Ack()
        assert await wire.ask(2, ask) == Work(items=[])  # what it got is delivered; nothing new under an old number
        counts = (await learner.ask(4, Status())).counts
        assert counts == dict(leased=0, stored=0, waiting=0, batched=0, trained=2, dropped=0)


@in_loop
async def test_a_repeated_take_is_parked_once():
    async with buffer() as it, Wire(it.address, role="learner") as learner, rollout(it.address) as samples:
        await learner.ask(1, hello("learner-0", "l", "learner"))
        for _ in range(3):
            await learner.say(2, Take(version=0, rank=0, world=1))
        await make_groups(samples, await samples.ask(2))
        number, part = await learner.hear()
        assert (number, type(part)) == (2, Part)
        assert await learner.silent()


@in_loop
async def test_failures_reach_the_state_the_part_and_the_line_that_says_what_a_batch_waits_for():
    async with (
        buffer(make_requests(attempts=1)) as it,
        rollout(it.address) as samples,
        client(it.address, "learner-0", "learner") as learner,
    ):
        taking = asyncio.create_task(take(learner, 0))
        broken, *items = await samples.ask(3)
        await samples.fail(broken, "ZeroDivisionError: division by zero", kind="reward")
        state = await learner.expect(Status(), State)
        assert state.failed == {"reward: ZeroDivisionError: division by zero": 1}
        assert state.dropped == {"ZeroDivisionError: division by zero": 1}
        assert "1 attempts failed since the start, most often reward: ZeroDivisionError" in state.waiters[0].why
        await make_groups(samples, items)
        part = await taking
        assert (part.failed, part.dropped) == (1, 1)


@in_loop
async def test_servers_learn_that_the_run_was_given_up_after_the_learner():
    """A learner that dies before it has the answer goes on when it starts again, with the same servers."""
    async with (
        buffer(make_requests(attempts=1)) as it,
        rollout(it.address) as samples,
        client(it.address, "learner-0", "learner") as learner,
    ):
        while (await learner.expect(Status(), State)).ended == "":
            for item in await samples.ask(4):
                await samples.fail(item, "ValueError: no", kind="reward")
        asking = asyncio.create_task(samples.ask(1))
        (waiter,) = (await until_waiting(learner)).waiters
        assert waiter.kind == "Ask" and "the run was given up" in waiter.why
        await learner.expect(Rewind(version=0), Rewound)
        (item,) = await asyncio.wait_for(asking, 120)
        await samples.fail(item, "ValueError: no", kind="reward")
        while (await learner.expect(Status(), State)).ended == "":
            for item in await samples.ask(4):
                await samples.fail(item, "ValueError: no", kind="reward")
        asking = asyncio.create_task(samples.ask(1))
        await until_waiting(learner)
        assert await learner.expect(Take(version=0, rank=0, world=1), Finished)
        assert await asyncio.wait_for(asking, 120) is None


async def until_waiting(observer) -> State:
    while not (state := await observer.expect(Status(), State)).waiters:
        await asyncio.sleep(0.01)
    return state


@in_loop
async def test_a_heartbeat_that_was_overtaken_is_not_believed():
    async with buffer() as it, Wire(it.address) as wire:
        await wire.ask(1, hello())
        await wire.ask(9, Heartbeat(version=3, holding=[], stats={"tokens/s": 2.0}))
        await wire.ask(8, Heartbeat(version=2, holding=[], stats={"tokens/s": 1.0}))
        server = (await wire.ask(10, Status())).servers["rollout-0"]
        assert (server["version"], server["stats"]) == (3, {"tokens/s": 2.0})


@in_loop
async def test_impossible_requests_are_refused_counted_and_harmless():
    async with buffer() as it, Wire(it.address) as wire, rollout(it.address, "rollout-1") as samples:
        await wire.ask(1, hello())
        item = (await samples.ask(1))[0]
        packed = [s.pack() for s in group(item.item)]
        impossible: list[Message] = [
            Take(version=0, rank=1, world=1),
            Take(version=5, rank=0, world=1),
            Trained(version=0, oldest_kept=0),
            Rewind(version=2**61),
        ]
        del impossible[3]  # a ledger without batches goes to any version
        for number, message in enumerate(impossible, 2):
            assert isinstance(await wire.ask(number, message), Refused), message
        for number, samples_ in enumerate((packed, packed[:1], [packed[0], b"no sample"]), 20):
            foreign = Put(item=item.item, lease=item.lease, samples=samples_)
            assert not (await wire.ask(number, foreign)).accepted
        state = await wire.ask(30, Status())
        assert state.errors == len(impossible)
        assert (await samples.put(item, group(item.item))).accepted


@in_loop
async def test_a_flood_of_malformed_messages_is_answered_but_not_logged(caplog):
    async with buffer() as it, Wire(it.address) as wire, Wire(it.address, b"another") as another:
        for sender in (wire, another):
            for _ in range(200):
                await sender.socket.send(b"rubbish")
            for _ in range(200):
                assert isinstance((await sender.hear())[1], Refused)
    lines = [record for record in caplog.records if "refused malformed" in record.getMessage()]
    assert 1 <= len(lines) <= 20  # one in REPEAT_S


@in_loop
async def test_oversized_messages_are_refused_by_both_ends():
    async with buffer(make_requests(max_message=2**16)) as it, Wire(it.address) as wire, rollout(it.address) as samples:
        await wire.ask(1, hello("rollout-1"))
        big = Put(item=0, lease=1, samples=[bytes(2**16)])
        answer = await wire.ask(2, big)
        assert isinstance(answer, Refused) and "buffer.max_message_mib" in answer.reason
        item = (await samples.ask(1))[0]
        with pytest.raises(RefusedError, match="max_message_mib"):
            await samples.put(item, group(item.item, tokens=8000))
        assert (await samples.put(item, group(item.item))).accepted
        await wire.socket.send(bytes(2**18))  # beyond the hard limit: the connection is closed, nobody else notices
        assert await samples.beat({}) == []


# restarts


@in_loop
async def test_a_restarted_learner_gets_identical_batches():
    async with buffer() as it, rollout(it.address) as samples:
        async with client(it.address, "learner-0", "learner") as learner:
            before = []
            for version in range(3):
                samples._version = lambda version=version: version
                await samples.beat({})
                await make_groups(samples, await samples.ask(2))
                before.append(await take(learner, version))
                await learner.expect(Trained(version=version, oldest_kept=1 if version else 0), Ack)
        async with client(it.address, "learner-0", "learner") as learner:
            assert await learner.expect(Rewind(version=1), Rewound) == Rewound(replay=2)
            again = [await take(learner, version) for version in (1, 2)]
            assert [part.generated for part in again] == [6, 6]  # a count of the run so far, not of the batch
            of_run = {"generated": 6, "restored": 1, "reached": 3}
            assert [part.new_groups for part in before] == [2, 2, 2] and [part.new_groups for part in again] == [0, 2]
            of_run |= {"problems": again[1].problems, "new_groups": 0}
            assert [part.model_copy(update={"new_groups": 0}) for part in again] == [
                part.model_copy(update=of_run) for part in before[1:]
            ]
            with pytest.raises(RefusedError, match="batch 0 is gone"):
                await learner.expect(Rewind(version=0), Rewound)


@in_loop
async def test_what_was_acknowledged_is_there_after_reopening_the_file(tmp_path):
    path = tmp_path / "buffer.sqlite"
    async with buffer(make_requests(path)) as it, rollout(it.address) as samples:
        items = await samples.ask(3)
        await make_groups(samples, items[:2])
    async with buffer(make_requests(path)) as it, client(it.address, "learner-0", "learner") as learner:
        state = await learner.expect(Status(), State)
        assert (state.counts["stored"], state.counts["leased"]) == (2, 1)
        assert state.bytes_stored == sum(len(s.pack()) for item in items[:2] for s in group(item.item))
        assert items_of(await take(learner, 0)) == [items[0].item, items[1].item]


@pytest.mark.parametrize("cached", [2**20, 0], ids=["cached", "too many to cache"])
@pytest.mark.parametrize("commit", [False, True], ids=["before the commit", "after it"])
def test_a_batch_is_the_same_wherever_its_samples_are_read(monkeypatch, cached, commit):
    monkeypatch.setattr(batches, "CACHE_BYTES", cached)
    mine = (requests := make_requests()).handlers
    mine.peers.hello(b"s", hello(), 0.0)
    mine.peers.hello(b"l", hello("learner-0", "u", "learner"), 0.0)
    server, learner = mine.peers.known[b"s"], mine.peers.known[b"l"]
    work = mine.answers[Ask](server, Ask(request=1, version=0, room=2), 0.0)
    packed = {item.item: [sample.pack() for sample in group(item.item)] for item in work.items}
    for item in work.items:
        put = Put(item=item.item, lease=item.lease, samples=packed[item.item])
        assert mine.answers[Put](server, put, 0.0).accepted
    if commit:
        committed(requests)
    part = mine.answers[Take](learner, Take(version=0, rank=0, world=1), 0.0)
    assert set(part.rows.item.numpy().tolist()) == packed.keys()
    assert part.samples == [data for item in dict.fromkeys(part.rows.item.numpy().tolist()) for data in packed[item]]
    committed(requests)
    mine.store.close()


def test_ten_thousand_open_groups_are_served_again_within_two_seconds(tmp_path):
    path = tmp_path / "buffer.sqlite"
    requests = make_requests(path, groups=10_000)
    ledger, mine = requests.handlers.ledger, requests.handlers
    packed = [sample.pack() for sample in group(0)]
    for leased in ledger.ask("rollout-0#t", 0, 10_000, 0.0, 1):
        if leased.item % 2:
            ledger.put("rollout-0#t", leased.item, leased.lease, [sample_stats(data) for data in packed], 0.0)
            mine.groups._payloads[leased.item] = packed
    committed(requests)
    mine.store.close()

    async def serve_again() -> State:
        async with (
            buffer(make_requests(path, groups=10_000)) as it,
            client(it.address, "stats", "observer") as observer,
        ):
            return await observer.expect(Status(), State)

    began = time.process_time()  # others' work does not count
    state = asyncio.run(serve_again())
    assert time.process_time() - began < 20  # something quadratic would take minutes
    assert (state.counts["leased"], state.counts["stored"]) == (5000, 5000)


# the process


class Run:
    """Rollout servers without engines and a learner without a model, in full traffic with a buffer process."""

    def __init__(self, it: Process) -> None:
        self.address, self.fingerprint = it.address, fingerprint(load([*it.arguments()[3:]]))
        self.version = 0
        self.acknowledged: set[int] = set()
        self.trained: list[list[int]] = []

    async def roll(self, name: str) -> None:
        async with client(self.address, name, fingerprint=self.fingerprint) as connection:
            samples = RolloutClient(connection, lambda: self.version)
            beating = asyncio.create_task(heartbeats(samples, 0.05, dict, lambda revoked: None))
            while (items := await samples.ask(2)) is not None:
                for item in items:
                    if (await samples.put(item, group(item.item, item.version))).accepted:
                        self.acknowledged.add(item.item)
            beating.cancel()

    def take(self) -> Take:
        return Take(version=self.version, rank=0, world=1)

    async def learn(self) -> None:
        async with client(self.address, "learner-0", "learner", fingerprint=self.fingerprint) as connection:
            while isinstance(part := await connection.expect(self.take(), Part, Finished), Part):
                self.trained.append(items_of(part))
                await connection.expect(Trained(version=self.version, oldest_kept=0), Ack)
                self.version += 1

    async def go(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.learn())
            for number in range(3):
                tasks.create_task(self.roll(f"rollout-{number}"))


@in_loop
async def test_a_buffer_killed_in_mid_traffic_loses_nothing_it_acknowledged(tmp_path):
    with process(tmp_path, **{"run.versions": 60}) as it:
        run = Run(it)
        going = asyncio.create_task(run.go())
        for reached in (5, 20, 35):
            while run.version < reached and not going.done():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(it.kill)
            it.start()
        await going
        trained = [item for batch in run.trained for item in batch]
        assert len(trained) == len(set(trained)) == 240
        async with client(it.address, "stats", "observer") as observer:
            state = await observer.expect(Status(), State)
        assert state.counts == dict(leased=0, stored=0, waiting=0, batched=0, trained=240, dropped=0)
        assert set(trained) == run.acknowledged
        code, errors = await asyncio.to_thread(it.kill, signal.SIGTERM)
        assert code == 0, errors


def test_a_busy_port_ends_it_in_one_line_before_anything_but_the_keys_is_made(tmp_path):
    with buffer_socket() as port:
        it = Process(tmp_path, port)
        done = subprocess.run(it.arguments(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert str(port) in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert {path.name for path in it.run.iterdir()} == {"keys", ".keys.lock"}


@contextmanager
def buffer_socket() -> Iterator[int]:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield busy.getsockname()[1]


def test_the_second_signal_forces(tmp_path):
    with process(tmp_path) as it:
        asyncio.run(_reachable(it))
        assert (it.run / "config.yaml").exists()
        os.kill(it.running.pid, signal.SIGSTOP)  # so that both signals are there at once
        os.kill(it.running.pid, signal.SIGTERM)
        os.kill(it.running.pid, signal.SIGINT)
        code, _ = it.kill(signal.SIGCONT)
        assert code in (128 + signal.SIGINT, 128 + signal.SIGTERM)


async def _reachable(it: Process) -> None:
    async with asyncio.timeout(120), client(it.address, "stats", "observer"):
        pass


# the disk


class FullDisk(Store):
    """A store whose disk has no room for the next `refusals` commits."""

    refusals = 0
    code = sqlite3.SQLITE_FULL

    def commit(self, *arguments: Any, **keywords: Any) -> None:
        if self.refusals:
            self.refusals -= 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = self.code
            raise error
        super().commit(*arguments, **keywords)


@in_loop
async def test_a_full_disk_holds_answers_back_and_loses_nothing(caplog):
    store = FullDisk(None)
    async with buffer(make_requests(store=store)) as it, rollout(it.address) as samples:
        items = await samples.ask(2)
        store.refusals = 1
        putting = asyncio.create_task(make_groups(samples, items))
        assert not (await asyncio.wait({putting}, timeout=0.5))[0]
        await putting
        assert len(samples_of(store, items[0].item)) == 2
    assert "disk is full" in caplog.text


@in_loop
async def test_any_other_failure_of_the_file_ends_the_buffer_without_an_answer():
    store = FullDisk(None)
    requests = make_requests(store=store)
    async with (
        BufferServer("tcp://127.0.0.1:*", requests.max_message, server_keys()) as server,
        Wire(server.address) as wire,
    ):
        store.refusals, store.code = 1, sqlite3.SQLITE_CORRUPT
        serving = asyncio.create_task(server.serve(requests))
        await wire.say(1, hello())
        await wire.say(2, Ask(request=1, version=0, room=1))
        with pytest.raises(sqlite3.OperationalError):
            await serving
        heard = [await wire.hear()] if not await wire.silent() else []
        assert all(isinstance(message, Welcome) for _, message in heard)
