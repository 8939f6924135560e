"""Waits for the run's own reward or teacher servers, which are asked every second while somebody waits."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

log = logging.getLogger(__name__)
ASK_EVERY_S, ANSWER_S = 1.0, 2.0


class OwnServers:
    """The run's servers of a `kind`: `reward` or `teacher`."""

    def __init__(self, urls: Sequence[str], kind: str = "reward") -> None:
        self.urls, self.kind = urls, kind
        self._asking: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until a server answers; return at once if one did and none was lost since."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)

    def lost(self) -> None:
        """Ask the servers again."""
        if self._asking is not None and self._asking.done():
            self._asking = None

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        waited = False
        while not any(await asyncio.gather(*map(answers, self.urls))):
            if not waited:
                by_hand = f"`python -m rollout {self.kind} RUN.yaml` one by hand"
                where = f"`python -m actors launch` starts them, {by_hand}"
                log.warning("scoring waits for a %s server at %s; %s", self.kind, " or ".join(self.urls), where)
            waited = True
            await asyncio.sleep(ASK_EVERY_S)
        if waited:
            log.warning("a %s server answers, scoring goes on", self.kind)


async def answers(url: str) -> bool:
    place = urlsplit(url)
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            try:
                request = f"GET /health HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n"
                writer.write(request.encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False
