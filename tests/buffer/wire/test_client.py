"""The clients: they wait, go on after restarts of the buffer, warn, and raise refusals."""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
import zmq.asyncio

from buffer.wire.client import LearnerClient, RefusedError, RolloutClient, heartbeats
from buffer.wire.connection import ProtocolFault
from buffer.wire.message import Message, pack, unpack
from buffer.wire.protocol import REQUESTS, Due, Hello, Part, State, Status, Take, Welcome
from configs.entrypoint import PROGRESS, made_progress
from tests.harness.buffer_process import Buffer, buffer, client, group, in_loop, make_requests, rollout
from tests.harness.keys import client_keys, lock_fake
from tests.harness.ports import free_port


@contextmanager
def threaded(**changes) -> Iterator[Buffer]:
    """A buffer in a thread, for those who block."""
    ready: list[Buffer] = []
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with buffer(make_requests(**changes)) as it:
            ready.append(it)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(120)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        loop.close()


@in_loop
async def test_a_client_may_come_before_the_buffer():
    address = f"tcp://127.0.0.1:{free_port()}"
    connecting = asyncio.create_task(client(address).__aenter__())
    assert not (await asyncio.wait({connecting}, timeout=0.3))[0]
    async with buffer(address=address):
        connected = await connecting
        assert connected.welcome.max_message == 2**20
        await connected.__aexit__(None, None, None)


@in_loop
async def test_a_client_goes_on_where_something_else_has_answered_for_a_while():
    """libzmq itself never connects again after bytes that are no ZMTP."""
    address = f"tcp://127.0.0.1:{(port := free_port())}"
    came = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" * 8)
        await writer.drain()
        writer.close()
        came.set()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        connecting = asyncio.create_task(client(address, retry_s=0.2).__aenter__())
        await came.wait()
    async with buffer(address=address), asyncio.timeout(60):
        connected = await connecting
        assert connected.welcome.max_message == 2**20
        await connected.__aexit__(None, None, None)


@in_loop
async def test_parked_requests_survive_a_restart_of_the_buffer_at_once(tmp_path):
    address, path = f"tcp://127.0.0.1:{free_port()}", tmp_path / "buffer.sqlite"
    first = buffer(make_requests(path, max_staleness=0), address)
    await first.__aenter__()
    async with rollout(address, retry_s=600.0) as samples, rollout(address, "rollout-1", retry_s=600.0) as other:
        items = await other.ask(9)
        asking, where = asyncio.create_task(samples.ask(9)), asyncio.create_task(samples.where(None))
        await asyncio.sleep(0.1)
        await first.__aexit__(None, None, None)
        putting = asyncio.create_task(other.put(items[0], group(items[0].item)))
        await asyncio.sleep(0.1)
        async with buffer(make_requests(path, max_staleness=0), address):
            began = time.monotonic()
            assert (await putting).accepted
            await other.fail(items[1], "for the test")
            assert [item.item for item in await asking] == [items[1].item]
            async with client(address, "learner-0", "learner", serves="tcp://127.0.0.1:7001"):
                assert await where == "tcp://127.0.0.1:7001"
            assert time.monotonic() - began < 120  # not a matter of the retry interval


@in_loop
async def test_a_refused_process_is_told_at_the_door_and_later_if_the_config_changes():
    address = f"tcp://127.0.0.1:{free_port()}"
    async with buffer(address=address):
        with pytest.raises(RefusedError, match="eeee"):
            async with client(address, fingerprint="e" * 16):
                pass
        known = await client(address).__aenter__()
    asking = asyncio.create_task(RolloutClient(known, lambda: 0).where(None))
    async with buffer(make_requests(fingerprint="e" * 16), address):
        with pytest.raises(RefusedError, match=r"config ffff.*, which is not that of run test"):
            await asking
        with pytest.raises(RefusedError, match="ffff"):
            await RolloutClient(known, lambda: 0).ask(1)
    await known.__aexit__(None, None, None)


@in_loop
async def test_silence_is_warned_of_at_growing_intervals_and_never_an_error(caplog):
    address = f"tcp://127.0.0.1:{free_port()}"
    connecting = asyncio.create_task(client(address, retry_s=0.05, late_s=0.2).__aenter__())
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(1.2)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) in (2, 3)  # at equal intervals they would be 6
    assert all(address in line for line in warnings)
    async with buffer(address=address):
        await (await connecting).__aexit__(None, None, None)


@in_loop
async def test_a_cancelled_ask_loses_nothing():
    async with (
        buffer(make_requests(max_staleness=0)) as it,
        rollout(it.address) as samples,
        rollout(it.address, "other") as other,
    ):
        held = await other.ask(9)
        asking = asyncio.create_task(samples.ask(9))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait({asking})
        await other.fail(held[0], "for the test")
        assert [item.item for item in await samples.ask(9)] == [held[0].item]


