"""`python -m actors watch RUN|CONFIG.yaml [--port 5680] [--host 127.0.0.1] [--terminal]`: a run as it goes on.

Changes and keeps nothing: any number may watch a run, alive or dead. Beyond loopback anybody who reaches the port may
read.
"""

import asyncio
import json
import logging
import re
import sys
from collections.abc import Awaitable, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

from aiohttp import web

from actors.live.prometheus import exposition
from actors.live.screen import show
from actors.live.watcher import Watcher
from actors.report.examples import stored_batches
from actors.report.page import MOST_SHOWN, render
from actors.report.page_data import drawn_look, evaluation_row, overview_data, page_data, samples_data, version_row
from actors.watch.metrics_log import EVALUATED, Position, Record, bytes_after, is_of_servers, read_after, sets_of
from actors.watch.run_state import find_run
from buffer.store.faults import StoreError
from configs.entrypoint import BAD_INPUT, DONE, StopSignals, split_flags
from configs.http_limits import LimitedSite, add_headers, is_loopback_host, only_for, settings
from configs.load import ConfigError
from configs.plain_text import all_visible, print_visible, visible

REPLACED = b"event: replaced\ndata: {}\n\n"
"""The page asks for all its data again."""
PROG = "python -m actors watch"
HOST, PORT = "127.0.0.1", 5680
MOST_CONNECTIONS, MOST_BODY = 256, 1024
CLOSE_S = 1.0
WRITE_S = 60.0
"""For a browser to take an event; then it has to connect again."""
FAR_BYTES = 16 << 20
"""A browser that has missed more records gets the page's data anew, which are bounded."""


def main(argv: Sequence[str]) -> int:
    flags, rest = split_flags(
        argv,
        PROG,
        port={"type": int, "default": PORT},
        host={"default": HOST},
        terminal={"action": "store_true"},
    )
    config, run = find_run(rest, f"{PROG} [--port {PORT}] [--host {HOST}] [--terminal]")
    logging.getLogger("buffer").setLevel(logging.ERROR)  # the page says when the buffer does not answer
    watcher = Watcher(config, run, [*dropwhile(lambda word: not word.startswith("--"), rest)])
    try:
        asyncio.run(until_stopped(show(watcher) if flags.terminal else serve(watcher, flags.host, flags.port)))
    except ConfigError as error:
        print_visible(f"{PROG}: {error}", sys.stderr)
        return BAD_INPUT
    return DONE


async def until_stopped(work: Awaitable[None]) -> None:
    """Run `work` until the first signal."""
    task = asyncio.ensure_future(work)
    with StopSignals(lambda number: task.cancel()):
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def serve(watcher: Watcher, host: str, port: int) -> None:
    """Raises ConfigError."""
    runner = web.AppRunner(application(watcher, host), shutdown_timeout=CLOSE_S, **settings())
    await runner.setup()
    try:
        await listen(runner, host, port)
        bound = runner.addresses[0][1]
        where = f"run {watcher.config.run.name}: http://{host}:{bound}/  (Prometheus: /metrics; Ctrl-C ends)"
        print_visible(where, ends=True)
        if not is_loopback_host(host):
            print_visible(f"anybody who reaches {host}:{bound} may read samples and settings")
        await watcher.follow()
    finally:
        await runner.cleanup()


async def listen(runner: web.AppRunner, host: str, port: int) -> None:
    """Raises ConfigError."""
    if not host:
        raise ConfigError(["--host is empty; 127.0.0.1 is this machine, 0.0.0.0 every machine that reaches it"])
    if not 0 <= port <= 65535:  # the system would take another one
        raise ConfigError([f"--port {port}: not from 0 to 65535"])
    try:
        await LimitedSite(runner, host, port, MOST_CONNECTIONS).start()
    except OSError as error:
        problem = f"--host {host} --port {port}: {error.strerror or error}"
        raise ConfigError([f"{problem}; choose another port, 0 for a free one"]) from None


def application(watcher: Watcher, host: str) -> web.Application:
    """The paths."""
    pages = Pages(watcher)
    app = web.Application(middlewares=[only_for(host)], client_max_size=MOST_BODY)
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.get("/", pages.page),
            web.get("/data", pages.data),
            web.get("/events", pages.events),
            web.get("/samples", pages.samples),
            web.get("/metrics", pages.metrics),
        ]
    )
    return app


class Pages:
    """Answers the requests for the page of `watcher`'s run."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    async def page(self, request: web.Request) -> web.Response:
        async with self.watcher.steady:
            text = await asyncio.to_thread(lambda: render(self._data()))
        return web.Response(text=text, content_type="text/html")

    async def data(self, request: web.Request) -> web.Response:
        async with self.watcher.steady:
            return web.json_response(all_visible(await asyncio.to_thread(self._data), MOST_SHOWN))

    def _data(self) -> dict[str, Any]:
        watcher = self.watcher
        watcher.look()
        try:
            return page_data(watcher.config, watcher.run, watcher.records, watcher.overview, live=True)
        except ConfigError as error:  # evaluation.json
            raise web.HTTPInternalServerError(text=visible(str(error))) from None

    async def samples(self, request: web.Request) -> web.Response:
        batch, file = request.query.get("batch", ""), self._file()
        if not re.fullmatch("[0-9]{1,18}", batch):
            raise web.HTTPBadRequest(text="samples?batch=N")
        try:
            found = await asyncio.to_thread(samples_data, self.watcher.config, file, int(batch))
        except StoreError as error:
            raise web.HTTPNotFound(text=visible(str(error))) from None
        return web.json_response(all_visible(found, MOST_SHOWN))

    async def metrics(self, request: web.Request) -> web.Response:
        text = exposition(self.watcher.records, self.watcher.state, self.watcher.overview)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """An event's id is the place in the file, from which a browser that comes back goes on."""
        after = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        position, watcher = Position.parse(after), self.watcher
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            while True:
                event, position = await asyncio.to_thread(self._event, position)
                async with asyncio.timeout(WRITE_S):
                    await response.write(event)
                if event == REPLACED:
                    return response
                async with watcher.news:
                    await watcher.news.wait()
        except (ConnectionError, TimeoutError):
            if request.transport:
                request.transport.abort()
            return response

    def _event(self, position: Position) -> tuple[bytes, Position]:
        path, begun = self.watcher.records.path, position.inode != 0
        if bytes_after(path, position) > FAR_BYTES:
            return REPLACED, position
        records, position, replaced = read_after(path, position)
        if replaced and begun:
            return REPLACED, position
        return (
            f"id: {position}\ndata: {json.dumps(all_visible(self._news(records), MOST_SHOWN))}\n\n".encode(),
            position,
        )

    def _news(self, records: Sequence[Record]) -> dict[str, Any]:
        """Input of `take` in page.js."""
        versions = [one for one in records if not is_of_servers(one) and EVALUATED not in one]
        batches: list[int] = []
        if versions and self._file().is_file():
            try:
                batches = stored_batches(self._file())
            except StoreError:  # the file is being made
                batches = []
        return {
            "records": [version_row(one) for one in versions],
            "evaluations": [evaluation_row(one) for one in records if EVALUATED in one and sets_of(one)],
            "looks": [drawn_look(one) for one in records if is_of_servers(one)],
            "overview": overview_data(self.watcher.overview),
            "batches": batches,
        }

    def _file(self) -> Path:
        return self.watcher.run / (self.watcher.config.buffer.path or "")
