"""The HTTP door of a rollout server: an OpenAI-compatible base URL per episode.

    POST /e/{key}/v1/chat/completions     JSON, or server-sent events with `stream: true`
    GET  /e/{key}/v1/models

A key has 128 random bits, and is dead (410) after its episode.
"""

import asyncio
import errno
import json
import logging
import re
import secrets
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from buffer.wire.awake import AwakeClock
from configs.http_limits import BODY_S, LimitedSite, add_headers, name_of, only_for, settings
from rollout.chat.requested import MODEL, Ignored, Requested, chunks, completion, error_body
from rollout.chat.session import Reply, Session
from rollout.errors import ChatRefused, EpisodeError

if TYPE_CHECKING:
    from configs.schema import ChatConfig

log = logging.getLogger(__name__)
MAX_BODY_MIB = 16
MOST_CONNECTIONS = 16_384
EARLY_S = 0.001
"""Timers may fire this early."""
SHUTDOWN_S = 1.0
KEY = re.compile(r"[0-9a-f]{32}")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Door:
    """One episode's entry, and the clock of its time outside of model calls.

    `over` gets an exception once the agent's result cannot matter: the engine failed, or `own_s` is used up (then
    `late`).
    """

    def __init__(
        self, session: Session, url: str, key: str, own_s: float, late: EpisodeError, clock: AwakeClock
    ) -> None:
        self.session, self.url, self.key, self.late, self.own_s = session, url, key, late, own_s
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: set[asyncio.Task[Reply]] = set()
        self.connections: set[asyncio.Transport] = set()
        self.ignored = 0
        self._loop, self._clock = asyncio.get_running_loop(), clock
        self._timer: asyncio.TimerHandle | None = None

    def on_worker(self, given: bool) -> None:
        """Start the agent's time when a worker gets it; stop when the worker loses it."""
        self.left_s = self.own_s
        if self._timer:
            self._timer.cancel()
        if given:
            self._run_clock()

    def _run_clock(self) -> None:
        self._since = self._clock.now()
        self._timer = self._loop.call_later(max(0.0, self.left_s), self._on_time)

    def _on_time(self) -> None:
        """A stop of this process does not count: the agent could not ask."""
        left_s = self.left_s - (self._clock.now() - self._since)
        if left_s > 0:
            self._timer = self._loop.call_later(left_s + EARLY_S, self._on_time)
        else:
            self.end(self.late)

    def _stop_clock(self) -> None:
        if self._timer is None:  # a call from elsewhere: no worker has the agent
            return
        self._timer.cancel()
        self.left_s -= self._clock.now() - self._since

    def start(self, chat: Coroutine[Any, Any, Reply]) -> asyncio.Task[Reply]:
        if not self.calls:
            self._stop_clock()
        call = self._loop.create_task(chat)
        self.calls.add(call)
        call.add_done_callback(self._on_done)
        return call

    def _on_done(self, call: asyncio.Task[Reply]) -> None:
        self.calls.remove(call)
        if self._timer and not self.calls and not self.over.done():
            self._run_clock()

    def end(self, error: BaseException) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()
        if not self.over.cancel() and not self.over.cancelled():
            self.over.exception()  # asyncio logs an exception that nobody retrieves
        self.session.close()
        for call in self.calls:
            call.cancel()
        for connection in self.connections:
            connection.abort()


