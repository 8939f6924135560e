"""The server's end of one worker process: starts it with its warden, talks to it, and knows how it ended.

`WorkerSet` keeps a number of them alive, whatever users' code does.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.cage import CagedError, Kind
from rollout.cage.frames import BadFrame, FrameReader, encode

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Time for a worker to end by itself (`atexit` handlers run) before it is killed."""
KILL_S = 10.0
"""Time for a warden to kill its worker before it is killed as well."""
OUTPUT_S = 2.0
"""Longest wait for the last output of a call that failed."""
MAX_BACKOFF_S = 30.0
"""Longest wait between two attempts to start a worker."""

START = "import sys; sys.path[:] = sys.argv[3:]; from rollout.cage.warden import main; main(*map(int, sys.argv[1:3]))"
"""The program of a warden. Started by hand and not by multiprocessing, whose workers import the server's `__main__`."""


@dataclass(frozen=True)
class CageLimits:
    """Limits of one call or episode. `prefix` and a field's name are the key in the run file, for error messages.

    `memory_gib`: of the worker with all processes it started. `max_calls`: calls until a worker is replaced. None: no
    limit.
    """

    timeout_s: float
    memory_gib: float | None = None
    max_calls: int | None = None
    load_timeout_s: float = 120.0
    prefix: str = "reward."

    @property
    def timeout_text(self) -> str:
        """Key and value for error messages: `reward.timeout_s (10 s)`."""
        return f"{self.prefix}timeout_s ({self.timeout_s:g} s)"


