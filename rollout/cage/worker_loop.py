"""In a worker process: loads the user's function and runs calls or episodes that the server sends.

    server -> worker   ["call", number, arguments]   ["cancel", number]
                       ["generated", request, completion]   ["refused", request, reason, permanent, code of ChatRefused]
    worker -> server   ["loaded", about]   ["unloadable", reason, traceback]   ["ahead", number of calls]
                       ["ended", number, origin or "value", reason or value, traceback, permanent, refused request]
                       ["generate", number, request, tokens, options]   ["stop", number, request]

The running event loop moves the deadline ahead, so the warden finds a blocked one.
"""

import asyncio
import faulthandler
import importlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import count
from math import inf
from typing import Any

from configs.plain_text import print_visible
from rollout.cage import CagedFunction
from rollout.cage.failure_text import describe_error, describe_load_error, exception_text, one_line
from rollout.cage.frames import encode, unpacker
from rollout.cage.warden import APART, CURRENT, DEADLINE, DUMP_SIGNAL, STARTED, STOPPED, STOPPED_S, CallState
from rollout.errors import ChatRefused, EngineError, first_error

AHEAD_S, MOST_AHEAD = 0.005, 8
"""Waking two processes would cost more than a short call."""
FAILED_CALL_S = 1.0
"""Most time that a failed `generate` costs an episode, so refused calls cannot go on for ever."""
TOLD_S = 0.5
"""Time for the warden to note a stop of both."""
_number: ContextVar[int] = ContextVar("number", default=0)


def work(function: CagedFunction, control: socket.socket, state: CallState) -> None:
    faulthandler.enable(2)
    faulthandler.register(DUMP_SIGNAL, 2, all_threads=True)
    home = os.getpid()
    state[DEADLINE] = time.monotonic() + function.load_timeout_s
    module, _, name = function.loader.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), name)(*function.arguments)
        message = encode(["loaded", getattr(loaded, "about", {})])
    except BaseException as error:
        loaded, message = None, encode(["unloadable", *describe_load_error(function.name, error)])
    leave_fork(home)
    control.sendall(message)
    if loaded is None:
        os._exit(1)
    state[DEADLINE], state[APART] = 0, getattr(loaded, "apart", False)
    many = function.episodes or getattr(loaded, "about", {}).get("async")
    (serve_episodes if many else serve_calls)(function, control, state, loaded)


def serve_calls(function: CagedFunction, control: socket.socket, state: CallState, loaded: Callable[..., Any]) -> None:
    """Run calls outside of any event loop: users' code may start its own."""
    home, frames = os.getpid(), unpacker()
    longest_s, ahead = AHEAD_S, 1  # each further call forgets a tenth
    while data := control.recv(2**18):
        frames.feed(data)
        for _, number, arguments in frames:
            began = time.monotonic()
            state[DEADLINE] = began + function.timeout_s
            state[STARTED] += 1
            try:
                reply = value_message(function.name, number, loaded(*arguments))
            except BaseException as error:
                reply = failure_message(function.name, number, error)
            leave_fork(home)
            state[DEADLINE] = 0
            longest_s, before = max(time.monotonic() - began, 0.9 * longest_s), ahead
            ahead = min(MOST_AHEAD, max(1, int(AHEAD_S / longest_s)))
            control.sendall(reply if ahead == before else encode(["ahead", ahead]) + reply)


def value_message(name: str, number: int, value: Any) -> bytes:
    try:
        return encode(["ended", number, "value", value, "", False, 0])
    except BaseException as error:  # users' classes run here
        how = f"{name} returned a result of type {type(value).__name__} that cannot be sent: {exception_text(error)}"
        return encode(["ended", number, "unanswerable", one_line(how), "", False, 0])


def failure_message(name: str, number: int, error: BaseException) -> bytes:
    cause = first_error(error)
    permanent, request = (attribute(cause, each) for each in ("permanent", "refused_request"))
    known = permanent is True, request if type(request) is int else 0
    return encode(["ended", number, *describe_error(name, cause), *known])


def attribute(error: BaseException, name: str) -> object:
    """None where a user's own class computes it and raises."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None


def leave_fork(home: int) -> None:
    """End a process that users' code forked."""
    if os.getpid() != home:
        os._exit(0)


class RunningEpisode:
    """One episode. `left_s`: its time left outside of `generate`."""

    def __init__(
        self, number: int, left_s: float, expire: Callable[["RunningEpisode"], None], state: CallState
    ) -> None:
        self.number, self.left_s, self.expire, self.answered, self.generating = number, left_s, expire, False, 0
        self.loop, self.state = asyncio.get_running_loop(), state
        self.task: asyncio.Task[None]
        self.run_clock()

    def run_clock(self) -> None:
        self.since, self.stopped_before, self.late = self.loop.time(), self.state[STOPPED], False
        self.timer = self.loop.call_later(max(0.0, self.left_s), self.ring)

    def ring(self) -> None:
        """A timer that rings late was blocked by users' code, or worker and warden were stopped: the warden knows."""
        over_s = self.used_s() - self.left_s
        if over_s < 0 or (over_s > STOPPED_S and not self.late):
            self.late = over_s > 0
            self.timer = self.loop.call_later(TOLD_S if self.late else -over_s, self.ring)
        else:
            self.expire(self)

    def used_s(self) -> float:
        return self.loop.time() - self.since - (self.state[STOPPED] - self.stopped_before)

    def stop_clock(self) -> None:
        self.left_s -= self.used_s()
        self.timer.cancel()


