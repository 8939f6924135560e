"""`Cage`: calls of a user's function in worker processes, each worker one call at a time."""

import asyncio
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from rollout.cage import CagedError, Kind
from rollout.cage.frames import encode
from rollout.cage.worker_process import CagedFunction, CageLimits, WorkerEnd, WorkerProcess, WorkerSet

ATTEMPTS = 3
"""Workers that a call is given to when they die before it starts."""
SLACK_S = 30.0
"""The warden kills a call at its time limit; the server itself gives the call up this much later."""


class Cage:
    """An async context manager over worker processes. `call` returns what the function returned, or raises CagedError.

    Waits for a free worker as long as it takes; the time limit counts from the start of the call. A worker that ends,
    at any moment and in any way, is replaced, and only the call that it ran fails. Calls that wait for a function
    which cannot be loaded fail each time an attempt to load it fails. Cancelling a call kills its worker.
    """

    def __init__(
        self, function: CagedFunction, limits: CageLimits, workers: int = 1, log_folder: Path | None = None
    ) -> None:
        self.function, self.limits = function, limits
        self._workers = WorkerSet(function, limits, workers, log_folder, False, self._use, self._refuse)
        self._loaded: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._waiting: deque[asyncio.Future[WorkerProcess]] = deque()
        self._closed = False

    async def __aenter__(self) -> "Cage":
        self._workers.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._fail_waiting(CagedError("died", f"{self.function.name} was not called: its workers have ended"))
        await self._workers.close()

    async def ready(self) -> dict[str, Any]:
        """Wait until a worker is free; the loaded function's `about`. Raises CagedError, `unloadable` among them."""
        worker = await self._acquire()
        self._release(worker)
        return worker.about

    async def call(self, *arguments: Any) -> Any:
        """Call the function with these plain values. Raises CagedError."""
        try:
            frame = encode(arguments)
        except (TypeError, ValueError, OverflowError) as error:
            raise CagedError("unanswerable", f"{self.function.name}: its arguments cannot be sent: {error}") from error
        for _ in range(ATTEMPTS):
            worker = await self._acquire()
            try:
                reply = await self._exchange(worker, frame)
                failure = await worker.read_failure(*reply[1:]) if reply and reply[1] != "value" else None
                end = await worker.ended() if reply is None else None
            except BaseException:  # cancelled, above all
                worker.kill()
                raise
            if reply:
                self._release(worker, last=reply[0])
                if failure is not None:
                    raise failure
                return reply[2]
            if end is not None and end.started >= worker.calls:
                raise worker.end_error(end)
        raise CagedError("died", f"{self.function.name} was not called: {ATTEMPTS} workers ended before they began")

    async def _exchange(self, worker: WorkerProcess, frame: bytes) -> tuple[bool, str, Any, str] | None:
        """The worker's reply; None if it has ended or sent something else."""
        worker.calls += 1
        worker.send(frame)
        try:
            async with asyncio.timeout(self.limits.timeout_s + SLACK_S):
                reply = await worker.receive()
        except TimeoutError:
            raise worker.end_error(WorkerEnd("timed_out")) from None
        match reply:
            case [bool(last), str(kind), result, str(trace)] if kind in ("value", *get_args(Kind)):
                return last, kind, result, trace
        return None

    async def _use(self, worker: WorkerProcess) -> None:
        """Lend the worker to calls until it is to be replaced."""
        self._loaded.add(worker)
        self._release(worker)
        try:
            await worker.finished.wait()
        finally:
            self._loaded.remove(worker)
            if worker in self._idle:
                self._idle.remove(worker)

    async def _acquire(self) -> WorkerProcess:
        if self._closed:
            raise CagedError("died", f"{self.function.name} was not called: its workers have ended")
        while self._idle:
            worker = self._idle.pop()
            if not worker.finished.is_set():
                return worker
        waiting: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._release(waiting.result())
            raise

    def _release(self, worker: WorkerProcess, last: bool = False) -> None:
        """Give the worker to the call that waits longest, or to none if this was its last call."""
        if last or worker.finished.is_set():
            worker.finished.set()
            return
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(worker)
                return
        self._idle.append(worker)

    def _refuse(self, error: CagedError) -> None:
        if not self._loaded:
            self._fail_waiting(error)

    def _fail_waiting(self, error: CagedError) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error.copy())
