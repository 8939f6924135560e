"""HTTP servers of a run: connections, heads and bodies have limits, and browsers get headers that bind them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import web

from configs import http_limits
from configs.http_limits import (
    LimitedSite,
    add_headers,
    is_loopback_host,
    most_connections,
    name_of,
    only_for,
    settings,
)
from tests.harness.buffer_process import in_loop


@asynccontextmanager
async def served(host: str = "127.0.0.1", most: int = 50, others: tuple[str, ...] = ()) -> AsyncIterator[int]:
    """A server with one page, one text and one place for bodies; yields its port."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<p>", content_type="text/html")

    async def text(request: web.Request) -> web.Response:
        return web.json_response(len(await request.read()))

    app = web.Application(middlewares=[only_for(host, others)], client_max_size=1000)
    app.on_response_prepare.append(add_headers)
    app.add_routes([web.get("/", page), web.get("/text", text), web.post("/text", text)])
    runner = web.AppRunner(app, **settings())
    await runner.setup()
    try:
        await LimitedSite(runner, host, 0, most).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def answer(port: int, head: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode())
    try:
        async with asyncio.timeout(60):
            return await reader.read(2000)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@in_loop
async def test_responses_carry_headers_also_where_they_are_errors() -> None:
    async with served() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for path, policy in {"/": "frame-ancestors", "/text": "default-src 'none'", "/none": "default-src"}.items():
            async with session.get(path) as response:
                headers = response.headers
                assert headers["Content-Security-Policy"].startswith(policy)
                assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
                assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Frame-Options"] == "DENY"


@in_loop
async def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEADER_S", 0.2)
    async with served() as port:
        answers = await asyncio.gather(answer(port, ""), answer(port, "GET / HTTP/1.1\r\nHost: loc"))
        assert list(answers) == [b"", b""]


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return what came before the end. A server that closes with unread bytes before it sends a reset."""
    came = b""
    with suppress(ConnectionResetError):
        while some := await reader.read(1 << 16):
            came += some
    return came


@in_loop
async def test_a_head_that_comes_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second one of a connection."""
    monkeypatch.setattr(http_limits, "HEADER_S", 0.3)
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"1" * 200 + b"\r\n\r\n"
    async with served() as port:
        for first in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            end = asyncio.create_task(until_closed(reader))
            for byte in head:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if end.done():
                    break
            assert end.done() and end.result().count(b"HTTP/1.1 200") == len(first[:1])
            writer.close()


@in_loop
async def test_connections_beyond_the_limit_are_closed_and_those_before_go_on() -> None:
    async with served(most=16) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        assert await answer(port, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        held[0][1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await held[0][0].read(100)).startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.1)
        assert (await answer(port, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")).startswith(b"HTTP/1.1 200")


HEADS = {
    "another name": ("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
    "a name that begins like ours": ("GET / HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", b"403"),
    "half an address": ("GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", b"4"),
    "another site's page": ("GET / HTTP/1.1\r\nHost: localhost:99\r\nOrigin: http://evil.example\r\n\r\n", b"403"),
    "a page of no site": ("GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\n\r\n", b"403"),
    "its own page": ("GET / HTTP/1.1\r\nHost: LOCALHOST:99\r\nOrigin: http://localhost:99\r\n\r\n", b"200"),
    "IPv6": ("GET / HTTP/1.1\r\nHost: [::1]:99\r\n\r\n", b"200"),
    "the proxy's name": ("GET / HTTP/1.1\r\nHost: proxy.example:99\r\n\r\n", b"200"),
    "100 fields": ("GET / HTTP/1.1\r\nHost: localhost\r\n" + "A: 1\r\n" * 100 + "\r\n", b"400"),
    "a field of 10,000 bytes": ("GET / HTTP/1.1\r\nHost: localhost\r\nA: " + "1" * 10_000 + "\r\n\r\n", b"400"),
    "a line of 10,000 bytes": ("GET /" + "1" * 10_000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
    "a large body": ("POST /text HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n" + "1" * 9999, b"413"),
    "another version": ("GET / HTTP/9.9\r\n\r\n", b"400"),
    "no HTTP": ("\x00\x01\x02\r\n\r\n", b"400"),
}


@pytest.mark.parametrize("what", HEADS)
@in_loop
async def test_what_is_not_meant_for_it_is_refused(what: str) -> None:
    head, status = HEADS[what]
    async with served(others=("proxy.example",)) as port:
        assert (await answer(port, head))[9:12].startswith(status)


def test_names_and_numbers() -> None:
    assert name_of("http://A.example:80/x") == "a.example" and name_of("null") == "" and name_of("//[::1]:5") == "::1"
    assert name_of("//[::1") == ""
    assert is_loopback_host("127.3.2.1") and not is_loopback_host("10.0.0.1") and not is_loopback_host("")
    assert 16 <= most_connections(10**9) < 10**9
