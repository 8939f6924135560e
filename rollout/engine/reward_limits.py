"""Limits requests to a reward server: number, size, time, names and pages."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from configs.http_limits import BODY_S, HEADERS, POLICY, is_loopback_host, name_of

MOST_REQUESTS, MOST_BODY = 4096, 64 * 2**20
HEAD_LIMITS = {"h11_max_incomplete_event_size": 2**16, "h11_max_header_count": 64}
"""Bytes and fields of a request's head."""
ADDED = [
    (name.lower().encode(), value.encode()) for name, value in (HEADERS | {"Content-Security-Policy": POLICY}).items()
]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


class RequestLimits:
    """Limits requests; on a loopback `host` they must name this machine."""

    def __init__(self, app: App, host: str) -> None:
        self.app, self.host = app, host
        self.running = 0

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        reason = self._refusal(scope)
        if reason:
            return await refuse(send, *reason)
        self.running += 1
        answer = MarkedResponse(send)
        try:
            await self.app(scope, LimitedBody(receive).receive, answer.send)
        except BodyRefused as error:
            if not answer.begun:
                await refuse(send, error.status, str(error))
        finally:
            self.running -= 1

    def _refusal(self, scope: dict[str, Any]) -> tuple[int, str] | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        name = name_of(f"//{headers.get('host', '')}")
        if is_loopback_host(self.host) and name and not is_loopback_host(name):
            return 403, f"ask for http://localhost, not for {name[:200]}"
        if "origin" in headers and name_of(headers["origin"]) != name:
            return 403, "a page of another site may not ask for this"
        if self.running >= MOST_REQUESTS:
            return 503, f"{MOST_REQUESTS} requests are being served already"
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > MOST_BODY:
            return 413, f"more than {MOST_BODY >> 20} MiB"
        return None


class BodyRefused(Exception):
    """A body is too long, or takes too long."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class LimitedBody:
    """A request's body as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._size, self._whole = receive, 0, False
        self._until = asyncio.get_running_loop().time() + BODY_S

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise BodyRefused(408, f"the body took longer than {BODY_S:g} s") from None
        self._size += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._size > MOST_BODY:
            raise BodyRefused(413, f"more than {MOST_BODY >> 20} MiB")
        return message


class MarkedResponse:
    """Adds headers for browsers."""

    def __init__(self, send: Send) -> None:
        self._send, self.begun = send, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            message = {**message, "headers": [*message.get("headers", []), *ADDED]}
        await self._send(message)


async def refuse(send: Send, status: int, reason: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *ADDED]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})
