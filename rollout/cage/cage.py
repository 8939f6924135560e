"""Runs a user's function in workers that are kept alive."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any

from rollout.cage import CagedError, CagedFunction, Unloadable
from rollout.cage.failure_text import one_line
from rollout.cage.frames import encode
from rollout.cage.worker_process import WorkerEnd, WorkerProcess
from rollout.errors import ChatRefused

log = logging.getLogger(__name__)
Generate = Callable[..., Awaitable[Any]]
ATTEMPTS = 3
"""Workers that may end before a call starts."""
MAX_BACKOFF_S = 30.0


class CallOnServer:
    """A call as the server sees it. `done`: its "ended" message, or its worker's end."""

    def __init__(
        self, number: int, message: bytes, generate: Generate | None, on_worker: Callable[[bool], object]
    ) -> None:
        self.number, self.message, self.generate, self.on_worker = number, message, generate, on_worker
        self.done: asyncio.Future[list[Any] | WorkerEnd] = asyncio.get_running_loop().create_future()
        self.worker: WorkerProcess | None = None
        self.place = self.attempts = 0
        self.requests: dict[int, asyncio.Task[None]] = {}
        self.refused: dict[int, Exception] = {}

    def give_to(self, worker: WorkerProcess) -> None:
        worker.sent += 1
        worker.calls[self.number] = self
        self.worker, self.place, self.attempts = worker, worker.sent, self.attempts + 1
        worker.send(self.message)
        self.on_worker(True)

    def on_message(self, verb: str, *rest: Any) -> bool:
        match verb, *rest:
            case "generate", int(request), tokens, dict(options) if self.generate:  # `generate` judges the tokens
                task = asyncio.create_task(self._generate(request, self.generate, tokens, options))
                task.add_done_callback(lambda _: self.requests.pop(request, None))  # it may never begin
                self.requests[request] = task
            case "stop", int(request):
                if request in self.requests:
                    self.requests[request].cancel()
            case "ended", str(), _, str(), bool(), int():
                if not self.done.done():
                    self.done.set_result(list(rest))
            case _:
                return False
        return True

    async def _generate(self, request: int, generate: Generate, tokens: Any, options: dict[str, Any]) -> None:
        assert self.worker is not None
        try:
            self.worker.send(["generated", request, await generate(tokens, **options)])
        except Exception as error:  # the episode may handle it
            if isinstance(error, ChatRefused):  # there may be many
                error.__cause__ = error.__context__ = None
                error.__traceback__ = None
            self.refused[request] = error
            reason, permanent = one_line(str(error) or type(error).__name__), getattr(error, "permanent", False)
            code = error.code if isinstance(error, ChatRefused) else ""
            self.worker.send(["refused", request, reason, permanent, code])