@in_loop
async def test_leases_are_held_from_work_to_stored_and_revoked_once():
    async with buffer(make_requests(lease_s=1.5)) as it, rollout(it.address) as samples:
        items = await samples.ask(3)
        assert samples.holding == {item.lease for item in items}
        await samples.put(items[0], group(items[0].item))
        await samples.fail(items[1], "the engine choked")
        assert samples.holding == {items[2].lease}
        await asyncio.sleep(2.0)
        assert await samples.beat({}) == [items[2].lease]
        assert await samples.beat({}) == []
        late = await samples.put(items[2], group(items[2].item))
        assert not late.accepted and late.reason


@in_loop
async def test_a_heartbeat_is_told_whether_the_learner_waits_for_a_batch():
    async with (
        buffer(make_requests()) as it,
        rollout(it.address) as samples,
        client(it.address, "learner-0", "learner") as learner,
    ):
        items = await samples.ask(2)
        await samples.beat({"running": 12.0, "places": 16.0})
        assert not samples.learner_waits
        taking = asyncio.create_task(learner.expect(Take(version=0, rank=0, world=1), Part))
        while not samples.learner_waits:
            await samples.beat({"running": 12.0, "places": 16.0})
        for item in items:
            await samples.put(item, group(item.item))
        part = await taking
        assert (part.running, part.places) == (12, 16)
        await samples.beat({})
        assert not samples.learner_waits


@in_loop
async def test_heartbeats_keep_leases_and_beat_at_once_when_nudged():
    stats: list[float] = []
    async with buffer(make_requests(lease_s=2.0)) as it, rollout(it.address) as samples:
        items = await samples.ask(1)

        def beat(every_s: float) -> asyncio.Task[None]:
            note = lambda: stats.append(time.monotonic()) or {}  # noqa: E731
            return asyncio.create_task(heartbeats(samples, every_s, note, lambda revoked: None))

        beating = beat(0.3)
        await asyncio.sleep(2.6)
        assert (await samples.put(items[0], group(items[0].item))).accepted
        beating.cancel()
        number, beating = len(stats), beat(3600.0)
        while len(stats) == number:
            await asyncio.sleep(0.005)
        samples.nudged.set()
        while len(stats) == number + 1:  # it would wait for an hour
            await asyncio.sleep(0.005)
        assert not samples.nudged.is_set()
        beating.cancel()


async def make(address: str) -> None:
    """The groups of a batch."""
    async with rollout(address) as samples:
        for item in await samples.ask(2):
            await samples.put(item, group(item.item))


def test_batches_block_until_there_is_one_and_say_what_they_waited_for():
    with (
        threaded() as it,
        LearnerClient(it.address, "learner-0", "f" * 16, 0, 1, timeout_s=6, keys=client_keys("learner")) as batches,
    ):
        assert batches.rewind(0) == 0
        with pytest.raises(TimeoutError) as caught:
            batches.take(0)
        assert it.address in str(caught.value) and "0 of 2 groups" in str(caught.value)

        taken = []
        taking = threading.Thread(target=lambda: taken.append(batches.take(0)))
        taking.start()
        asyncio.run(make(it.address))
        taking.join(120)
        assert len(taken[0].samples) == 4
        assert batches.take(0) == taken[0]
        batches.trained(0, 0)
        assert batches.rewind(0) == 1


def test_stopped_batches_wait_for_nothing_any_more():
    """Also where a signal's handler stops the thread that waits."""
    with threaded() as it:
        with LearnerClient(
            it.address, "learner-0", "f" * 16, 0, 1, timeout_s=60, keys=client_keys("learner")
        ) as batches:
            before = signal.signal(signal.SIGUSR1, lambda *_: batches.stop())
            batches.follow_evaluations([])
            batches.rewind(0)
            try:
                timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()
                assert batches.take(0) is None and batches.finished is None
                assert batches.take(0) is None and batches.last_evaluations() == []
                timer.join()
            finally:
                signal.signal(signal.SIGUSR1, before)

        with LearnerClient(
            it.address, "learner-0", "f" * 16, 0, 1, timeout_s=60, keys=client_keys("learner")
        ) as batches:
            batches.rewind(0)
            asyncio.run(make(it.address))
            assert len(batches.take(0).samples) == 4


def test_a_signal_ends_the_wait_for_a_buffer_that_died():
    with threaded() as it:
        batches = LearnerClient(it.address, "learner-0", "f" * 16, 0, 1, timeout_s=60, keys=client_keys("learner"))
    threading.Timer(0.1, batches.stop).start()
    assert batches.rewind(0) == 0 and batches.take(0) is None
    batches.close()


