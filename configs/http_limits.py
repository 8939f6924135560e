"""Limits and headers of the HTTP servers."""

import asyncio
import resource
from collections.abc import Awaitable, Callable, Collection
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

HEADER_S = 75.0
"""A gateway keeps an idle connection for a shorter time."""
BODY_S = 60.0
MOST_FIELDS = 64
"""Each has at most 8190 bytes."""
SHARE_OF_FILES = 0.5
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
PAGE_POLICY = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""A page names its scripts in its own policy; browsers obey both."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def settings() -> dict[str, Any]:
    """Keywords of `web.AppRunner`."""
    return {"access_log": None, "keepalive_timeout": HEADER_S, "max_headers": MOST_FIELDS, "lingering_time": 5.0}


def most_connections(most: int) -> int:
    """`most`, or fewer if the process may have few files open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(16, min(most, int(SHARE_OF_FILES * soft)))


class LimitedSite(web.BaseSite):
    """Closes connections beyond `most` at once."""

    def __init__(self, runner: web.BaseRunner, host: str, port: int, most: int) -> None:
        super().__init__(runner)
        self._host, self._port, self._most = host, port, most_connections(most)

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert isinstance(server, web.Server)

        def connect() -> asyncio.BaseProtocol:
            return server() if len(server.connections) < self._most else Refusal()

        self._server = await asyncio.get_running_loop().create_server(connect, self._host, self._port, backlog=128)


class Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal for `app.on_response_prepare`: headers that keep browsers from misusing a response."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")
    is_page = response.content_type == "text/html"
    response.headers.setdefault("Content-Security-Policy", PAGE_POLICY if is_page else POLICY)


def only_for(host: str, others: Collection[str] = ()) -> Any:
    """Refuse requests of another site's page. On loopback, also refuse names other than this machine's or `others`: a
    site may have made its name mean this machine."""
    allowed = {other.lower() for other in others}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = name_of(f"//{request.host}")
        if is_loopback_host(host) and not (is_loopback_host(name) or name in allowed):
            raise web.HTTPForbidden(text=f"open it as http://localhost, not as {request.host[:200]}; or give --host")
        origin = request.headers.get("Origin")
        if origin is not None and name_of(origin) != name:
            raise web.HTTPForbidden(text=f"a page of {origin[:200]} may not ask for this")
        return await handler(request)

    return check


def name_of(url: str) -> str:
    """The host of a URL in lower case, without port and brackets; "" where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback_host(host: str) -> bool:
    name = host.strip("[]")
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