class Cage:
    """An async context manager over worker processes.

    Entering raises Unloadable if the function cannot be loaded. The time limit of a call counts from its start on a
    worker. A worker that ends is replaced: only the call whose code ran fails, and the others are returned; if that
    call is unknown, all fail.
    """

    def __init__(self, function: CagedFunction, workers: int = 1) -> None:
        self.function, self.num_workers = function, workers
        self._workers: set[WorkerProcess] = set()
        self._queue: deque[CallOnServer] = deque()
        self._numbers = count(1)
        self._closed = asyncio.Event()

    async def __aenter__(self) -> "Cage":
        self._loaded: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._keeping = [asyncio.create_task(self._keep(place)) for place in range(self.num_workers)]
        try:
            self.about = await asyncio.shield(self._loaded)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._closed.set()
        for worker in self._workers:
            worker.stop()
        self._fail_queue("was not called: its workers have ended", "died")
        await asyncio.gather(*self._keeping)

    async def call(
        self, *arguments: Any, generate: Generate | None = None, on_worker: Callable[[bool], object] = bool
    ) -> Any:
        """Call the function with plain values.

        Raises CagedError, and any exception of `generate` that the episode did not handle. A cancelled call is killed
        after `grace_s`. `on_worker(False)`: the worker lost the call before it began.
        """
        number = next(self._numbers)
        try:
            message = encode(["call", number, arguments])
        except (TypeError, ValueError, OverflowError) as error:
            reason = one_line(f"{self.function.name}: its arguments cannot be sent: {error}")
            raise CagedError(reason, "unanswerable") from error
        call = CallOnServer(number, message, generate, on_worker)
        self._submit(call)
        try:
            outcome = await call.done
        except asyncio.CancelledError:
            if call.worker and call.worker.runs_many:
                call.worker.send(["cancel", call.number])
            elif call.worker and call.number in call.worker.calls:  # a new worker may take longer than the call
                asyncio.get_running_loop().call_later(self.function.grace_s, self._kill_if_busy, call.worker, call)
            raise
        finally:
            if not call.done.cancelled() or (call.worker and call.worker.runs_many):
                self._leave(call)
        if isinstance(outcome, WorkerEnd):
            raise self._end_error(call, outcome)
        origin, value, trace, permanent, request = outcome
        if origin == "value":
            return value
        if request in call.refused:
            raise call.refused[request]
        assert call.worker is not None
        raise CagedError(str(value), origin, detail(trace, await call.worker.last_output()), permanent)

    def _kill_if_busy(self, worker: WorkerProcess, call: CallOnServer) -> None:
        if next(iter(worker.calls), None) == call.number:
            worker.kill()
        elif call.number in worker.calls:
            asyncio.get_running_loop().call_later(self.function.grace_s, self._kill_if_busy, worker, call)

    def _submit(self, call: CallOnServer) -> None:
        able = [worker for worker in self._workers if worker.has_room()]
        if able:
            call.give_to(min(able, key=lambda worker: len(worker.calls)))
        elif self._closed.is_set():
            call.done.set_exception(CagedError(f"{self.function.name} was not called: its workers have ended", "died"))
        else:
            self._queue.append(call)

    def _serve_queue(self, worker: WorkerProcess) -> None:
        while self._queue and worker.has_room():
            call = self._queue.popleft()
            if not call.done.done():
                call.give_to(worker)

    def _fail_queue(self, how: str, origin: str, detail: str = "") -> None:
        while self._queue:
            call = self._queue.popleft()
            if not call.done.done():
                call.done.set_exception(CagedError(f"{self.function.name} {how}", origin, detail))

    def _leave(self, call: CallOnServer) -> None:
        for request in list(call.requests.values()):
            request.cancel()
        if call.worker and call.worker.calls.pop(call.number, None):
            self._serve_queue(call.worker)
            if call.worker.worn() and not call.worker.calls:
                call.worker.stop()

    async def _keep(self, place: int) -> None:
        path = f"{self.function.log}-{place}.log" if self.function.log else None
        failures = 0
        while not self._closed.is_set():
            worker = WorkerProcess(replace(self.function, log=path))
            try:
                await worker.start()
                failures = 0 if await self._serve(worker, failures == 0) else failures + 1
            except (OSError, RuntimeError) as error:  # no processes, files or threads are left
                if worker in self._workers:
                    self._workers.remove(worker)
                    worker.kill()
                self._refuse(CagedError(f"no process can be kept for {self.function.name}: {error}", "unloadable"))
                failures += 1
            if failures > 1:
                wait_s = min(MAX_BACKOFF_S, 0.125 * 2**failures)
                await asyncio.wait([closed := asyncio.ensure_future(self._closed.wait())], timeout=wait_s)
                closed.cancel()

    async def _serve(self, worker: WorkerProcess, first: bool) -> bool:
        error: CagedError | None = None
        self._workers.add(worker)
        if self._closed.is_set():
            worker.stop()
        while (message := await worker.receive()) is not None:
            match message:
                case ["loaded", dict(about)] if worker.about is None:
                    worker.about = about
                    if not self._loaded.done():
                        self._loaded.set_result(about)
                    self._serve_queue(worker)
                case ["unloadable", str(reason), str(trace)]:
                    error = CagedError(reason, "unloadable", detail(trace, await worker.last_output()))
                case ["ahead", int(ahead)] if not worker.runs_many and ahead > 0:
                    worker.ahead = ahead
                case [str(verb), int(number), *rest]:
                    call = worker.calls.get(number)
                    if call and not call.on_message(verb, *rest):
                        worker.spoil()
                    elif call and call.done.cancelled():
                        self._leave(call)
                case _:
                    worker.spoil()
        end, calls = await worker.ended(), [*worker.calls.values()]
        self._workers.remove(worker)
        worker.calls.clear()
        if not worker.runs_many:  # calls ran in order
            guilty = [call.number for call in calls if worker.spoilt or call.place == end.started]
            end = replace(end, current=guilty[0] if guilty else 0)
        if worker.about is None and not error and not (first and "SIGKILL" in end.how):  # SIGKILL may be an accident
            reason = f"{self.function.name} cannot be loaded: it {end.how}"
            error = CagedError(reason, "unloadable", end.output)
        if error:
            self._refuse(error)
        for call in calls:
            if call.done.done():
                continue
            if call.place > end.started and call.attempts < ATTEMPTS:
                call.attempts -= bool(end.current)  # another call's fault
                call.on_worker(False)
                self._submit(call)
            else:
                call.done.set_result(end)
        return 0 < end.started < float("inf")

    def _refuse(self, error: CagedError) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(Unloadable(str(error), error.origin, error.detail))
        elif not any(worker.about is not None for worker in self._workers):
            self._fail_queue(f"cannot be called: {error}", "unloadable", error.detail)

    def _end_error(self, call: CallOnServer, end: WorkerEnd) -> CagedError:
        name = self.function.name
        if call.place > end.started:
            return CagedError(f"{name} was not called: {ATTEMPTS} workers ended before it began", "died", returned=True)
        beside = end.current not in (0, call.number)
        if self._closed.is_set() or beside:
            other = "episode" if self.function.episodes else "call"
            how = f"another {other} ended the worker that both shared" if beside else "the server stops"
            return CagedError(f"{name}: {how}: {name} {end.how}", "died", returned=True)
        return CagedError(f"{name} {end.how}", end.origin, end.output)


def detail(trace: str, output: str) -> str:
    return f"{trace.rstrip()}\n--- last output ---\n{output}" if output and trace else trace or output