def test_a_batch_that_is_trained_again_is_no_progress(tmp_path, monkeypatch):
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress"))
    made_progress.cache_clear()

    with (
        threaded() as it,
        LearnerClient(it.address, "learner-0", "f" * 16, 0, 1, timeout_s=30, keys=client_keys("learner")) as batches,
    ):
        assert batches.rewind(0) == 0
        asyncio.run(make(it.address))
        batches.take(0)
        made_progress.cache_clear()
        (tmp_path / "progress").unlink()  # the servers'
        assert batches.rewind(0) == 1
        batches.take(0)
        batches.trained(0, 0)
        assert not (tmp_path / "progress").exists()
        asyncio.run(make(it.address))
        made_progress.cache_clear()
        (tmp_path / "progress").unlink()
        batches.take(1)
        batches.trained(1, 0)
        assert (tmp_path / "progress").exists()


class Mistaken:
    """A buffer that answers each request but Hello with `answer`."""

    def __init__(self, answer: bytes | Message) -> None:
        self.answer, self.context = answer, zmq.asyncio.Context()

    async def __aenter__(self) -> str:
        self.socket = self.context.socket(zmq.ROUTER)
        lock_fake(self.socket)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.serving = asyncio.create_task(self._serve())
        return f"tcp://127.0.0.1:{port}"

    async def _serve(self) -> None:
        while True:
            who, frame = await self.socket.recv_multipart()
            number, message = unpack(frame, REQUESTS)
            answer = Welcome(max_message=2**20) if isinstance(message, Hello) else self.answer
            await self.socket.send_multipart([who, answer if isinstance(answer, bytes) else pack(number, answer)])

    async def __aexit__(self, *error: object) -> None:
        self.serving.cancel()
        self.socket.close(0)
        self.context.term()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Due(due=3), "the buffer answered {} with Due"),
        (b"\xc1", "the buffer's message cannot be read: not MessagePack"),
        (bytes(pack(2, Due(due=3)))[:-1] + b"\xa1x", "the buffer's message cannot be read: Due.due"),
    ],
)
@in_loop
async def test_an_answer_of_another_kind_is_a_protocol_fault_not_a_refusal(answer, words):
    calls = {
        "Status": lambda client: client.expect(Status(), State),
        "Ask": lambda client: RolloutClient(client, lambda: 0).ask(1),
        "Where": lambda client: RolloutClient(client, lambda: 0).where(None),
    }
    for kind, call in calls.items():
        async with Mistaken(answer) as address, client(address) as connection:
            with pytest.raises(ProtocolFault) as fault:
                await call(connection)
            assert str(fault.value).startswith(words.format(kind)) and "install the same Headrace" in str(fault.value)
            assert not isinstance(fault.value, RefusedError | ValueError)


@in_loop
async def test_a_learner_with_a_wrong_answer_to_take_or_results_raises():
    async with Mistaken(Due(due=3)) as address:

        def learn() -> None:
            with LearnerClient(
                address, "learner-0", "f" * 16, 0, 1, timeout_s=60, keys=client_keys("learner")
            ) as batches:
                with pytest.raises(ProtocolFault, match="answered Take with Due"):
                    batches.take(0)
                batches.follow_evaluations([])
                with pytest.raises(ProtocolFault, match="answered Results with Due"):
                    batches.last_evaluations()

        await asyncio.to_thread(learn)


def test_batches_end_when_the_versions_do():
    with (
        threaded(versions=1) as it,
        LearnerClient(it.address, "learner-0", "f" * 16, 0, 1, timeout_s=60, keys=client_keys("learner")) as batches,
    ):
        batches.rewind(1)
        assert batches.take(1) is None


def test_what_the_buffer_has_against_the_last_word_is_raised_when_batches_close():
    with threaded() as it:
        batches = LearnerClient(it.address, "learner-0", "f" * 16, 0, 1, timeout_s=60, keys=client_keys("learner"))
        batches.trained(7, 0)
        with pytest.raises(RefusedError, match="the next batch is 0"):
            batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_batches_without_a_buffer_or_with_another_config_fail_in_words():
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(TimeoutError, match=nowhere):
        LearnerClient(nowhere, "learner-0", "f" * 16, 0, 1, timeout_s=0.3, keys=client_keys("learner"))
    with threaded() as it, pytest.raises(RefusedError, match="eeee"):
        LearnerClient(it.address, "learner-0", "e" * 16, 0, 1, timeout_s=60, keys=client_keys("learner"))
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
