"""Half-valid messages at every server of a run: it lives, its memory is bounded and its log is short.

hypothesis draws messages that are right but for some fields, and bytes around them. All run over real sockets in one
process: both wires, the door of a rollout server, the live page and a reward server's middleware.
"""

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import psutil
import pytest
import uvicorn
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.keys import ADMITTED, Role
from buffer.wire import protocol as samples
from buffer.wire.message import TEXT, Message, pack
from buffer.wire.protocol import State, Status
from configs.log_floods import FloodFilter
from learner.weights import protocol as weights
from rollout.engine.reward_limits import HEAD_LIMITS, RequestLimits
from tests.actors.live.test_serve import watching
from tests.buffer.wire.test_many import hello
from tests.harness.buffer_process import buffer, client, in_loop, make_requests
from tests.harness.fakes import until
from tests.harness.keys import unlock
from tests.harness.watched import make_config
from tests.harness.weights_server import Addresses, VersionedPolicy, servers
from tests.learner.weights.test_wire import a_sender
from tests.rollout.chat.test_door import served
from tests.rollout.engine.test_reward_limits import echo

MOST_GROWN = 128 * 2**20
"""Bytes by which the process may grow while one server is fuzzed."""
MOST_LOGGED = 5 * 2**20
ROUNDS = pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
"""How many times twenty messages, or ten requests, are sent."""

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=30),
    st.binary(max_size=30),
    st.sampled_from([0, 1, -1, 2**31, 2**62, "", "a", b"", "x" * 10_000, b"x" * 10_000]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=8,
)
GOOD: dict[str, Any] = {
    "name": "a",
    "token": "t",
    "role": "observer",
    "protocol": samples.PROTOCOL,
    "fingerprint": "f" * 16,
    "item": 0,
    "lease": 0,
    "samples": [b"", b""],
    "version": 0,
    "oldest_kept": 0,
    "holding": [],
    "request": 1,
    "room": 1,
    "rank": 0,
    "world": 1,
    "known": [],
    "due": 0,
    "sets": {"s": {"figures": {"mean@1": 1.0}}},
    "servers": {"rollout-0": "started"},
    "wanted": 1,
    "least": 1,
    "most": 1,
    "reason": "it failed",
    "round": 1,
    "workers": 1,
    "backend": "gloo",
    "span_s": 0.1,
    "load_s": 0.1,
    "pause_s": 0.1,
    "verify_s": 0.1,
    "checksums": [1],
}


def half_valid(kinds: dict[str, type[Message]]) -> st.SearchStrategy[bytes]:
    """A message of one of the kinds with some fields drawn at random, or bytes made of one."""

    def message(kind: str) -> st.SearchStrategy[dict[str, Any]]:
        fields = list(kinds[kind].model_fields)
        right = {name: GOOD[name] for name in fields if name in GOOD}
        wrong = st.dictionaries(st.sampled_from(fields), VALUES, max_size=2) if fields else st.just({})
        more = st.dictionaries(st.text(max_size=5), VALUES, max_size=1)
        return st.builds(lambda some, other: {"kind": kind, "id": 1} | right | some | other, wrong, more)

    packed = st.sampled_from(sorted(kinds)).flatmap(message).map(lambda fields: bytes(msgpack.packb(fields, **TEXT)))
    cut = st.builds(lambda data, at: data[: at % (len(data) + 1)], packed, st.integers(0, 10_000))
    flipped = st.builds(flip, packed, st.integers(0, 10_000), st.integers(1, 255))
    return packed | cut | flipped | st.binary(max_size=200) | VALUES.map(msgpack.packb)


