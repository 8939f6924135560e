"""TCP proxies on loopback between the processes of a run: they pass bytes on, hold them back, or pass them on late.

A partition holds the bytes of both directions back and closes nothing, as a network does that loses every packet for a
while: what was sent arrives once it is over. All proxies of a run live in one thread with an event loop.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

CHUNK = 1 << 16
Target = Callable[[str], tuple[str, int]]
"""Where a connection goes, by the address of the proxy that the client has connected to."""


class Proxy:
    """Listens on `port` of all loopback addresses."""

    def __init__(self, port: int, target: Target) -> None:
        self.port, self.target, self.delay_s = port, target, 0.0
        self.passing = asyncio.Event()
        self.passing.set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._join, "0.0.0.0", self.port)

    def close(self) -> None:
        """Listen no more."""
        if self._server:
            self._server.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        ends = [writer]
        try:
            await self.passing.wait()
            far_reader, far_writer = await asyncio.open_connection(*self.target(writer.get_extra_info("sockname")[0]))
            ends.append(far_writer)
            await self._serve([self._pass(reader, far_writer), self._pass(far_reader, writer)])
        except OSError:
            return  # nobody listens there: the client learns it from the end of its connection
        finally:
            for end in ends:
                end.close()

    async def _serve(self, ways: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Until one end is gone: then so is the other."""
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what one end sends, in order, each chunk `delay_s` after it came."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def send() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self.passing.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        sending = asyncio.create_task(send())
        try:
            with suppress(ConnectionError):
                while data := await reader.read(CHUNK):
                    queue.put_nowait((loop.time() + self.delay_s, data))
            queue.put_nowait((0.0, b""))
            with suppress(ConnectionError):
                await sending
        finally:
            sending.cancel()


class Network:
    """The proxies of a run, by name. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.proxies: dict[str, Proxy] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def add(self, name: str, port: int, target: Target) -> None:
        """Begin to listen."""

        async def make() -> None:
            self.proxies[name] = Proxy(port, target)
            await self.proxies[name].listen()

        self._call(make())

    def part(self, name: str) -> None:
        """Let nothing through."""
        self._soon(self.proxies[name].passing.clear)

    def delay(self, name: str, seconds: float) -> None:
        """Let everything through so much later."""
        self.proxies[name].delay_s = seconds

    def heal(self, name: str) -> None:
        """Let everything through again, also what was held back."""
        self.proxies[name].delay_s = 0.0
        self._soon(self.proxies[name].passing.set)

    def close(self) -> None:
        """End all connections."""

        async def end() -> None:
            for proxy in self.proxies.values():
                proxy.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _soon(self, act: Callable[[], object]) -> None:
        async def run() -> None:
            act()

        self._call(run())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(10.0)


def at(port: int) -> Target:
    """Always this port of this machine."""
    return lambda address: ("127.0.0.1", port)


def named_by_address(address: str) -> tuple[str, int]:
    """Port P of this machine for a client of 127.1.(P / 256).(P % 256) (`server.through_proxy`)."""
    *_, high, low = map(int, address.split("."))
    return "127.0.0.1", high << 8 | low
