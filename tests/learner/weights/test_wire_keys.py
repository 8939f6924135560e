"""Who gets in at the weights wire: a rollout server's key at the learner, and the learner's key at a rollout server."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from buffer.keys import ADMITTED, ROLES, ClientKeys
from learner.weights import protocol
from learner.weights.protocol import TO_LEARNER, TO_SERVER, Bye, Join, JoinRefused, Rejoin, dealer, pack, unpack
from learner.weights.sender.publish import Sender
from tests.harness.keys import client_keys, foreign_keys, lock_fake, server_keys, unlock
from tests.harness.ports import free_port
from tests.harness.weights_server import HEARTBEAT_S, SPECS, Addresses, VersionedPolicy, config, servers

CPU = torch.device("cpu")
JOIN = Join(name="rogue", protocol=protocol.PROTOCOL, workers=1, backend="gloo")
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
REFUSED = FAILED | zmq.EVENT_DISCONNECTED
STRANGERS: dict[str, ClientKeys | None] = {
    "no key": None,
    "a foreign key": foreign_keys(server="learner"),
    **{role: client_keys(role, "learner") for role in ROLES if role not in ADMITTED["learner"]},
}


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender(SPECS, config(), 0, CPU, heartbeat_s=HEARTBEAT_S, keys=server_keys("learner"))
    yield made
    made.close()


async def event(socket: zmq.asyncio.Socket, kinds: int) -> int:
    """The next event of these kinds on the connections of `socket`."""
    monitor = socket.get_monitor_socket()
    try:
        while True:
            found = await asyncio.wait_for(recv_monitor_message(monitor), 60)
            if found["event"] & kinds:
                return int(found["event"])
    finally:
        socket.disable_monitor()
        monitor.close(0)


@pytest.mark.parametrize("who", STRANGERS)
def test_a_learner_admits_the_key_of_a_rollout_server_and_no_other(sender: Sender, who: str) -> None:
    async def test() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            if keys := STRANGERS[who]:
                stranger.curve_serverkey = keys.server_public
                stranger.curve_publickey, stranger.curve_secretkey = keys.public, keys.secret
            waiting = asyncio.create_task(event(stranger, FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED))
            await asyncio.sleep(0)
            stranger.connect(sender.address)
            with suppress(zmq.Again):  # ZeroMQ gives a connection up whose handshake has failed
                await stranger.send(pack(JOIN), zmq.DONTWAIT)
            assert await waiting & FAILED
        async with servers(Addresses(sender.address), "rollout-0") as (one,):
            sender.publish(VersionedPolicy(0), 0)
            await one.has(0)
            assert [member.name for member in sender._distributor.members] == ["rollout-0"]

    asyncio.run(test())


def test_a_rogue_join_and_messages_of_the_learners_end_no_learner(sender: Sender) -> None:
    async def test() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as rogue:
            rogue.setsockopt(zmq.LINGER, 0)
            unlock(rogue, "rollout", "learner").connect(sender.address)
            for message in (
                JOIN.model_copy(update={"protocol": 99}),
                Bye(),
                Rejoin(reason="go"),
                Join(**JOIN.__dict__),
            ):
                await rogue.send(pack(message))
            for kind in (JoinRefused, JoinRefused, JoinRefused, protocol.ServerWelcome):
                assert isinstance(unpack(await asyncio.wait_for(rogue.recv(), 60), TO_SERVER), kind)
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)

    asyncio.run(test())


@pytest.mark.parametrize("role", [None, "rollout", "observer"])
def test_a_sender_without_the_learners_key_gets_nothing_from_a_server(role: str | None) -> None:
    """A rogue sender's zeros were loaded as version 7777."""

    async def test() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as rogue:
            rogue.setsockopt(zmq.LINGER, 0)
            if role:
                lock_fake(rogue, role)  # type: ignore[arg-type]
            address = f"tcp://127.0.0.1:{free_port()}"
            with dealer(context, address, client_keys(server="learner")) as server:
                server.setsockopt(zmq.LINGER, 0)
                await server.send(pack(JOIN))
                waiting = asyncio.create_task(event(server, REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED))
                await asyncio.sleep(0)
                rogue.bind(address)
                assert await waiting & REFUSED
                assert not await rogue.poll(0)

    asyncio.run(test())


def test_the_page_shows_what_each_role_says() -> None:
    page = Path("docs/design/weights-wire.md").read_text(encoding="utf-8")
    for role, kinds in (("rollout", TO_LEARNER), ("learner", TO_SERVER)):
        row = re.search(rf"^\| `{role}` \| (.*) \|$", page, re.M)
        assert row and row[1] == " ".join(f"`{kind}`" for kind in kinds)


def test_a_server_returns_to_an_address_where_something_else_answered_for_a_while(sender: Sender) -> None:
    """libzmq itself never connects again after bytes that are no ZMTP."""

    async def test() -> None:
        served = list[str]()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.append("other" if not served else "learner")
            if len(served) == 1:
                writer.write(b"HTTP/1.1 400 Bad Request\r\n" * 8)
                await writer.drain()
                return writer.close()
            host, port = sender.address.removeprefix("tcp://").rsplit(":", 1)
            there, back = await asyncio.open_connection(host, int(port))
            await asyncio.wait([asyncio.ensure_future(carry(*pair)) for pair in ((reader, back), (there, writer))])

        async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.close()

        async with await asyncio.start_server(between, "127.0.0.1", 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            async with servers(Addresses(f"tcp://127.0.0.1:{port}"), "a") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
        assert served[0] == "other" and "learner" in served

    asyncio.run(test())