def flip(data: bytes, at: int, mask: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


@pytest.fixture
def measured(tmp_path: Path) -> Any:
    """Measures the process and its log over the test: the figures are printed, and may not exceed the bounds."""
    handler = logging.FileHandler(tmp_path / "log")
    handler.addFilter(FloodFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    before = psutil.Process().memory_info().rss
    yield
    root.removeHandler(handler)
    handler.close()
    grown, logged = psutil.Process().memory_info().rss - before, (tmp_path / "log").stat().st_size
    print(f"grown by {grown / 2**20:.1f} MiB, logged {logged / 2**10:.1f} KiB")
    assert grown < MOST_GROWN and logged < MOST_LOGGED


def drawn(strategy: st.SearchStrategy[Any], number: int) -> list[Any]:
    """Examples of a strategy, the same ones in each run."""
    found: list[Any] = []

    @settings(max_examples=number, deadline=None, database=None, derandomize=True)
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


@asynccontextmanager
async def raw_peer(
    address: str, name: str, role: Role = "rollout", server: Role = "buffer"
) -> AsyncIterator[zmq.asyncio.Socket]:
    """A DEALER with the key of `role` that sends whatever it is given, to the buffer's wire or the learner's."""
    with zmq.asyncio.Context() as context:
        socket = context.socket(zmq.DEALER)
        for option, value in {zmq.IDENTITY: name.encode(), zmq.LINGER: 0, zmq.RCVHWM: 10}.items():
            socket.setsockopt(option, value)
        unlock(socket, role, server).connect(address)
        try:
            yield socket
        finally:
            socket.close(0)


async def read_answers(peer: zmq.asyncio.Socket) -> None:
    while True:
        await peer.recv_multipart()


@in_loop
async def fuzz_samples_wire(messages: list[bytes]) -> None:
    requests = make_requests(eval_every=1)
    async with buffer(requests) as it, client(it.address, "o", "observer") as observer:
        for role, says_hello in itertools.product(ADMITTED["buffer"], (True, False)):
            async with raw_peer(it.address, f"raw-{role}-{says_hello}", role) as peer:
                if says_hello:
                    await peer.send(pack(1, hello(f"raw-{role}", role)))
                    await peer.recv()
                errors = (await observer.expect(Status(), State)).errors
                reading = asyncio.create_task(read_answers(peer))  # who reads nothing loses its connection
                for message in messages:
                    await peer.send_multipart([message] * (1 + (len(message) % 7 == 0)))
                wanted = len(messages) / 2
                if not says_hello:  # a connection may send 64 KiB before its Hello
                    wanted = min(wanted, 40)
                async with asyncio.timeout(60):
                    while (await observer.expect(Status(), State)).errors <= errors + wanted:
                        await asyncio.sleep(0.01)
                reading.cancel()
                await asyncio.wait([reading])


@ROUNDS
def test_the_samples_wire_survives_half_valid_messages(measured: None, rounds: int) -> None:
    fuzz_samples_wire(drawn(half_valid(samples.REQUESTS), 20 * rounds))


@ROUNDS
def test_the_weights_wire_survives_half_valid_messages(measured: None, rounds: int) -> None:
    messages = drawn(half_valid(weights.TO_LEARNER), 20 * rounds)

    async def fuzz() -> None:
        with a_sender() as sender:
            async with (
                raw_peer(sender.address, "raw", server="learner") as peer,
                servers(Addresses(sender.address), "rollout-0") as (one,),
            ):
                for message in messages:
                    await peer.send(message)
                members = sender._distributor.members
                await until(lambda: members._refused > len(messages) / 2)
                sender.publish(VersionedPolicy(3), 3)
                await asyncio.wait_for(one.has(3), 120)

    asyncio.run(fuzz())


HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Content-Length", "Transfer-Encoding", "Expect", "Host", "Origin", "Connection"]),
    st.sampled_from(
        ["", "0", "-1", "99999999999", "chunked", "100-continue", "localhost", "evil.example", "close", "\x7f"]
    ),
    max_size=3,
)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "2+2"}]}
BODIES = st.one_of(
    st.binary(max_size=200),
    VALUES.map(lambda value: json.dumps(value, default=repr).encode()),
    st.dictionaries(
        st.sampled_from(["messages", "tools", "stream", "max_tokens", "n", "stop"]), VALUES, max_size=3
    ).map(lambda some: json.dumps(CHAT | some, default=repr).encode()),
)


async def send_raw(port: int, method: str, path: str, headers: dict[str, str], body: bytes, cut_at: int) -> None:
    """Send a request as it is, or its beginning, and read what comes."""
    fields = {"Host": "localhost", "Content-Length": str(len(body)), "Connection": "close"} | headers
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"
    data = (head.encode() + body)[: cut_at or None]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(20):
            await reader.read(10_000)
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()


REQUESTS = st.tuples(HEADERS, BODIES, st.sampled_from([0, 0, 0, 5, 40, 90]))


@ROUNDS
@in_loop
async def test_the_door_survives_half_valid_requests(measured: None, rounds: int) -> None:
    requests = await asyncio.to_thread(drawn, REQUESTS, 10 * rounds)
    async with served() as (server, door, _):
        path = f"/e/{door.key}/v1/chat/completions"
        for headers, body, cut_at in requests:
            await send_raw(server._runner.addresses[0][1], "POST", path, headers, body, cut_at)
        async with aiohttp.ClientSession() as session, session.get(f"{door.url}/models") as response:
            assert response.status == 200


@ROUNDS
@in_loop
async def test_the_page_survives_half_valid_requests(tmp_path: Path, measured: None, rounds: int) -> None:
    requests = await asyncio.to_thread(drawn, REQUESTS, 10 * rounds)
    paths = ["/", "/data", "/samples", "/samples?batch=1", "/samples?batch=%00", "/metrics", "/events?after=x", "/none"]
    async with watching(make_config(tmp_path / "run")) as (session, _):
        port = session._base_url.port  # type: ignore[union-attr]
        assert port
        for number, (headers, body, cut_at) in enumerate(requests):
            await send_raw(port, ["GET", "POST"][number % 2], paths[number % 8], headers, body, cut_at or 300)
        async with session.get("/data") as response:
            assert response.status == 200


@ROUNDS
@in_loop
async def test_a_reward_server_survives_half_valid_requests(measured: None, rounds: int) -> None:
    """Its limits in front of an application, in vLLM's HTTP server with the options that it gets."""
    requests = await asyncio.to_thread(drawn, REQUESTS, 10 * rounds)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        limits = RequestLimits(echo, "127.0.0.1")
        head = {"h11_max_incomplete_event_size": HEAD_LIMITS["h11_max_incomplete_event_size"], "http": "h11"}
        server = uvicorn.Server(uvicorn.Config(limits, lifespan="off", log_level="warning", **head))  # type: ignore[arg-type]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        for headers, body, cut_at in requests:
            await send_raw(port, "POST", "/classify", headers, body, cut_at)
        async with aiohttp.ClientSession() as session, session.post(f"http://127.0.0.1:{port}/", data=b"abc") as answer:
            assert (answer.status, await answer.read()) == (200, b"3")
        assert limits.running == 0
        server.should_exit = True
        await serving
