"""The HTTP door as agents see it: OpenAI's client, and clients that misbehave, on real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvloop

from configs import http_limits
from rollout.cage import CagedError
from rollout.chat import door as door_module
from rollout.chat.door import ChatServer, Door
from rollout.chat.session import Reply
from rollout.errors import ChatRefused, EngineDead, EngineError
from tests.harness.pace import paced

HELLO = [{"role": "user", "content": "2+2"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


class FakeSession:
    """Stands for `Session`: answers with `reply`, raises it, or waits for `gate`."""

    def __init__(self, reply: Any = None) -> None:
        self.reply = reply or {"role": "assistant", "content": "4", "reasoning": "sum", "reasoning_content": "sum"}
        self.calls: list[tuple[Any, Any, int | None, bool]] = []
        self.withdrawn: list[Any] = []
        self.gate, self.called, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.cancelled = 0
        self.closed = False

    async def chat(
        self, messages: Any, tools: Any = None, *, max_tokens: int | None = None, repeated: bool = False
    ) -> Reply:
        self.calls.append((messages, tools, max_tokens, repeated))
        self.called.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.left.set()
            raise
        if isinstance(self.reply, Exception):
            raise self.reply
        finish = "tool_calls" if self.reply.get("tool_calls") else "stop"
        return Reply(self.reply, finish, 7, 3, len(self.calls))

    def withdraw(self, turn: Any) -> None:
        self.withdrawn.append(turn)
        self.left.set()

    def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def served(
    session: Any = None, own_s: float = 30.0, **config: Any
) -> AsyncIterator[tuple[ChatServer, Door, FakeSession]]:
    session = session or FakeSession()
    keys = {"host": "127.0.0.1", "port": 0, "public_url": None} | config
    async with ChatServer(SimpleNamespace(**keys), 0.7) as server:
        with server.admit(session, own_s, CagedError("the agent took too long", "timed_out")) as door:
            yield server, door, session


def client_of(door: Door, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=door.url, api_key=door.key, **({"max_retries": 0} | options))


async def post(door: Door, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as client:
        return await client.post(f"{door.url}/chat/completions", json={"model": "any", "messages": HELLO} | body)


async def test_openai_s_client_gets_an_answer_as_json_and_as_a_stream():
    async with served() as (_, door, session), client_of(door) as client:
        answer = await client.chat.completions.create(model="gpt", messages=HELLO, max_completion_tokens=5)
        stream = await client.chat.completions.create(
            model="gpt", messages=HELLO, stream=True, stream_options={"include_usage": True}, max_tokens=9
        )
        chunks = [chunk async for chunk in stream]
        assert [model.id async for model in client.models.list()] == ["policy"]
    assert answer.choices[0].message.content == "4" and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.model_extra["reasoning"] == "sum"
    assert answer.usage.prompt_tokens == 7 and answer.usage.completion_tokens == 3 and answer.usage.total_tokens == 10
    assert [choice.delta.content for chunk in chunks for choice in chunk.choices] == ["4", None]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 10
    assert session.calls == [(HELLO, None, 5, False), (HELLO, None, 9, False)] and session.withdrawn == []


async def test_tool_calls_come_whole_through_both():
    async with (
        served(FakeSession({"role": "assistant", "content": None, "tool_calls": [CALL, CALL]})) as (
            _,
            door,
            got,
        ),
        client_of(door) as client,
    ):
        answer = await client.chat.completions.create(model="gpt", messages=HELLO, tools=[TOOL])
        async with client.chat.completions.stream(model="gpt", messages=HELLO, tools=[TOOL]) as stream:
            streamed = await stream.get_final_completion()
    for completion in (answer, streamed):
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a": 2}'] * 2
        assert choice.message.tool_calls[0].id == "call_1"
    assert [tools for _, tools, _, _ in got.calls] == [[TOOL], [TOOL]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"stop": ["\n"]}, "stop"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"messages": "hello"}, "messages"),
        ({"tools": {"a": 1}}, "tools"),
    ],
)
async def test_what_would_change_the_distribution_is_refused_by_name(body: dict[str, Any], param: str):
    async with served() as (_, door, session):
        response = await post(door, **body)
    assert response.status_code == 400 and session.calls == []
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: ")
    assert error["type"] == "invalid_request_error"


async def test_what_asks_for_nothing_is_no_refusal():
    asked = {"n": 1, "response_format": {"type": "text"}, "stop": None, "logit_bias": {}, "tools": [], "stream": False}
    async with served() as (_, door, session):
        response = await post(door, **asked, temperature=0.7, top_p=1, presence_penalty=0, user="me", metadata={})
        assert response.status_code == 200 and door.ignored == 0
        assert (await post(door, max_tokens=9, max_completion_tokens=4)).status_code == 200
    assert session.calls == [(HELLO, None, None, False), (HELLO, None, 4, False)]


async def test_other_sampling_is_ignored_counted_and_logged_once(caplog: pytest.LogCaptureFixture):
    async with served() as (server, door, session):
        for _ in range(3):
            assert (await post(door, temperature=0, top_p=0.5, tools=[TOOL], tool_choice="required")).status_code == 200
        assert (await post(door, tools=[TOOL], tool_choice="none")).status_code == 200
        assert door.ignored == 3 and server.ignored.counts == {"temperature": 3, "top_p": 3, "tool_choice": 3}
    assert [line.split(" asks for ")[1].split(",")[0] for line in caplog.messages if " asks for " in line] == [
        "temperature 0",
        "top_p 0.5",
        "tool_choice 'required'",
    ]
    assert [tools for _, tools, _, _ in session.calls] == [[TOOL]] * 3 + [None]


@pytest.mark.parametrize("code", ["context_length_exceeded", "turns_exceeded", "time_exceeded"])
async def test_a_limit_of_the_run_is_the_error_that_agents_know(code: str):
    async with served(FakeSession(ChatRefused("64 turns", code))) as (_, door, _), client_of(door) as client:
        with pytest.raises(openai.BadRequestError, match="context length: 64 turns") as caught:
            await client.chat.completions.create(model="gpt", messages=HELLO)
        assert caught.value.code == "context_length_exceeded" and not door.over.done()


@pytest.mark.parametrize("error", [EngineError("vLLM failed"), EngineDead("vLLM died"), TypeError("a bug of ours")])
async def test_the_engine_s_failure_ends_the_episode_at_once(error: Exception):
    async with served(FakeSession(error)) as (_, door, session), client_of(door, max_retries=5) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="gpt", messages=HELLO)
        assert caught.value.status_code == 503 and len(session.calls) == 1
        with pytest.raises(type(error)):
            await asyncio.wait_for(door.over, 120)


async def test_a_key_is_random_and_dead_after_its_episode():
    async with served() as (server, door, _):
        with server.admit(FakeSession(), 9.0, CagedError("late", "timed_out")) as other:
            assert len(other.key) == 32 and other.key != door.key
        assert (await post(other)).status_code == 410
        async with httpx.AsyncClient(timeout=120) as client:
            assert (await client.get(f"{other.url}/models")).status_code == 410
            assert (await client.get(f"{server.url}/e/../../etc/passwd")).status_code == 404
            assert (await client.get(f"{server.url}/e/short/v1/models")).status_code == 404
        assert (await post(door)).status_code == 200


async def test_several_requests_of_an_episode_run_at_once():
    async with served() as (_, door, session):
        session.gate.clear()
        posts = [asyncio.create_task(post(door)) for _ in range(8)]
        async with asyncio.timeout(120):
            while len(session.calls) < 8:
                session.called.clear()
                await session.called.wait()
        session.gate.set()
        assert [response.status_code for response in await asyncio.gather(*posts)] == [200] * 8


async def test_a_client_that_leaves_before_its_answer_stops_the_call():
    async with served() as (_, door, session):
        session.gate.clear()
        posting = asyncio.create_task(post(door))
        await asyncio.wait_for(session.called.wait(), 120)
        posting.cancel()
        await asyncio.wait_for(session.left.wait(), 120)
        assert session.cancelled == 1 and session.withdrawn == []


async def test_a_client_that_leaves_as_the_answer_is_sent_withdraws_it():
    """The last byte of the request and the end of the connection come together: the answer has nowhere to go."""

    class Instant(FakeSession):
        def __init__(self) -> None:
            super().__init__()
            self.transport: Any = None

        async def chat(self, *args: Any, **options: Any) -> Reply:
            reply = await super().chat(*args, **options)
            (connection,) = self.door.connections
            connection.abort()  # as if the client's reset arrived at this moment
            return reply

    async with served(Instant()) as (_, door, session):
        session.door = door
        with pytest.raises(httpx.HTTPError):
            await post(door)
        await asyncio.wait_for(session.left.wait(), 120)
        assert session.withdrawn == [1]


async def test_openai_s_own_retry_is_told():
    async with served() as (_, door, session), httpx.AsyncClient(timeout=120) as client:
        for count in ("0", "2"):
            body = {"messages": HELLO}
            await client.post(f"{door.url}/chat/completions", json=body, headers={"x-stainless-retry-count": count})
    assert [repeated for _, _, _, repeated in session.calls] == [False, True]


async def test_the_clock_stands_during_model_calls_only():
    own_s = paced(1.0)
    async with served(own_s=own_s) as (_, door, session):
        door.on_worker(True)
        session.gate.clear()
        posting = asyncio.create_task(post(door))
        await asyncio.wait_for(session.called.wait(), 120)
        await asyncio.sleep(1.2 * own_s)
        assert not door.over.done()
        session.gate.set()
        assert (await posting).status_code == 200
        with pytest.raises(CagedError, match="the agent took too long"):
            await asyncio.wait_for(door.over, 120)


async def test_the_clock_runs_while_a_worker_has_the_agent():
    own_s = paced(0.8)
    async with served(own_s=own_s) as (_, door, _):
        await asyncio.sleep(1.2 * own_s)
        door.on_worker(True)
        await asyncio.sleep(0.1)
        door.on_worker(False)
        await asyncio.sleep(1.2 * own_s)
        door.on_worker(True)
        await asyncio.sleep(0.1)
        assert not door.over.done()
        with pytest.raises(CagedError, match="the agent took too long"):
            await asyncio.wait_for(door.over, 120)


async def test_a_closed_door_ends_calls_and_connections():
    session = FakeSession()
    session.gate.clear()
    async with served() as (server, _, _):
        with server.admit(session, 9.0, CagedError("late", "timed_out")) as door:
            posting = asyncio.create_task(post(door))
            await asyncio.wait_for(session.called.wait(), 120)
            idle = httpx.AsyncClient(timeout=120)
            assert (await idle.get(f"{door.url}/models")).status_code == 200
        with pytest.raises(httpx.HTTPError):
            await asyncio.wait_for(posting, 120)
        assert session.closed and session.cancelled == 1
        assert (await idle.get(f"{door.url}/models")).status_code == 410  # over a new connection
        await idle.aclose()


async def test_a_connection_that_serves_another_episode_now_stays_open():
    async with served() as (server, door, _), httpx.AsyncClient(timeout=120) as shared:
        with server.admit(FakeSession(), 9.0, CagedError("late", "timed_out")) as first:
            assert (await shared.get(f"{first.url}/models")).status_code == 200
            (connection,) = first.connections
            assert (await shared.get(f"{door.url}/models")).status_code == 200
            assert first.connections == set() and door.connections == {connection}
        assert not connection.is_closing()
    assert connection.is_closing()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\xffgarbage\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"DELETE /e/%s/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
    ],
)
async def test_garbage_is_answered_and_harms_nobody(data: bytes, status: bytes):
    async with served() as (server, door, _):
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data.replace(b"%s", door.key.encode()))
        assert status in await asyncio.wait_for(reader.readline(), 120)
        writer.close()
        assert (await post(door)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no json", 400),
        (b"[" * 10**6, 400),
        (b'{"messages": [', 400),
        (b"\xff\xfe", 400),
        (b'"' + b"x" * (17 * 2**20) + b'"', 413),
    ],
)
async def test_bad_bodies_are_refused(body: bytes, status: int):
    async with served() as (_, door, session), httpx.AsyncClient(timeout=120) as client:
        response = await client.post(f"{door.url}/chat/completions", content=body)
        assert response.status_code == status and "error" in response.json() and session.calls == []


async def test_connections_heads_and_bodies_have_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(door_module, "MOST_CONNECTIONS", 16)
    monkeypatch.setattr(door_module, "BODY_S", 0.3)
    monkeypatch.setattr(http_limits, "HEADER_S", 0.3)
    async with served() as (server, door, session):
        port, key = server._runner.addresses[0][1], door.key.encode()
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(17)]
        slow = b"POST /e/%s/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{" % key
        held[0][1].write(slow)
        for _, writer in held[1:16]:
            writer.write(b"GET / HTTP/1.1\r\n")
        held[16][1].write(b"GET /e/%s/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" % key)
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                assert await held[16][0].read() == b"", "one more is closed at once"
            assert (await held[0][0].readline()).startswith(b"HTTP/1.1 408"), "the body took longer"
            assert [await reader.read() for reader, _ in held[1:16]] == [b""] * 15, "half a head is cut off"
        for _, writer in held:
            writer.close()
        assert (await post(door)).status_code == 200 and len(session.calls) == 1


async def test_an_address_in_use_is_refused_in_one_line():
    async with served() as (server, _, _):
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(
            ValueError, match=rf"rollout.chat.port: 127.0.0.1 cannot listen on {port}: .*; name another"
        ):
            async with served(port=port):
                pass


async def test_others_are_told_the_public_url_and_the_log_warns(caplog: pytest.LogCaptureFixture):
    async with served(host="0.0.0.0", public_url="https://gateway/run/") as (_, door, _):
        assert door.url == f"https://gateway/run/e/{door.key}/v1"
    assert any("from other machines" in line for line in caplog.messages)


def test_it_all_works_on_uvloop():
    """The loop that a rollout server has."""

    async def play() -> None:
        async with served() as (_, door, session), client_of(door) as client:
            session.gate.clear()
            posting = asyncio.create_task(post(door))
            await asyncio.wait_for(session.called.wait(), 120)
            posting.cancel()
            await asyncio.wait_for(session.left.wait(), 120)
            session.gate.set()
            stream = await client.chat.completions.create(model="gpt", messages=HELLO, stream=True)
            assert [chunk.choices[0].delta.content async for chunk in stream] == ["4", None]

    uvloop.run(play())


async def test_a_stop_of_the_server_is_no_time_of_the_agent():
    own_s = paced(0.6)
    async with served(own_s=own_s) as (_, door, _session):
        door.on_worker(True)
        await asyncio.sleep(0.1)
        time.sleep(own_s + 0.9)  # the whole process stands still
        await asyncio.sleep(0.1)
        assert not door.over.done()
        with pytest.raises(CagedError, match="the agent took too long"):
            await asyncio.wait_for(door.over, 120)


async def test_a_page_of_another_site_and_another_name_are_refused():
    async with served() as (_, door, session), httpx.AsyncClient(timeout=120) as client:
        body = {"model": "any", "messages": HELLO}
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            answer = await client.post(f"{door.url}/chat/completions", json=body, headers=headers)
            assert answer.status_code == 403 and not session.calls
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    async with (
        served(public_url="http://proxy.example:80") as (server, door, session),
        httpx.AsyncClient(timeout=120) as client,
    ):
        local = f"http://127.0.0.1:{server._runner.addresses[0][1]}/e/{door.key}/v1/chat/completions"
        answer = await client.post(local, json=body, headers={"Host": "proxy.example"})
        assert answer.status_code == 200, answer.text
