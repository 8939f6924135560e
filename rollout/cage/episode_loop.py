"""In a worker process: users' episodes on an event loop, many at a time; `generate` is a request to the server.

    server -> worker   ["episode", number, problem]   ["cancel", number]
                       ["generated", request, completion]   ["refused", request, reason]
    worker -> server   ["generate", number, request, tokens, options]   ["cancel", number, request]
                       ["ended", number, last, kind, trajectory or reason, traceback, permanent, refused request]

Any end of an episode but that of the process ends this episode alone. A loop that is blocked (`time.sleep`, an endless
loop) is found by the warden: the loop moves a deadline ahead for as long as it runs, and CallState says whose code
runs.
"""

import asyncio
import os
import socket
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import count
from typing import Any

from rollout.cage.call_loop import Recycling, flush_output, leave_fork
from rollout.cage.failure_text import describe_error, unanswerable
from rollout.cage.frames import FrameReader, encode
from rollout.cage.warden import CURRENT, DEADLINE, STARTED, CallState

Play = Callable[[Any, Callable[..., Awaitable[Any]]], Awaitable[Any]]
"""A task as the worker knows it: `await play(problem, generate)` with plain values."""

_number: ContextVar[int] = ContextVar("number", default=0)
"""The episode that this context belongs to."""


class GenerateRefused(Exception):
    """The server could not generate; the text says why."""

    def __init__(self, reason: str, request: int) -> None:
        super().__init__(reason)
        self.request = request


class EpisodeTimer:
    """Runs `expire` once an episode has spent `timeout_s` outside of `generate`."""

    def __init__(self, timeout_s: float, expire: Callable[[], None]) -> None:
        self._left_s, self._expire, self._generating = timeout_s, expire, 0
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._handle: asyncio.TimerHandle | None = self._loop.call_later(timeout_s, expire)

    def pause(self) -> None:
        """The episode waits for the server; several waits at a time count once."""
        self._generating += 1
        if self._generating == 1:
            self._left_s -= self._loop.time() - self._since
            self.stop()

    def resume(self) -> None:
        """One wait is over."""
        self._generating -= 1
        if self._generating == 0:
            self._since = self._loop.time()
            self._handle = self._loop.call_later(max(0.0, self._left_s), self._expire)

    def stop(self) -> None:
        """No expiry from now on."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class RunningEpisode:
    """One episode: its asyncio task, its timer, and whether the server knows its end."""

    def __init__(self, number: int) -> None:
        self.number, self.answered = number, False
        self.task: asyncio.Task[None]
        self.timer: EpisodeTimer


class EpisodeServer:
    """All episodes of this process."""

    def __init__(self, setup: dict[str, Any], state: CallState, play: Play, loop: asyncio.AbstractEventLoop) -> None:
        self.setup, self.state, self.play, self.loop = setup, state, play, loop
        self.name, self.timeout_s = setup["name"], setup["timeout_s"]
        self.recycling = Recycling(setup, state)
        self.home = os.getpid()
        self.episodes: dict[int, RunningEpisode] = {}
        self.requests: dict[int, asyncio.Future[Any]] = {}
        self._request_numbers = count(1)
        self._writer: asyncio.StreamWriter

    async def serve(self, control: socket.socket, loaded: bytes) -> None:
        """Until the server closes the connection."""
        reader, self._writer = await asyncio.open_unix_connection(sock=control)
        self._writer.write(loaded)
        self._extend_deadline()
        frames = FrameReader()
        while data := await reader.read(2**18):
            for message in frames.feed(data):
                self._on_message(*message)

    def _extend_deadline(self) -> None:
        interval_s = min(1.0, self.timeout_s / 4)
        self.state[DEADLINE] = time.monotonic() + self.timeout_s + interval_s
        self.loop.call_later(interval_s, self._extend_deadline)

    def _on_message(self, verb: str, number: int, value: Any = None) -> None:
        if verb == "episode":
            self._start(number, value)
        elif verb == "cancel":
            if number in self.episodes:
                self.episodes[number].answered = True
                self.episodes[number].task.cancel()
        elif number in self.requests and not self.requests[number].done():
            if verb == "generated":
                self.requests[number].set_result(value)
            else:
                self.requests[number].set_exception(GenerateRefused(value, number))

    def _start(self, number: int, problem: Any) -> None:
        self.state[STARTED] += 1
        episode = self.episodes[number] = RunningEpisode(number)
        episode.timer = EpisodeTimer(self.timeout_s, partial(self._expire, episode))
        context = copy_context()
        context.run(_number.set, number)
        episode.task = self.loop.create_task(self._play(episode, problem), context=context)
        episode.task.add_done_callback(partial(self._forget, episode))

    def _forget(self, episode: RunningEpisode, _: object) -> None:
        episode.timer.stop()
        del self.episodes[episode.number]

    def _expire(self, episode: RunningEpisode) -> None:
        self._answer(episode, "timed_out", f"{self.name} took longer than {self.setup['timeout_text']}")
        episode.task.cancel()

    def _answer(self, episode: RunningEpisode, kind: str, value: Any, *rest: Any) -> None:
        """Tell the server how an episode ended, once. Raises what `encode` raises."""
        if not episode.answered:
            last = self.recycling.due(int(self.state[STARTED]))
            self._writer.write(encode(["ended", episode.number, last, kind, value, *(rest or ("", False, 0))]))
            episode.answered = True

    async def _play(self, episode: RunningEpisode, problem: Any) -> None:
        """Run the user's coroutine; whatever it raises ends here."""
        result, failure = None, None
        try:
            result = await self.play(problem, partial(self._generate, episode))
        except BaseException as error:
            failure = _describe_failure(self.name, error)
        flush_output()
        leave_fork(self.home)
        if failure is not None:
            self._answer(episode, *failure)
            return
        try:
            self._answer(episode, "value", result)
        except BaseException as error:  # users' own classes run here
            self._answer(episode, "unanswerable", unanswerable(self.name, result, error))

    async def _generate(self, episode: RunningEpisode, tokens: Any, **options: Any) -> Any:
        """What users' code awaits: a completion, from the server's engine."""
        if episode.answered:
            raise RuntimeError("this episode has ended")
        request = next(self._request_numbers)
        frame = encode(["generate", episode.number, request, tokens, options])
        answer = self.requests[request] = self.loop.create_future()
        self._writer.write(frame)
        episode.timer.pause()
        try:
            return await answer
        finally:
            episode.timer.resume()
            del self.requests[request]
            if answer.cancelled():
                self._writer.write(encode(["cancel", episode.number, request]))