class EpisodeServer:
    """All episodes of this process."""

    def __init__(self, function: CagedFunction, state: CallState, play: Callable[..., Awaitable[Any]]) -> None:
        self.function, self.state, self.play, self.home = function, state, play, os.getpid()
        self.loop = asyncio.get_running_loop()
        self.episodes: dict[int, RunningEpisode] = {}
        self.requests: dict[int, asyncio.Future[Any]] = {}
        self._request_numbers = count(1)
        self._writer: asyncio.StreamWriter

    async def serve(self, control: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=control)
        self._extend_deadline()
        frames = unpacker()
        while data := await reader.read(2**18):
            frames.feed(data)
            for verb, number, *rest in frames:
                self._on_message(verb, number, *rest)

    def _extend_deadline(self) -> None:
        interval_s = min(1.0, self.function.timeout_s / 4)
        self.state[DEADLINE] = time.monotonic() + self.function.timeout_s + interval_s
        self.loop.call_later(interval_s, self._extend_deadline)

    def _on_message(self, verb: str, number: int, value: Any = None, permanent: bool = False, code: str = "") -> None:
        request = self.requests.get(number)
        if verb == "call":
            self._start(number, value)
        elif verb == "cancel":
            if number in self.episodes:
                self.episodes[number].answered = True
                self._cancel(self.episodes[number], self.loop.time() + self.function.grace_s)
        elif request is not None and not request.done():
            if verb == "generated":
                request.set_result(value)
            else:
                error: Exception = ChatRefused(value, code) if code else EngineError(value, permanent)
                error.refused_request = number  # type: ignore[attr-defined]
                request.set_exception(error)

    def _start(self, number: int, arguments: list[Any]) -> None:
        self.state[STARTED] += 1
        left_s = self.function.timeout_s if getattr(self.play, "timed", True) else inf  # else the server has the clock
        episode = self.episodes[number] = RunningEpisode(number, left_s, self._expire, self.state)
        context = copy_context()
        context.run(_number.set, number)
        episode.task = self.loop.create_task(self._play(episode, arguments), context=context)

    def _expire(self, episode: RunningEpisode) -> None:
        how = f"{self.function.name} took longer than {self.function.prefix}timeout_s ({self.function.timeout_s:g} s)"
        self._answer(episode, encode(["ended", episode.number, "timed_out", how, "", False, 0]))
        self._cancel(episode, self.loop.time() + self.function.grace_s)

    def _cancel(self, episode: RunningEpisode, until: float) -> None:
        """If users' code does not end in time, the worker ends, by the fault of this episode alone."""
        if episode.number not in self.episodes:
            return
        if self.loop.time() >= until:
            self.state[CURRENT] = episode.number
            try:
                print_visible(f"{self.function.name}: an episode that was cancelled does not end; its worker does")
            finally:  # users' code may have closed the stream
                os._exit(1)
        episode.task.cancel()
        if not getattr(self.play, "apart", False):  # else a guard has the user's code, and may need longer
            self.loop.call_later(self.function.cancel_again_s, self._cancel, episode, until)

    def _answer(self, episode: RunningEpisode, message: bytes) -> None:
        if not episode.answered:
            self._writer.write(message)
            episode.answered = True

    async def _play(self, episode: RunningEpisode, arguments: list[Any]) -> None:
        name, number = self.function.name, episode.number
        try:
            given = [*arguments, partial(self._generate, episode)] if self.function.episodes else arguments
            message = value_message(name, number, await self.play(*given))
        except BaseException as error:
            message = failure_message(name, number, error)
        leave_fork(self.home)
        self._answer(episode, message)
        episode.stop_clock()
        del self.episodes[number]

    async def _generate(self, episode: RunningEpisode, tokens: Any, **options: Any) -> Any:
        if episode.answered:
            raise RuntimeError("this episode has ended")
        request = next(self._request_numbers)
        message = encode(["generate", episode.number, request, tokens, options])
        answer = self.requests[request] = self.loop.create_future()
        self._writer.write(message)
        episode.generating += 1
        if episode.generating == 1:
            episode.stop_clock()
        asked = self.loop.time()
        try:
            return await answer
        except Exception:
            episode.left_s -= min(self.loop.time() - asked, FAILED_CALL_S)
            if episode.left_s <= 0:
                self._expire(episode)
            raise
        finally:
            episode.generating -= 1
            if episode.generating == 0 and not episode.answered:
                episode.run_clock()
            del self.requests[request]
            if answer.cancelled():
                self._writer.write(encode(["stop", episode.number, request]))


@Coroutine.register
class RecordedSteps:
    """A coroutine that marks its episode in CallState while it runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], state: CallState, number: int) -> None:
        self.coroutine, self.state, self.number = coroutine, state, number

    def send(self, value: Any) -> Any:
        return self._step(self.coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self.coroutine.throw, *error)

    def close(self) -> None:
        self.coroutine.close()

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        self.state[CURRENT] = self.number
        try:
            return step(*values)
        finally:
            self.state[CURRENT] = 0


def serve_episodes(
    function: CagedFunction, control: socket.socket, state: CallState, loaded: Callable[..., Awaitable[Any]]
) -> None:
    """Run episodes, or calls of an `async` function, until the server closes the connection."""

    def new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        number = (options.get("context") or copy_context()).get(_number, 0)
        recorded: Any = RecordedSteps(coroutine, state, number) if number else coroutine
        return asyncio.Task(recorded, loop=loop, **options)

    async def serve() -> None:
        await EpisodeServer(function, state, loaded).serve(control)
        if close := getattr(loaded, "close", None):
            await close()

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_task_factory(new_task)
    serving = loop.create_task(serve())
    while not serving.done():
        # SystemExit leaves the loop, and also reaches whoever awaits the task.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(serving)
    state[DEADLINE] = 0
    serving.result()