@dataclass(frozen=True)
class CagedFunction:
    """A user's function and how a worker gets it: `loader` (`module:function`) is called with plain `arguments`.

    `folders` come first in the worker's `sys.path`, so that users' files can import their neighbours. Example:
    `CagedFunction("score.py:score", "rollout.rewards.workers:load", [{"function": "score.py:score"}], ["/home/me"])`.
    """

    name: str
    loader: str
    arguments: Sequence[Any] = ()
    folders: Sequence[str] = ()


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended, as its warden saw it: `how` and `number` (exit code or signal), the calls it had started,
    the episode that was running, the last output."""

    how: str
    number: int = 0
    started: int = 0
    current: int = 0
    output: str = ""


class WorkerProcess:
    """One worker. `loaded` waits for its function; then `send` and `receive`; `end` is done once it has ended."""

    def __init__(self, function: CagedFunction, limits: CageLimits, log_path: Path | None, episodes: bool) -> None:
        self.function, self.limits = function, limits
        self.about: dict[str, Any] = {}
        """What the loaded function says of itself: its attribute `about`."""
        self.pid = self.calls = 0
        """Process id of the worker, once it is loaded; calls sent to it."""
        self.finished = asyncio.Event()
        """The worker has ended or is to be replaced: it gets no further calls."""
        self.end: asyncio.Future[WorkerEnd] = asyncio.get_running_loop().create_future()
        self._setup = {
            "server": os.getpid(),
            "name": function.name,
            "loader": function.loader,
            "arguments": list(function.arguments),
            "folders": [os.path.abspath(folder) for folder in function.folders],
            "timeout_s": limits.timeout_s,
            "timeout_text": limits.timeout_text,
            "load_timeout_s": limits.load_timeout_s,
            "memory_bytes": int((limits.memory_gib or 0) * 2**30),
            "max_calls": limits.max_calls,
            "log": None if log_path is None else os.path.abspath(log_path),
            "episodes": episodes,
        }
        self._frames, self._messages = FrameReader(), list[Any]()
        self._output: asyncio.Future[str] | None = None

    async def start(self) -> None:
        """Start the process. Raises OSError if the machine has none left."""
        with ExitStack() as ours, ExitStack() as theirs:  # also one that is cancelled leaves nothing open
            sockets, fds = [], []
            for _ in ("control", "status"):
                mine, other = socket.socketpair()
                ours.callback(mine.close)
                theirs.callback(other.close)
                sockets.append(mine)
                fds.append(other.fileno())
            # In the event loop's thread: a warden is told of the end of the thread that started it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, *map(str, fds), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )
            theirs.close()
            ours.callback(self._process.wait)
            ours.callback(self._process.kill)
            self._reader, self._writer = await asyncio.open_unix_connection(sock=sockets[0])
            ours.callback(self._writer.close)
            self._status, self._requests = await asyncio.open_unix_connection(sock=sockets[1])
            ours.pop_all()
        self._requests.write(encode(self._setup))
        self._watching = asyncio.create_task(self._watch())

    async def loaded(self) -> None:
        """Wait until the function is loaded. Raises CagedError `unloadable`."""
        match await self.receive():
            case ["loaded", int(pid), dict(about)]:
                self.pid, self.about = pid, about
            case ["unloadable", str(reason), str(trace)]:
                raise CagedError("unloadable", reason, _detail(trace, (await self.ended()).output))
            case _:
                error = self.end_error(await self.ended())
                how = error.reason.removeprefix(f"{self.function.name} ")
                raise CagedError("unloadable", f"{self.function.name} cannot be loaded: it {how}", error.detail)

    def send(self, frame: bytes) -> None:
        """Send a message; one for a worker that has ended is lost."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> Any:
        """The next message; None once the worker has ended, or closed or spoilt its connection."""
        while not self._messages:
            try:
                data = await self._reader.read(2**18)
                self._messages = self._frames.feed(data)
            except OSError:
                return None
            except BadFrame:
                self.kill()
                return None
            if not data:
                return None
        return self._messages.pop(0)

    async def ended(self) -> WorkerEnd:
        """End the worker, unless it does so itself right now; how it ended."""
        for kill, patience_s in ((None, GRACE_S), (self.kill, KILL_S), (self._process.kill, KILL_S)):
            if kill is not None and not self.end.done():
                kill()  # of the warden itself at last: its worker dies with it (PDEATHSIG)
            await asyncio.wait([self.end], timeout=patience_s)
        return await asyncio.shield(self.end)

    async def read_failure(self, kind: Any, reason: Any, trace: Any, permanent: bool = False) -> CagedError:
        """The failure that the worker reported, with the output of the call added."""
        output = ""
        if not self.end.done():
            if self._output is None or self._output.done():
                self._output = asyncio.get_running_loop().create_future()
                self._requests.write(b"?")
            with suppress(TimeoutError):
                async with asyncio.timeout(OUTPUT_S):
                    output = await asyncio.shield(self._output)
        return CagedError(kind, str(reason), _detail(str(trace), output), permanent=permanent)

    def end_error(self, end: WorkerEnd) -> CagedError:
        """What the end of the worker means for the call that it had."""
        name, limits = self.function.name, self.limits
        killed = "; its process was killed"
        kind: Kind = "died"
        match end.how:
            case "timed_out":
                limit = limits.timeout_text if self.pid else f"{limits.load_timeout_s:g} s"
                kind, how = "timed_out", f"took longer than {limit}{killed}"
            case "out_of_memory":
                limit = f"{limits.prefix}memory_gib ({limits.memory_gib:g} GiB)"
                kind, how = "out_of_memory", f"used more memory than {limit}{killed}"
            case "processes":
                how = "started too many processes; all of them were killed"
            case "exit":
                how = f"ended its process (exit code {end.number})"
            case "signal":
                how = f"ended its process (killed by {_signal_name(end.number)})"
            case "closed":
                how = "was running when its process was told to end"
            case _:
                how = "was running when its process and the warden of that were lost"
        return CagedError(kind, f"{name} {how}", end.output)

    def kill(self) -> None:
        """Have the warden kill the worker and all that it started, now."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def close_input(self) -> None:
        """Let the worker end by itself: nothing more is sent."""
        with suppress(OSError, RuntimeError):
            self._writer.write_eof()

    async def close(self) -> None:
        """End the worker: by itself if it does so soon, else killed. Also a cancelled close leaves nothing behind."""
        try:
            self.close_input()
            await self.ended()
            await self._watching
        finally:
            self.kill()
            self._requests.close()  # the warden takes it as the server's end
            self._writer.close()

    async def _watch(self) -> None:
        """Read what the warden says, until it has ended."""
        # Of a warden that was killed nobody knows whether the call had begun: it counts as begun, and is not repeated.
        end, reader = WorkerEnd("lost", started=2**31), FrameReader()
        with suppress(OSError, BadFrame):
            while data := await self._status.read(2**18):
                for message in reader.feed(data):
                    if "how" in message:
                        end = WorkerEnd(**message)
                    elif self._output is not None and not self._output.done():
                        self._output.set_result(message["output"])
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self.end.set_result(end)
        self.finished.set()
        if self._output is not None and not self._output.done():
            self._output.set_result(end.output)
        # What the worker sent last is still to be read. Nobody writes any more, unless the warden was killed.
        asyncio.get_running_loop().call_later(GRACE_S, self._writer.transport.abort)


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _detail(trace: str, output: str) -> str:
    return f"{trace.rstrip()}\n--- last output ---\n{output}" if output and trace else trace or output


@dataclass
class WorkerSet:
    """Keeps `workers` processes alive while it is entered; starts a new one whenever one has ended.

    `use` runs with each loaded worker until that is to be replaced. `refuse` is called when the function cannot be
    loaded; the next attempt follows after a growing wait. Raises nothing of what happens to workers.
    """

    function: CagedFunction
    limits: CageLimits
    workers: int
    log_folder: Path | None
    episodes: bool
    use: Callable[[WorkerProcess], Awaitable[None]]
    refuse: Callable[[CagedError], None]
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        """Start the workers."""
        self._tasks = [asyncio.create_task(self._keep(place)) for place in range(self.workers)]

    async def close(self) -> None:
        """End all workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, place: int) -> None:
        path = None if self.log_folder is None else self.log_folder / f"worker{place}.log"
        failures = 0
        while True:
            worker = WorkerProcess(self.function, self.limits, path, self.episodes)
            try:
                failures = 0 if await self._run(worker, failures) else failures + 1
            except Exception as error:  # nothing that a worker does may end the server
                log.exception("A worker of %s cannot be run", self.function.name)
                failures += 1
                self.refuse(CagedError("died", f"a worker of {self.function.name} cannot be run: {error}"))
            if failures > 1:
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.125 * 2**failures))

    async def _run(self, worker: WorkerProcess, failures: int) -> bool:
        """One worker from start to end; whether it has started a call."""
        try:
            await worker.start()
        except OSError as error:
            self.refuse(CagedError("unloadable", f"no process can be started for {self.function.name}: {error}"))
            return False
        try:
            await worker.loaded()
            await self.use(worker)
        except CagedError as error:
            if failures or (await worker.ended()).how not in ("signal", "lost"):  # those may be accidents: once more
                self.refuse(error)
            return False
        finally:
            await worker.close()
        return worker.end.result().started > 0