def _describe_failure(name: str, error: BaseException) -> tuple[str, str, str, bool, int]:
    """Kind, reason, traceback, whether it is permanent, and the refused request behind it (0: none)."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    request = error.request if isinstance(error, GenerateRefused) else 0
    return *describe_error(name, error), getattr(error, "permanent", None) is True, request


async def _record_current(coroutine: Coroutine[Any, Any, Any], state: CallState, number: int) -> Any:
    """The coroutine; while its code runs, CallState says that episode `number` runs."""
    return await _record_steps(coroutine, state, number)


@types.coroutine
def _record_steps(coroutine: Coroutine[Any, Any, Any], state: CallState, number: int) -> Generator[Any, Any, Any]:
    step, value = coroutine.send, None
    while True:
        state[CURRENT] = number
        try:
            awaited = step(value)
        except StopIteration as stop:
            return stop.value
        finally:
            state[CURRENT] = 0
        try:
            step, value = coroutine.send, (yield awaited)
        except BaseException as error:
            step, value = coroutine.throw, error


def serve_episodes(setup: dict[str, Any], control: socket.socket, state: CallState, play: Play, loaded: bytes) -> None:
    """Run episodes until the server closes the connection."""

    def new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        number = (options.get("context") or copy_context()).get(_number, 0)
        recorded = _record_current(coroutine, state, number) if number else coroutine
        return asyncio.Task(recorded, loop=loop, **options)

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_task_factory(new_task)
    serving = loop.create_task(EpisodeServer(setup, state, play, loop).serve(control, loaded))
    while not serving.done():
        # SystemExit in a task that an episode started leaves the loop; who awaits the task gets it as well.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(serving)
    state[DEADLINE] = 0
    serving.result()
