"""Calls of a model server over HTTP, for rewards and teachers.

Temporary failures (no connection, timeout, status 429 or 5xx) are tried again with growing waits; any other one, and
the last, is a RewardError.
"""

import asyncio
import json
import os
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, field_validator

from configs.schema import Seconds, Section
from configs.variables import is_http, proxy_of
from rollout.errors import RewardError
from rollout.templates.renderer import Renderer, RenderError

if TYPE_CHECKING:
    import aiohttp

FIRST_WAIT_S, MOST_WAIT_S = 0.5, 16.0
IDLE_S = 4.0
"""vLLM's server closes an idle connection after 5 s, which must not hit a request."""
BODY_CHARS = 300
PASSING = {408, 409, 425, 429}


class ServersAway(RewardError):
    """No server takes a connection, or a connection was lost."""


class ServerFailed(ServersAway):
    """A server answers with status 500. vLLM's does so for some seconds between its engine's end and its own."""


class HttpModel(Section):
    """A model server, or several of the same model."""

    url: str | Annotated[list[str], Field(min_length=1)]
    """Address, such as `http://127.0.0.1:8000`; of several, each call takes the next."""
    model: str | None = None
    timeout_s: Seconds | None = None
    """Time of one request, which is then tried again; null: only `reward.timeout_s` limits the whole call."""
    retries: Annotated[int, Field(ge=0)] = 4
    """Tries again after 0.5, 1, 2 ... 16 s, or what the server asks for."""
    api_key_env: str | None = None
    """Name of the environment variable with the API key; null: none."""
    _session: "aiohttp.ClientSession | None" = PrivateAttr(None)
    _turn: "count[int]" = PrivateAttr(default_factory=lambda: count(random.randrange(2**16)))
    _own: bool = PrivateAttr(False)
    _token: str | None = PrivateAttr(None)
    _first_wait_s: float = PrivateAttr(FIRST_WAIT_S)

    def wait_elsewhere(self) -> None:
        """Let ServersAway end a call at once: the pool waits for the run's own servers, outside of the call's time."""
        self._own = True

    def show(self, token: str) -> None:
        self._token = token

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str | list[str]) -> str | list[str]:
        for one in [url] if isinstance(url, str) else url:
            if not is_http(one):
                raise ValueError(f"{one!r} is no address; write it as http://HOST:PORT")
            if (proxy := proxy_of(one)) and not proxy.startswith("http://"):
                kind = proxy.partition(":")[0]
                remedy = f"name an HTTP proxy, or add {urlsplit(one).hostname} to no_proxy"
                raise ValueError(f"{one} is reached through {proxy}, but {kind} proxies are not supported; {remedy}")
        return url

    @field_validator("api_key_env")
    @classmethod
    def _is_set(cls, name: str | None) -> str | None:
        if name and not os.environ.get(name):
            empty = name in os.environ
            problem = (
                f"the environment variable {name} is empty" if empty else f"there is no environment variable {name}"
            )
            raise ValueError(f"{problem}; export it where the run is started")
        return name

    @property
    def urls(self) -> Sequence[str]:
        return [self.url] if isinstance(self.url, str) else self.url

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON that a server answers. Raises RewardError, ServersAway."""
        body = {"model": self.model, **body} if self.model else body
        answer = await self._post(path, {"json": body})
        try:
            return json.loads(answer.text)
        except ValueError:
            raise RewardError(f"{answer.url}: no JSON but {answer.line}") from None

    async def post_bytes(self, path: str, body: bytes, kind: str) -> bytes:
        """Return the bytes that a server answers to `body` of the content type `kind`. Raises RewardError,
        ServersAway."""
        return (await self._post(path, {"data": body, "headers": {"Content-Type": kind}})).data

    async def _post(self, path: str, sent: dict[str, Any]) -> "HttpAnswer":
        if self._session is None:
            self._session = self._open()
        attempt = 0
        while True:
            try:
                return await self._post_once(self._session, path, sent)
            except TryAgain as error:
                if attempt >= self.retries or (self._own and type(error.failure) is ServersAway):
                    error.failure.temporary = True
                    raise error.failure from None
                wait_s = min(MOST_WAIT_S, self._first_wait_s * 2**attempt) * random.uniform(0.75, 1.25)
                await asyncio.sleep(max(wait_s, error.wait_s))
                attempt += 1

    def _open(self) -> "aiohttp.ClientSession":
        import aiohttp  # takes a fifth of a second

        secret = self._token or (os.environ[self.api_key_env] if self.api_key_env else None)
        key = {"Authorization": f"Bearer {secret}"} if secret else {}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        return aiohttp.ClientSession(headers=key, connector=connector, timeout=aiohttp.ClientTimeout(self.timeout_s))

    async def _post_once(self, session: "aiohttp.ClientSession", path: str, sent: dict[str, Any]) -> "HttpAnswer":
        import aiohttp

        first, reason = next(self._turn) % len(self.urls), ""
        for base in [*self.urls[first:], *self.urls[:first]]:
            url = base.rstrip("/") + path
            try:
                async with session.post(url, **sent, proxy=proxy_of(url)) as response:
                    answer = HttpAnswer(url, await response.read(), response.get_encoding())
                    self._check(answer, response.status, response.headers.get("Retry-After", ""))
                    return answer
            except aiohttp.ClientConnectorError as error:
                through = f" (through the proxy {proxy_of(url)})" if proxy_of(url) else ""
                reason = reason or f"{url}: {error}{through}"
            except TimeoutError as error:
                why = f"no answer within timeout_s ({self.timeout_s:g} s)" if self.timeout_s else str(error)
                raise TryAgain(RewardError(f"{url}: {why}")) from None
            except (aiohttp.ClientError, OSError) as error:
                raise TryAgain(ServersAway(f"{url}: {type(error).__name__}: {error}")) from None
        raise TryAgain(ServersAway(reason))

    def _check(self, answer: "HttpAnswer", status: int, retry_after: str) -> None:
        if status >= 500 or status in PASSING:
            wait_s = float(retry_after) if retry_after.isdigit() else 0.0
            kind = ServerFailed if status == 500 else RewardError
            failure = kind(f"{answer.url}: status {status}: {answer.line}")
            raise TryAgain(failure, min(wait_s, 4 * MOST_WAIT_S))
        if status != 200:
            raise RewardError(f"{answer.url}: status {status}: {answer.line}")


class HttpAnswer(NamedTuple):
    """What a server answered."""

    url: str
    data: bytes
    encoding: str

    @property
    def text(self) -> str:
        return self.data.decode(self.encoding, errors="replace")

    @property
    def line(self) -> str:
        """The first line with words."""
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "nothing")[:BODY_CHARS]


class AnswerTemplate:
    """A Jinja template about an answer, or a `.jinja` file. Raises ValueError."""

    def __init__(self, source: str) -> None:
        is_file = source.endswith(".jinja")
        file = f" {source}" if is_file else ""
        self._name = f"template{file}" if file else "its template"
        try:
            self._text = Path(source).read_text(encoding="utf-8-sig") if is_file else source
            self._kind, self._renderer = "file" if is_file else "text", Renderer()
            self._renderer.check(self._kind, self._text)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"template {source} cannot be read: {error}") from None
        except RenderError as error:
            line = f", line {error.line}" if error.line else ""
            raise ValueError(f"template{file}{line}: {error}") from None
        if not names_answer(self._text):
            lacks = "it does not name answer, so the model would not see it; write {{ answer }}"
            raise ValueError(f"template{file}: {lacks}")

    def render(self, answer: str, truth: Any, row: dict[str, Any]) -> str:
        """Raises RewardError."""
        names = row | {"answer": answer, "ground_truth": truth}
        try:
            return self._renderer.render(self._kind, self._text, names)
        except RenderError as error:
            why = error.about("the row", self._name)
            if error.kind == "undefined":
                why = f"{self._name} cannot be filled: {error}; there are {', '.join(names)}"
            raise RewardError(why, permanent=True) from None


def names_answer(template: str) -> bool:
    from jinja2 import Environment, nodes

    return any(name.name == "answer" for name in Environment().parse(template).find_all(nodes.Name))


class TryAgain(Exception):
    """The request may succeed later; else raise `failure`."""

    def __init__(self, failure: RewardError, wait_s: float = 0.0) -> None:
        super().__init__(str(failure))
        self.failure, self.wait_s = failure, wait_s
