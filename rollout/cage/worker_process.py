"""The server's end of one worker process."""

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from configs.own_packages import PIN
from rollout.cage import CagedFunction
from rollout.cage.frames import BAD_BYTES, encode, unpacker

KILL_S = 10.0
"""Time that the warden has to kill its worker."""
OUTPUT_S = 2.0
START = f"""import sys
sys.path[:] = sys.argv[4:]
{PIN}
from rollout.cage.warden import main
worker = main(*map(int, sys.argv[1:4]))
from rollout.cage.worker_loop import work
work(*worker)"""
"""Starts a warden and its worker; multiprocessing's workers would import the server's `__main__`."""


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended. `started`: number of calls. `current`: the call whose code ran (0: none)."""

    origin: str = "died"
    how: str = "was running when its process and that process's warden were lost"
    started: float = float("inf")  # unknown: every call counts as begun and is not repeated
    current: int = 0
    output: str = ""


class ReadToEnd(asyncio.StreamReaderProtocol):
    """Gives its reader all that the other end sent before it ended. asyncio would leave it unread once a write to that
    end has failed."""

    def __init__(self, end: socket.socket, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self._end, self._rest = end, reader

    def connection_lost(self, error: Exception | None) -> None:
        with suppress(OSError):
            while data := self._end.recv(2**16, socket.MSG_DONTWAIT):
                self._rest.feed_data(data)
        super().connection_lost(None)


async def opened(end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, protocol = await loop.create_unix_connection(lambda: ReadToEnd(end, reader), sock=end)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class WorkerProcess:
    """One worker. `end` is done once the process has ended."""

    def __init__(self, function: CagedFunction) -> None:
        self.function = function
        self.about: dict[str, Any] | None = None
        """The loaded function's attribute; None until it is loaded."""
        self.calls: dict[int, Any] = {}
        self.sent = 0
        self.ahead = 1
        """Calls that may be sent at once, to run one after another."""
        self.spoilt = False
        self.stopping = False
        self.end: asyncio.Future[WorkerEnd] = asyncio.get_running_loop().create_future()
        self._frames, self._asked = unpacker(), deque[asyncio.Future[str]]()

    async def start(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        fds = [theirs.fileno() for _, theirs in pairs]
        try:
            # In the event loop's thread: the kernel signals a warden when the thread that started it ends.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, *map(str, [*fds, os.getpid()]), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        (self._reader, self._writer), (self._status, self._requests) = [await opened(ours) for ours, _ in pairs]
        self._requests.write(encode(asdict(self.function)))
        self._watching = asyncio.create_task(self._watch())

    def has_room(self) -> bool:
        most = self.function.concurrency if self.runs_many else self.ahead
        free = self.function.episodes or len(self.calls) < most
        return self.about is not None and not self.stopping and not self.end.done() and free and not self.worn()

    @property
    def runs_many(self) -> bool:
        return self.function.episodes or bool(self.about and self.about.get("async"))

    def worn(self) -> bool:
        return self.function.max_calls is not None and self.sent >= self.function.max_calls

    def send(self, message: Any) -> None:
        """A message for a worker that has ended is lost."""
        frame = message if isinstance(message, bytes) else encode(message)
        if not self.stopping and not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> Any:
        """Return None if the worker has ended, or closed or spoilt its connection."""
        while not self.spoilt:
            try:
                for message in self._frames:
                    return message
                data = await self._reader.read(2**18)
                self._frames.feed(data)
            except OSError:
                return None
            except BAD_BYTES:
                self.spoil()
                return None
            if not data:
                return None
        return None

    async def last_output(self) -> str:
        if self.end.done():
            return self.end.result().output
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        with suppress(TimeoutError, OSError, RuntimeError):  # its end was asked for meanwhile
            self._requests.write(b"?")
            async with asyncio.timeout(OUTPUT_S):
                return await asked
        return ""

    def stop(self) -> None:
        if not self.stopping and not self.end.done():
            self.stopping = True
            with suppress(OSError, RuntimeError):
                self._writer.write_eof()
            asyncio.get_running_loop().call_later(self.function.grace_s, self.kill)

    def kill(self) -> None:
        self.stopping = True
        if not self.end.done():
            with suppress(OSError, RuntimeError):
                self._requests.write_eof()
            asyncio.get_running_loop().call_later(KILL_S, self._process.kill)

    def spoil(self) -> None:
        self.spoilt = True
        self.kill()

    async def _watch(self) -> None:
        end, frames = WorkerEnd(), unpacker()
        with suppress(OSError, *BAD_BYTES):
            while data := await self._status.read(2**18):
                frames.feed(data)
                for message in frames:
                    if isinstance(message, list):
                        end = WorkerEnd(*message)
                    elif not (asked := self._asked.popleft()).done():
                        asked.set_result(message)
        self._process.kill()
        try:
            await asyncio.to_thread(self._process.wait)
        finally:  # even if no thread is left: calls wait for the end
            self._requests.close()
            self.end.set_result(end)
        for asked in self._asked:
            if not asked.done():
                asked.set_result(end.output)
        # The worker's last messages are still to be read.
        asyncio.get_running_loop().call_later(self.function.grace_s, self._writer.transport.abort)

    async def ended(self) -> WorkerEnd:
        self.stop()
        end = await asyncio.shield(self.end)
        self._writer.close()
        return end
