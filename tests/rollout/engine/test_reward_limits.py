"""A reward server's limits around an ASGI application, without vLLM."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from rollout.engine import reward_limits
from rollout.engine.reward_limits import RequestLimits


async def echo(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


async def ask(
    limits: RequestLimits, pieces: Iterable[bytes] = (b"body",), pause_s: float = 0.0, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the answer to one request."""
    waiting, sent = list(pieces), list[Any]()

    async def receive() -> Any:
        await asyncio.sleep(pause_s)
        piece = waiting.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    fields = {"host": "localhost"} | headers
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    await limits({"type": "http", "path": "/classify", "headers": named}, receive, send)
    return sent[0]["status"], sent[1]["body"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


async def test_a_request_is_served_with_headers_for_browsers():
    status, body, headers = await ask(RequestLimits(echo, "127.0.0.1"))
    assert (status, body) == (200, b"4")
    assert headers["x-content-type-options"] == "nosniff" and "frame-ancestors" in headers["content-security-policy"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "[::1]:5"}, 200),
        ({"content_length": str(10**12)}, 413),
        ({"content_length": "no number"}, 200),
    ],
)
async def test_pages_of_other_sites_and_large_bodies_are_refused(headers: dict[str, str], status: int):
    assert (await ask(RequestLimits(echo, "127.0.0.1"), **headers))[0] == status


async def test_a_server_beyond_loopback_has_many_names():
    assert (await ask(RequestLimits(echo, "0.0.0.0"), host="node-7"))[0] == 200


async def test_a_body_that_grows_too_long_or_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    limits = RequestLimits(echo, "127.0.0.1")
    monkeypatch.setattr(reward_limits, "MOST_BODY", 10)
    assert (await ask(limits, [b"123456"] * 3))[0] == 413
    monkeypatch.setattr(reward_limits, "BODY_S", 0.05)
    assert (await ask(limits, pause_s=5.0))[0] == 408
    assert limits.running == 0


async def test_further_requests_are_refused_while_many_are_served():
    limits = RequestLimits(echo, "127.0.0.1")
    limits.running = reward_limits.MOST_REQUESTS
    assert (await ask(limits))[0] == 503
