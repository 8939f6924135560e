"""A reward server's connections over real sockets: half a head is cut off in time, and there are not too many."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from rollout.engine import http_connection
from rollout.engine.http_connection import limit_connections
from tests.rollout.engine.test_reward_limits import echo

HEAD = b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(http_connection.HTTP_PROTOCOLS, "auto", "")
    monkeypatch.setattr(http_connection, "HEAD_S", 0.3)
    limit_connections()


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """A server as vLLM starts it; its port."""
    config = uvicorn.Config(echo, port=0, lifespan="off", log_config=None, timeout_keep_alive=1)
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await server.shutdown()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the connection is closed."""
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("begun", [b"", HEAD[:30], HEAD[:-2]], ids=["nothing", "a line", "all but the end"])
async def test_half_a_head_is_cut_off(begun: bytes) -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        assert await ended(reader) == b""
        writer.close()


async def test_a_head_that_comes_byte_by_byte_is_cut_off() -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        end = asyncio.create_task(ended(reader))
        for byte in HEAD:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
            if end.done():
                break
        assert end.done() and end.result() == b""
        writer.close()


async def test_a_head_of_many_bytes_is_refused() -> None:
    """httptools, which uvicorn would choose, takes any number."""
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD[:-2] + b"A: " + b"1" * 100_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_the_second_head_of_a_connection_has_its_time_too() -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"body")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.4)
        writer.write(HEAD + b"body" + HEAD[:20])
        rest = await ended(reader)
        assert rest.count(b"HTTP/1.1 200") == 1, "an idle connection has more time than a head"
        writer.close()


async def test_a_body_may_take_longer_than_a_head() -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        await asyncio.sleep(0.5)
        writer.write(b"body")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_thousand_open_connections_keep_out_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MOST_CONNECTIONS", 100)
    async with served() as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        closed = [await ended(reader) for reader, _ in opened[100:]]
        assert closed == [b""] * 200, "at once"
        await asyncio.gather(*(ended(reader) for reader, _ in opened[:100]))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"body")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, open_writer in [*opened, (reader, writer)]:
            open_writer.close()
