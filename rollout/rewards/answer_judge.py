"""Judges an answer in a process of its own, with a limit on its processor time: an answer is text of the policy, and
whatever it does to the code that reads it, it costs the reward of this answer only.

Used by built-in rewards whose time depends on the answer (`math.py`, `text_match.py`). The process is a fork of the
reward worker, serves one call after another and is replaced when an answer ends it. It ends with the worker.
"""

import atexit
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
from rollout.errors import RewardError

GAVE_UP = "gave_up"
"""The metric: 1 for an answer that could not be judged within the limits, else 0."""


@dataclass
class JudgeLimits:
    """What one call may take, in every judge of this process."""

    processor_s: float = 2.0
    """Right answers take 0.01 to 0.1 s. Not the clock's time: a busy machine must not cost a reward."""
    clock_s: float = 7.0
    """After that a call that had a quarter of `processor_s` is given up too: soon the whole worker would be killed."""
    memory_bytes: int = 2**30
    """Above what the worker has."""

    def stay_below(self, timeout_s: float, memory_gib: float | None) -> None:
        """One answer never reaches the limits of a whole worker, `reward.timeout_s` and `reward.memory_gib`."""
        self.processor_s, self.clock_s = min(2.0, timeout_s / 2), 0.7 * timeout_s
        self.memory_bytes = min(2**30, int((memory_gib or 8) * 2**28))


LIMITS = JudgeLimits()
TRIES = 2
"""A process that ends by itself may have been killed from outside: the answer is given to a second one."""


class GaveUpError(Exception):
    """The answer takes too long or too much memory, or the code that reads it fails: the text says why, in one line."""


class AnswerJudge:
    """Calls `function` with plain values in a process that may be killed. Raises GaveUpError; RewardError where the
    machine gives the process too little time to say so. Threads take turns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self._lock = function, threading.Lock()
        self._process = self._parent = 0
        self._had_s = 0.0
        """Processor time of the process before this call."""
        self._socket: socket.socket | None = None
        atexit.register(self.close)

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns."""
        call = encode([LIMITS.processor_s, LIMITS.memory_bytes, arguments])
        with self._lock:
            for _ in range(TRIES):
                try:
                    reply = self._ask(call)
                except TimeoutError:
                    self._judge_late()
                if reply is not None:
                    break
                if self._end() == -signal.SIGPROF:
                    raise GaveUpError(f"it takes more than {LIMITS.processor_s:g} s of processor time")
        kind, value = reply or ("raised", "it ends the process that reads it")
        if kind == "raised":
            raise GaveUpError(value)
        return value

    def _judge_late(self) -> NoReturn:
        had_s = processor_s(self._process) - self._had_s
        self._end()
        how = f"it has had {had_s:.2g} s of processor time in {LIMITS.clock_s:g} s"
        raise GaveUpError(how) if had_s >= LIMITS.processor_s / 4 else RewardError(f"an answer is not judged: {how}")

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process and self._parent == os.getpid():
                self._end()

    def _ask(self, call: bytes) -> list[Any] | None:
        """The reply; None if the process has ended."""
        if self._socket is None or self._parent != os.getpid():  # a fork of the worker starts its own
            self._socket = self._start()
        frames = unpacker()
        self._socket.settimeout(LIMITS.clock_s)
        self._had_s = processor_s(self._process)
        with suppress(ConnectionError):
            self._socket.sendall(call)
            while data := self._socket.recv(2**18):
                frames.feed(data)
                for reply in frames:
                    return list(reply)
        return None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._parent, self._process = os.getpid(), os.fork()
        if self._process == 0:
            try:
                close_all_but({0, 1, 2, theirs.fileno()})
                _serve(self.function, theirs)
            finally:
                os._exit(1)
        theirs.close()
        return ours

    def _end(self) -> int:
        """End the process; its exit code, negative for a signal."""
        if self._socket is not None:
            self._socket.close()
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)  # does nothing to one that has ended
        status = os.waitpid(self._process, 0)[1]
        self._process, self._socket = 0, None
        return os.waitstatus_to_exitcode(status)


def processor_s(process: int) -> float:
    """The processor time that a process has had, by its clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~process << 3) | 2)


def _serve(function: Callable[..., Any], calls: socket.socket) -> NoReturn:
    """In the process: calls, one after another, until the worker closes the connection."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process in the middle of any computation
    frames = unpacker()
    while data := calls.recv(2**18):
        frames.feed(data)
        for processor_s, memory_bytes, arguments in frames:
            bound_memory(memory_bytes)
            signal.setitimer(signal.ITIMER_PROF, processor_s)
            try:
                reply = encode(["value", function(*arguments)])
            except Exception as error:  # the boundary of the process: what raises here, raises for this answer
                reply = encode(["raised", one_line(exception_text(error))])
            signal.setitimer(signal.ITIMER_PROF, 0)
            calls.sendall(reply)
    os._exit(0)


def bound_memory(more: int) -> None:
    """Let this process have so many bytes more than it has now."""
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[5]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = held + more if hard == resource.RLIM_INFINITY else min(held + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
