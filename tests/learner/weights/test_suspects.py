"""A member that says Ready and nothing more costs a round now and then, and not each one."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from math import log2

import pytest
import zmq
import zmq.asyncio

from buffer.wire.message import Message
from learner.weights import protocol
from learner.weights.sender.suspects import MOST_PAUSE_S, Suspects
from tests.harness.keys import client_keys
from tests.harness.weights_server import HEARTBEAT_S, WAIT_S, Addresses, VersionedPolicy, servers
from tests.learner.weights.test_wire import a_sender

Lies = Callable[[int], list[Message]]
TIMEOUT_S = 0.5
"""The first pause of a suspect; each further one is twice as long."""


def test_the_pause_doubles_and_ends_with_a_version_that_is_loaded() -> None:
    at = [0.0]
    suspects = Suspects(lambda: at[0])
    suspects.clear("proven")
    assert [suspects.blame("proven", 3.0) for _ in range(4)] == [3.0, 6.0, 12.0, 24.0]
    assert suspects.out("proven") and not suspects.out("other")
    at[0] = 23.9
    assert suspects.out("proven")
    at[0] = 24.0
    assert not suspects.out("proven")
    suspects.blame("proven", 3.0)
    suspects.clear("proven")
    assert not suspects.out("proven") and suspects.blame("proven", 3.0) == 3.0
    for _ in range(50):
        suspects.blame("proven", 3.0)
    assert suspects.blame("proven", 3.0) == MOST_PAUSE_S


def test_new_names_are_one_suspect() -> None:
    suspects = Suspects(lambda: 0.0)
    suspects.clear("proven")
    assert [suspects.blame(f"name-{number}", 1.0) for number in range(3)] == [1.0, 2.0, 4.0]
    assert suspects.out("yet another name") and not suspects.out("proven")


async def say_ready_only(address: str, seen: list[str], lies: Lies) -> None:
    """Join under new names, say Ready to each Offer, send heartbeats, receive nothing, and answer Go with `lies`."""
    with zmq.asyncio.Context() as context:
        socket = protocol.dealer(context, address, client_keys(server="learner"))
        join = protocol.Join(name="rogue-0", protocol=protocol.PROTOCOL, workers=1, backend="gloo")
        try:
            while True:
                socket.send(protocol.pack(join))
                while await socket.poll(1000 * HEARTBEAT_S):
                    message = protocol.unpack(await socket.recv(), protocol.TO_SERVER)
                    seen.append(type(message).__name__)
                    if isinstance(message, protocol.ServerWelcome):
                        join = join.model_copy(update={"digest": message.digest, "trained": message.trained})
                        socket.send(protocol.pack(join))
                    elif isinstance(message, protocol.Offer):
                        socket.send(protocol.pack(protocol.Ready(round=message.round)))
                    elif isinstance(message, protocol.Go):
                        for lie in lies(message.round):
                            socket.send(protocol.pack(lie))
                    elif isinstance(message, protocol.Rejoin):
                        join = join.model_copy(update={"name": f"rogue-{len(seen)}"})
                        socket.send(protocol.pack(join))
                    socket.send(protocol.pack(protocol.KeepAlive()))
                socket.send(protocol.pack(protocol.KeepAlive()))
        finally:
            socket.close(0)


ANSWERS: dict[str, Lies] = {
    "nothing": lambda round: [],
    "Received": lambda round: [protocol.Received(round=round, span_s=0.1)],
    "Loaded": lambda round: [
        protocol.Received(round=round, span_s=0.1),
        protocol.Loaded(round=round, load_s=0.1, pause_s=0.0, verify_s=0.0),
    ],
    "Failed": lambda round: [protocol.Failed(round=round, reason="no")],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_member_that_is_ready_and_receives_nothing_does_not_slow_every_version(answer: str) -> None:
    async def test() -> tuple[int, float]:
        seen: list[str] = []
        with a_sender(timeout_s=TIMEOUT_S) as sender:
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
                rogue = asyncio.ensure_future(say_ready_only(sender.address, seen, ANSWERS[answer]))
                async with asyncio.timeout(WAIT_S):
                    while "Go" not in seen:
                        await asyncio.sleep(0.05)
                began, version = time.monotonic(), 0
                while version < 12:
                    version += 1
                    sender.publish(VersionedPolicy(version), version)
                    await one.has(version)
                took_s = time.monotonic() - began
                rogue.cancel()
                with suppress(asyncio.CancelledError):
                    await rogue
        return seen.count("Go"), took_s

    rounds, took_s = asyncio.run(test())
    assert 1 <= rounds <= 4 + log2(1 + took_s / TIMEOUT_S), f"{rounds} rounds were spoilt in {took_s:.1f} s"


def test_a_large_message_of_a_server_is_not_taken() -> None:
    """Six half messages of 64 MiB each held that much: all that servers say is short."""

    async def test() -> None:
        with a_sender() as sender, zmq.asyncio.Context() as context:
            socket = protocol.dealer(context, sender.address, client_keys(server="learner"))
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            await socket.send(bytes(1 << 17))
            assert await monitor.poll(60_000), "the learner ends the connection"
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)

    asyncio.run(test())


def test_raw_connections_do_not_take_the_learner_s_last_open_files() -> None:
    """A checkpoint needs some."""

    async def test() -> None:
        with a_sender() as sender:
            host, port = sender.address.removeprefix("tcp://").split(":")
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
                raw = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
                sender._distributor.members._limits.files.limit = 0.0  # as if these were the last files
                async with asyncio.timeout(60):
                    for reader, writer in raw:
                        with suppress(ConnectionError):
                            while await reader.read(100):
                                pass
                        writer.close()
                sender.publish(VersionedPolicy(1), 1)
                await one.has(1)
        assert sender.stats()["weights/failed"] == 0, "the member keeps its connection"

    asyncio.run(test())
