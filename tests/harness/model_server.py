"""A model server for tests: what it answers to each request is up to the test. An async context manager."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.harness.ports import free_port

Reply = Callable[[Any, int], tuple[int, Any]]
"""From the body of a request, JSON or bytes, and its number to status and JSON, text or bytes of the response."""


def says(text: str, finish: str = "stop") -> dict[str, Any]:
    """A chat completion."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


class ModelServer:
    """Answers every POST by `reply`, after `delay_s`, and GET /health. Keeps `requests`, each (path, headers, body).

    The first answer waits until `least_at_once` requests are there.
    """

    def __init__(
        self,
        reply: Reply,
        delay_s: float = 0.0,
        port: int | None = None,
        headers: dict[str, str] | None = None,
        least_at_once: int = 0,
    ) -> None:
        self.headers = headers
        self.reply, self.delay_s, self.port = reply, delay_s, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.at_once = self.most_at_once = 0
        self._least_at_once, self._enough = least_at_once, asyncio.Event()

    async def __aenter__(self) -> "ModelServer":
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await (request.json() if request.content_type == "application/json" else request.read())
        number = len(self.requests)
        self.requests.append((request.path, dict(request.headers), body))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self.at_once >= self._least_at_once:
            self._enough.set()
        try:
            await self._enough.wait()
            await asyncio.sleep(self.delay_s)
            status, answer = self.reply(body, number)
        finally:
            self.at_once -= 1
        if status == 0:  # the server is lost in the middle of a request
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(answer, bytes):
            return web.Response(status=status, body=answer, headers=self.headers)
        if isinstance(answer, str):
            return web.Response(status=status, text=answer, headers=self.headers)
        return web.json_response(answer, status=status, headers=self.headers)
