"""Judges an answer in its own process with a limit on processor time: an answer that breaks its reader loses only its
own reward."""

import atexit
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout.cage.apart import close_all_but
from rollout.cage.failure_text import exception_text, one_line
from rollout.cage.frames import encode, unpacker
from rollout.cage.warden import STOPPED_S
from rollout.errors import RewardError

GAVE_UP = "gave_up"


@dataclass
class JudgeLimits:
    """Limits of one call."""

    processor_s: float = 2.0
    """Right answers take 0.01 to 0.1 s. A busy machine costs no reward."""
    clock_s: float = 7.0
    """After this time, a call that has used a quarter of `processor_s` ends too."""
    memory_bytes: int = 2**30
    """Memory that the process may have beyond the worker's own."""

    def stay_below(self, timeout_s: float, memory_gib: float | None) -> None:
        self.processor_s, self.clock_s = min(2.0, timeout_s / 2), 0.7 * timeout_s
        self.memory_bytes = min(2**30, int((memory_gib or 8) * 2**28))


LIMITS = JudgeLimits()
TRIES = 2
"""The first process may have been killed, or with this one been stopped, from outside."""


class GaveUpError(Exception):
    """An answer takes too much time or memory, or breaks its reader."""


class AnswerJudge:
    """Calls `function` with plain values in a process that may be killed. Threads take turns.

    Raises GaveUpError, or RewardError if the process got too little time.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self._lock = function, threading.Lock()
        self._process = self._parent = 0
        self._had_s = 0.0
        self._socket: socket.socket | None = None
        self._number = 0
        atexit.register(self.close)

    def __call__(self, *arguments: Any) -> Any:
        with self._lock:
            for tries_left in reversed(range(TRIES)):
                self._number += 1
                reply, began = None, time.monotonic()
                try:
                    reply = self._ask(encode([self._number, LIMITS.processor_s, LIMITS.memory_bytes, arguments]))
                except TimeoutError:
                    was_stopped = time.monotonic() - began > LIMITS.clock_s + STOPPED_S
                    if not (was_stopped and tries_left):
                        self._judge_late()
                if reply is not None:
                    break
                if self._end() == -signal.SIGPROF:
                    raise GaveUpError(f"it takes more than {LIMITS.processor_s:g} s of processor time")
        kind, value = reply or ("raised", "it crashes the process that reads it")
        if kind == "raised":
            raise GaveUpError(value)
        return value

    def _judge_late(self) -> NoReturn:
        had_s = processor_s(self._process) - self._had_s
        self._end()
        how = f"it got {had_s:.2g} s of processor time in {LIMITS.clock_s:g} s"
        raise GaveUpError(how) if had_s >= LIMITS.processor_s / 4 else RewardError(f"an answer is not judged: {how}")

    def close(self) -> None:
        with self._lock:
            if self._process and self._parent == os.getpid():
                self._end()

    def _ask(self, call: bytes) -> list[Any] | None:
        if self._socket is None or self._parent != os.getpid():
            self._socket = self._start()
        frames = unpacker()
        self._socket.settimeout(LIMITS.clock_s)
        self._had_s = processor_s(self._process)
        with suppress(ConnectionError):
            self._socket.sendall(call)
            while data := self._socket.recv(2**18):
                frames.feed(data)
                for number, kind, value in frames:
                    if number == self._number:
                        return [kind, value]
        return None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._parent, self._process = os.getpid(), os.fork()
        if self._process == 0:
            try:
                gc.freeze()  # else the collector would copy the worker's pages
                close_all_but({0, 1, 2, theirs.fileno()})
                _serve(self.function, theirs)
            finally:
                os._exit(1)
        theirs.close()
        return ours

    def _end(self) -> int:
        if self._socket is not None:
            self._socket.close()
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        status = os.waitpid(self._process, 0)[1]
        self._process, self._socket = 0, None
        return os.waitstatus_to_exitcode(status)


def processor_s(process: int) -> float:
    """By clock_getcpuclockid(3)."""
    return time.clock_gettime((~process << 3) | 2)


def _serve(function: Callable[..., Any], calls: socket.socket) -> NoReturn:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends any computation
    frames = unpacker()
    while data := calls.recv(2**18):
        frames.feed(data)
        for number, processor_s, memory_bytes, arguments in frames:
            bound_memory(memory_bytes)
            signal.setitimer(signal.ITIMER_PROF, processor_s)
            try:
                reply = encode([number, "value", function(*arguments)])
            except Exception as error:
                reply = encode([number, "raised", one_line(exception_text(error))])
            signal.setitimer(signal.ITIMER_PROF, 0)
            calls.sendall(reply)
    os._exit(0)


def bound_memory(more: int) -> None:
    """Let this process allocate `more` bytes beyond its size."""
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[5]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = held + more if hard == resource.RLIM_INFINITY else min(held + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