class ChatServer:
    """An async context manager around the listening socket. Entering raises ValueError."""

    def __init__(self, config: "ChatConfig", temperature: float) -> None:
        self.config, self.ignored = config, Ignored(temperature)
        self._doors: dict[str, Door] = {}
        self._owners: dict[asyncio.Transport, Door] = {}
        """Whose request each connection carried last: a client may use one for several episodes."""
        self._clock = AwakeClock()
        known = [name_of(config.public_url)] if config.public_url else []
        app = web.Application(client_max_size=MAX_BODY_MIB * 2**20, middlewares=[only_for(config.host, known)])
        app.on_response_prepare.append(add_headers)
        app.router.add_post("/e/{key}/v1/chat/completions", self._complete)
        app.router.add_get("/e/{key}/v1/models", self._models)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, handle_signals=False, **settings()
        )

    async def __aenter__(self) -> "ChatServer":
        host, port = self.config.host, self.config.port
        await self._runner.setup()
        try:
            await LimitedSite(self._runner, host, port, MOST_CONNECTIONS).start()
        except OSError as error:
            await self._runner.cleanup()
            key, remedy = "port", "name another, or 0 for a free port"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                key, remedy = "host", "name an address of this machine"
            reason = f"{host} cannot listen on {port}: {error.strerror}; {remedy}"
            raise ValueError(f"rollout.chat.{key}: {reason}") from None
        self._ticking = asyncio.create_task(self._clock.tick())
        port = self._runner.addresses[0][1]
        self.url = self.config.public_url or f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if host not in LOOPBACK:
            log.warning(
                "agents reach this server at %s:%d from other machines, without encryption: whoever knows the key of "
                "an episode takes part in it until it ends",
                *(host, port),
            )
        return self

    async def __aexit__(self, *error: object) -> None:
        for door in list(self._doors.values()):
            self._close(door)
        self._ticking.cancel()
        await self._runner.cleanup()

    @contextmanager
    def admit(self, session: Session, own_s: float, late: EpisodeError) -> Iterator[Door]:
        key = secrets.token_hex(16)
        door = self._doors[key] = Door(session, f"{self.url.rstrip('/')}/e/{key}/v1", key, own_s, late, self._clock)
        try:
            yield door
        finally:
            self._close(door)

    def _close(self, door: Door) -> None:
        self._doors.pop(door.key, None)
        for connection in door.connections:
            del self._owners[connection]
        door.close()

    def _enter(self, request: web.Request) -> Door | web.Response:
        key, connection = request.match_info["key"], request.transport
        door = self._doors.get(key)
        if door is None:
            status, what = (410, "its episode has ended") if KEY.fullmatch(key) else (404, "no such key")
            return refusal(status, error_body(f"/e/{key[:32]}: {what}", "invalid_request_error", code="episode_ended"))
        if connection is not None and (owner := self._owners.get(connection)) is not door:
            if owner:
                owner.connections.discard(connection)
            self._owners[connection] = door
            door.connections.add(connection)
        return door

    async def _models(self, request: web.Request) -> web.StreamResponse:
        door = self._enter(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "headrace"}
        return web.json_response({"object": "list", "data": [model]}) if isinstance(door, Door) else door

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        door = self._enter(request)
        if isinstance(door, web.Response):
            return door
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
            requested = Requested.of(json.loads(body))
        except TimeoutError:
            return refusal(408, error_body(f"the body took longer than {BODY_S:g} s", "invalid_request_error"))
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, error_body(f"more than {MAX_BODY_MIB} MiB", "invalid_request_error"))
        except (ChatRefused, ValueError, RecursionError) as error:
            return refusal(400, refused_body(error))
        if request.match_info["key"] not in self._doors:
            return self._enter(request)  # type: ignore[return-value]  # it ended while the body arrived
        door.ignored += self.ignored.count(requested)
        repeated = request.headers.get("x-stainless-retry-count", "0") not in ("0", "")
        call = door.start(
            door.session.chat(requested.messages, requested.tools, max_tokens=requested.max_tokens, repeated=repeated)
        )
        try:
            await asyncio.wait({call})
            return await self._answer(request, requested, door, call)
        except BaseException:  # the client is gone, before or while it got its answer
            if not call.cancel() and not call.cancelled() and call.exception() is None:
                door.session.withdraw(call.result().turn)
            raise

    async def _answer(
        self, request: web.Request, requested: Requested, door: Door, call: asyncio.Task[Reply]
    ) -> web.StreamResponse:
        """Raises ConnectionError if the client is gone."""
        if call.cancelled():
            return refusal(410, error_body("the episode has ended", "invalid_request_error", code="episode_ended"))
        try:
            reply = call.result()
        except ChatRefused as error:
            return refusal(410 if error.code == "episode_ended" else 400, refused_body(error))
        except Exception as error:
            door.end(error)
            return refusal(503, error_body(f"the episode is over: {error}", "server_error"))
        return await (deliver_events if requested.stream else deliver)(request, requested, reply)


async def deliver(request: web.Request, requested: Requested, reply: Reply) -> web.StreamResponse:
    response = web.json_response(completion(requested, reply))
    await response.prepare(request)
    await response.write_eof()
    return response


async def deliver_events(request: web.Request, requested: Requested, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    events = [*map(json.dumps, chunks(requested, reply)), "[DONE]"]
    await response.write("".join(f"data: {event}\n\n" for event in events).encode())
    await response.write_eof()
    return response


def refused_body(error: Exception) -> dict[str, Any]:
    if isinstance(error, ChatRefused):
        limit, param = error.code.endswith("_exceeded"), getattr(error, "param", None)
        code = "context_length_exceeded" if limit else error.code  # the code that clients know
        return error_body(f"context length: {error}" if limit else str(error), "invalid_request_error", param, code)
    return error_body(f"the body is no JSON: {type(error).__name__}: {error}", "invalid_request_error")


def refusal(status: int, body: dict[str, Any]) -> web.Response:
    """Return an error that OpenAI's client does not retry."""
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})
