"""Who may ask the buffer what: each role's key with each request, on real sockets of both kinds; no key, foreign keys,
and a key with the messages of another role."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from buffer.curve import LOCAL, endpoint, identify
from buffer.keys import ClientKeys
from buffer.wire import protocol
from buffer.wire.message import Message, pack, unpack
from buffer.wire.protocol import ANSWERS, PROTOCOL, REQUESTS, NotRegistered, Refused, State, Status, Welcome
from buffer.wire.requests import VERBS, refusal, table
from tests.harness.buffer_process import buffer, client, in_loop, rollout, sample
from tests.harness.keys import client_keys, foreign_keys

ADDRESSES = ("tcp://127.0.0.1:*", LOCAL)
FINGERPRINT = "f" * 16
EXAMPLES: dict[str, Message] = {
    one.__class__.__name__: one
    for one in (
        protocol.Where(), protocol.Ask(request=1, version=0, room=1), protocol.Goodbye(), protocol.Rewind(version=0),
        protocol.Put(item=0, lease=0, samples=[sample(reward=1e6).pack(), sample().pack()]),
        protocol.Fail(item=0, lease=0, reason="no"), protocol.Heartbeat(version=0, holding=[]), protocol.Status(),
        protocol.Evaluate(version=0), protocol.Evaluated(due=0, version=0, sets={}), protocol.Results(known=[]),
        protocol.Take(version=0, rank=0, world=1), protocol.Trained(version=0, oldest_kept=0),
        protocol.Quarantine(item=0, reason="no"), protocol.Trial(version=0, item=None),
        protocol.Scale(servers=2), protocol.Kept(servers={}, wanted=1, least=1, most=2),
    )
}  # fmt: skip
SPOKEN = ("rollout", "learner", "launcher", "observer")
"""Roles that a Hello may say."""


def hello(role: str, name: str = "", serves: str | None = None) -> protocol.Hello:
    fields: dict[str, Any] = {"name": name or f"{role}-0", "token": f"{role}{name}", "role": role, "serves": serves}
    return protocol.Hello(**fields, protocol=PROTOCOL, fingerprint=FINGERPRINT)


class Speaker:
    """A bare socket that shows `keys` and sends what a test wants."""

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: ClientKeys | None) -> None:
        self.socket, self.numbers = context.socket(zmq.DEALER), count(1)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys:
            identify(self.socket, keys, address)
        self.monitor = self.socket.get_monitor_socket()
        self.socket.connect(endpoint(address, client_keys().folder))

    async def answers(self, *messages: Message) -> list[Message]:
        """The answers to `messages` and to a Status after them; a parked message has none."""
        numbers = [next(self.numbers) for _ in (*messages, None)]
        for number, message in zip(numbers, (*messages, Status()), strict=True):
            await self.socket.send(pack(number, message))
        found: dict[int, Message] = {}
        while numbers[-1] not in found:
            first, *large = await asyncio.wait_for(self.socket.recv_multipart(), 60)
            number, answer = unpack(first, ANSWERS, large)
            found[number] = answer
        return [found[number] for number in numbers if number in found]

    async def event(self, kinds: int) -> int:
        """The next event of these kinds that libzmq has for the connection."""
        while True:
            event = await asyncio.wait_for(recv_monitor_message(self.monitor), 60)
            if event["event"] & kinds:
                return int(event["event"])


@asynccontextmanager
async def speaker(address: str, keys: ClientKeys | None) -> AsyncIterator[Speaker]:
    context = zmq.asyncio.Context()
    try:
        yield Speaker(context, address, keys)
    finally:
        context.destroy(0)


def test_every_request_has_a_role_and_an_example() -> None:
    assert {verb for verbs in VERBS.values() for verb in verbs} == REQUESTS.keys() == {*EXAMPLES, "Hello"}


@pytest.mark.parametrize("role", SPOKEN)
@pytest.mark.parametrize("address", ADDRESSES)
@in_loop
async def test_a_key_opens_the_requests_of_its_role_and_no_others(address: str, role: Any) -> None:
    async with buffer(address=address) as it, speaker(it.address, client_keys(role)) as one:
        for verb, message in EXAMPLES.items():
            welcome, *rest = await one.answers(hello(role), message)
            assert isinstance(welcome, Welcome)
            reasons = [answer.reason for answer in rest if isinstance(answer, Refused)]
            refused = any(f"{verb} is a request of" in reason for reason in reasons)
            assert refused is (verb not in VERBS[role]), (verb, rest)
        ledger = it.requests.handlers.ledger
        if role != "learner":
            assert ledger.state.last_trained == -1 and it.requests.handlers.peers.weights is None
        assert ledger.view.counts()["stored"] == 0


@pytest.mark.parametrize("said", SPOKEN)
@pytest.mark.parametrize("role", SPOKEN)
@in_loop
async def test_a_hello_takes_the_role_of_its_key_or_an_observers(role: Any, said: str) -> None:
    async with buffer() as it, speaker(it.address, client_keys(role)) as one:
        answer, *rest = await one.answers(hello(said))
        if said in (role, "observer"):
            assert isinstance(answer, Welcome) and isinstance(rest[-1], State)
        else:
            assert isinstance(answer, Refused) and f"says Hello as {said} with the key of {role}" in answer.reason
            assert rest == [NotRegistered()] and FINGERPRINT not in answer.reason
        if said == "observer":  # whatever its key, it asks no more than an observer
            *_, refused, _ = await one.answers(EXAMPLES["Take" if role == "learner" else "Ask"])
            assert isinstance(refused, Refused) and "this connection is of" in refused.reason


@pytest.mark.parametrize("role", ["rollout", "launcher", "observer"])
@in_loop
async def test_only_the_learner_says_where_weights_come_from(role: Any) -> None:
    rogue = "tcp://127.0.0.1:6666"
    async with buffer() as it, speaker(it.address, client_keys(role)) as one, rollout(it.address, "r") as server:
        for said in SPOKEN:
            answer, *_ = await one.answers(hello(said, serves=rogue))
            assert isinstance(answer, Refused), said
        async with client(it.address, "learner-0", "learner", serves="tcp://127.0.0.1:7777"):
            assert await server.where(None) == "tcp://127.0.0.1:7777"
    async with buffer() as it, speaker(it.address, client_keys("learner")) as one:
        answer, *_ = await one.answers(hello("observer", serves=rogue))
        assert isinstance(answer, Refused) and it.requests.handlers.peers.weights is None


@in_loop
async def test_an_observer_can_neither_train_nor_replace_the_learner() -> None:
    """It asked, put a reward of a million, took and pruned the batch; then the learner was refused for ever."""
    async with buffer() as it, client(it.address, "learner-0", "learner") as learner:
        async with speaker(it.address, client_keys("observer")) as rogue:
            attempts = [hello("learner", "learner-0"), hello("rollout"), hello("observer"), *EXAMPLES.values()]
            answers = await rogue.answers(*attempts)
            kinds = [type(answer).__name__ for answer in answers]
            assert kinds.count("Welcome") == 1 and kinds.count("State") == 2 and set(kinds) == {
                "Welcome", "State", "Refused"
            }  # fmt: skip
        state = await learner.expect(Status(), State)
        assert (state.version, state.trained, state.counts["leased"]) == (0, -1, 0)
        assert state.errors == len(answers) - 3 and state.wanted_servers is None


FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
STRANGERS = {
    "no key": lambda: None,
    "a key of another run": foreign_keys,
    "a key of the buffer's": lambda: client_keys("buffer"),
    "a role that does not exist": lambda: ClientKeys(client_keys().folder, "root", *zmq.curve_keypair(), b"t" * 40),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize("address", ADDRESSES)
@in_loop
async def test_strangers_fail_in_the_handshake_and_are_never_read(address: str, who: str) -> None:
    async with buffer(address=address) as it, speaker(it.address, STRANGERS[who]()) as stranger:
        sending = asyncio.ensure_future(stranger.socket.send(pack(1, hello("observer"))))  # waits for a connection
        assert await stranger.event(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED) & FAILED
        sending.cancel()
        async with client(it.address, "o", "observer") as observer:
            assert (await observer.expect(Status(), State)).errors == 0
        assert [peer.hello.name for peer in it.requests.handlers.peers.known.values()] == ["o"]


def test_a_connection_without_a_known_role_may_say_hello_to_nobody() -> None:
    for message in (*map(hello, SPOKEN), *EXAMPLES.values()):
        assert refusal("anonymous", None, message)


def test_the_page_shows_the_table() -> None:
    page = Path("docs/design/samples-wire.md").read_text(encoding="utf-8")
    shown = re.search(r"## Roles\n.*?\n(\|.*?)\n\n", page, re.S)
    assert shown and shown[1].splitlines() == table()
