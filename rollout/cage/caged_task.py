"""`CagedTask`: users' episodes in worker processes, many at a time per worker; `generate` runs in the server."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from rollout.cage import CagedError, Kind
from rollout.cage.failure_text import one_line
from rollout.cage.frames import encode
from rollout.cage.worker_process import CagedFunction, CageLimits, WorkerEnd, WorkerProcess, WorkerSet

ATTEMPTS = 3
"""Workers that an episode is given to when they end before it starts."""

PlainGenerate = Callable[..., Awaitable[Any]]
"""`await generate(tokens, **options)`: a completion as plain values."""


class OpenEpisode:
    """An episode as the server sees it: its messages, and its place among those that its worker was sent."""

    def __init__(self, worker: WorkerProcess, number: int) -> None:
        worker.calls += 1
        self.worker, self.number, self.place = worker, number, worker.calls
        self.messages: asyncio.Queue[list[Any] | WorkerEnd] = asyncio.Queue()
        self.refused: dict[int, Exception] = {}
        """What `generate` raised, by request."""


class CagedTask:
    """An async context manager over worker processes; `await caged.run(problem, generate)` is one episode.

    Raises CagedError for an episode that has no result, and what `generate` raised if the episode did not handle it.
    `limits.timeout_s` limits the time that an episode spends outside of `generate`, and the time for which it may
    block its event loop; a blocked worker is killed. Of the episodes that a worker takes along when it ends, the one
    whose code ran has failed and the others were bystanders. Where none can be named, all have failed.
    """

    def __init__(
        self, function: CagedFunction, limits: CageLimits, workers: int = 1, log_folder: Path | None = None
    ) -> None:
        self.function, self.limits = function, limits
        self._workers = WorkerSet(function, limits, workers, log_folder, True, self._use, self._refuse)
        self._open: dict[WorkerProcess, dict[int, OpenEpisode]] = {}
        self._draining: set[WorkerProcess] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._numbers = count(1)
        self._closed = False

    async def __aenter__(self) -> "CagedTask":
        self._workers.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await self._workers.close()
        self._refuse(CagedError("died", f"{self.function.name} was not called: its workers have ended"))

    async def ready(self) -> dict[str, Any]:
        """Wait until a worker has loaded the task; the task's `about`. Raises CagedError `unloadable`."""
        return (await self._pick()).about

    async def run(self, problem: Any, generate: PlainGenerate) -> Any:
        """One episode, problem and result as plain values."""
        for _ in range(ATTEMPTS):
            worker = await self._pick()
            episode = OpenEpisode(worker, next(self._numbers))
            self._open[worker][episode.number] = episode
            try:
                worker.send(encode(["episode", episode.number, problem]))
                end = await self._follow(episode, generate)
            except asyncio.CancelledError:
                worker.send(encode(["cancel", episode.number]))
                raise
            finally:
                self._close_episode(episode)
            if isinstance(end, WorkerEnd):
                if episode.place <= end.started or end.how == "closed":
                    raise self._end_error(episode, end)
                continue
            kind, value, trace, permanent, request = end
            if kind == "value":
                return value
            if request in episode.refused:
                raise episode.refused[request]
            raise await worker.read_failure(kind, value, trace, permanent)
        raise CagedError("died", f"{self.function.name} was not called: {ATTEMPTS} workers ended before it began")

    async def _follow(self, episode: OpenEpisode, generate: PlainGenerate) -> list[Any] | WorkerEnd:
        """Serve the episode's requests until its end."""
        requests: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                message = await episode.messages.get()
                match message:
                    case ["generate", _, int(request), list(tokens), dict(options)]:
                        work = self._generate(episode, request, generate, tokens, options)
                        requests[request] = asyncio.create_task(work)
                        requests[request].add_done_callback(partial(_drop, requests, request))
                    case ["cancel", _, int(request)]:
                        if request in requests:
                            requests[request].cancel()
                    case ["ended", _, bool(last), str(kind), _, str(), bool(), int()] if kind in (
                        "value",
                        *get_args(Kind),
                    ):
                        if last:
                            self._draining.add(episode.worker)
                        return message[3:]
                    case WorkerEnd():
                        return message
                    case _:
                        episode.worker.kill()
        finally:
            for task in list(requests.values()):
                task.cancel()

    async def _generate(
        self, episode: OpenEpisode, request: int, generate: PlainGenerate, tokens: list[Any], options: dict[str, Any]
    ) -> None:
        try:
            frame = encode(["generated", request, await generate(tokens, **options)])
        except Exception as error:  # handed to the episode, and to the caller of `run` if it is not handled there
            episode.refused[request] = error
            frame = encode(["refused", request, one_line(str(error) or type(error).__name__)])
        episode.worker.send(frame)

    async def _use(self, worker: WorkerProcess) -> None:
        """Hand the worker's messages to its episodes, until it has ended."""
        self._open[worker] = {}
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        end = WorkerEnd("closed")
        try:
            while (message := await worker.receive()) is not None:
                match message:
                    case [str(), int(number), *_]:
                        if number in self._open[worker]:
                            self._open[worker][number].messages.put_nowait(message)
                    case _:
                        worker.kill()
            end = await worker.ended()
        finally:
            self._draining.discard(worker)
            for episode in self._open.pop(worker).values():
                episode.messages.put_nowait(end)

    def _close_episode(self, episode: OpenEpisode) -> None:
        others = self._open.get(episode.worker, {})
        others.pop(episode.number, None)
        if not others and episode.worker in self._draining:
            episode.worker.close_input()  # it ends by itself; `_use` ends with it

    async def _pick(self) -> WorkerProcess:
        """The worker with the fewest episodes."""
        while True:
            if self._closed:
                raise CagedError("died", f"{self.function.name} was not called: its workers have ended")
            able = [worker for worker in self._open if worker not in self._draining and not worker.finished.is_set()]
            if able:
                return min(able, key=lambda worker: len(self._open[worker]))
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)

    def _end_error(self, episode: OpenEpisode, end: WorkerEnd) -> CagedError:
        error = episode.worker.end_error(end)
        if end.how == "closed" or end.current not in (0, episode.number):
            reason = f"{self.function.name}: another episode ended the worker that both shared: {error.reason}"
            return CagedError("died", error.reason if end.how == "closed" else reason, bystander=True)
        return error

    def _refuse(self, error: CagedError) -> None:
        if not self._open:
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_exception(error.copy())


def _drop(requests: dict[int, asyncio.Task[None]], request: int, _: object) -> None:
    requests.pop(request, None)
