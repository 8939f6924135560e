"""Episodes in processes of their own: a user's program, or a function that is not `async`.

    worker                 guard (one per episode)        the user's function or program
    run_apart  <-result--  waits; kills all below it  <-  its result, or its output

Guard and program are forks of the worker. The guard is a subreaper; if it is killed, the program dies with it, and the
warden kills the rest.
"""

import asyncio
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgpack

from configs.parent_death import adopt_orphans, end_with_parent
from rollout.cage.failure_text import ToldError
from rollout.cage.frames import BAD_BYTES, MAX_BYTES
from rollout.cage.warden import (
    KILL_S,
    KILLED,
    OUT_OF_MEMORY,
    TOO_MANY,
    TOO_MANY_PROCESSES,
    exit_text,
    kill_all,
)

TAIL_BYTES = 2**16
Program = Callable[[int], object]
"""Writes to a file descriptor, and may end in any way."""


@dataclass(frozen=True)
class Apart:
    """How a program runs. `memory`: the limit as text. `echo`: print all output, keep only its end. `files`: the
    worker's files to keep open."""

    name: str
    memory: str
    echo: bool = False
    files: frozenset[int] = frozenset()


async def run_apart(how: Apart, program: Program) -> bytes:
    """Return what `program` wrote, once all that it started has ended. Raises ToldError."""
    ours, theirs = socket.socketpair()
    worker = os.getpid()
    guard = os.fork()
    if guard == 0:
        try:
            close_all_but({0, 1, 2, theirs.fileno(), *how.files})
            _guard(how, theirs, worker, program)
        finally:
            os._exit(1)
    theirs.close()
    connecting = asyncio.ensure_future(asyncio.open_unix_connection(sock=ours))
    try:
        reader, _ = await asyncio.shield(connecting)
        said = await reader.read()
    except asyncio.CancelledError:
        reader, writer = await connecting
        writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_S + 1):
                await reader.read()
        raise
    finally:
        if connecting.done() and not connecting.cancelled() and not connecting.exception():
            connecting.result()[1].close()
        with suppress(ProcessLookupError):
            os.kill(guard, signal.SIGKILL)  # needed only if the program stopped it
        os.waitpid(guard, 0)
    return heard(how.name, said)


def heard(name: str, said: bytes) -> bytes:
    try:
        origin, text = msgpack.unpackb(said)
    except BAD_BYTES:
        raise ToldError("died", f"{name} ended its processes (the guard of them was killed)") from None
    if origin:
        raise ToldError(origin, f"{name} {text}")
    return bytes(text)


def close_all_but(kept: set[int]) -> None:
    for fd in set(map(int, os.listdir("/proc/self/fd"))) - kept:
        with suppress(OSError):
            os.close(fd)


class Exceeded(Exception):
    """The warden signalled an exceeded limit."""


def _guard(how: Apart, worker: socket.socket, parent: int, program: Program) -> NoReturn:
    adopt_orphans()
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    home, (heard_fd, said_fd) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(heard_fd)
        worker.close()
        _become_program(home, program, said_fd)
    os.close(said_fd)
    said = Said(heard_fd, how.echo)
    try:
        signal.signal(OUT_OF_MEMORY, _exceed)
        signal.signal(TOO_MANY, _exceed)
        origin, reason = _wait(child, worker, said)
    except Exceeded as error:
        limit = f"used more memory than {how.memory}; {KILLED}"
        many = error.args[0] == TOO_MANY
        origin, reason = ("died", TOO_MANY_PROCESSES) if many else ("out_of_memory", limit)
    signal.signal(OUT_OF_MEMORY, signal.SIG_IGN)
    signal.signal(TOO_MANY, signal.SIG_IGN)
    kill_all(child)
    while said.read():  # all writers are gone
        pass
    if said.too_long:
        origin, reason = "unanswerable", f"returned more than the {MAX_BYTES // 2**20} MiB of a message"
    with suppress(OSError):
        worker.sendall(msgpack.packb([origin, reason] if origin else ["", bytes(said.kept)]))
    os._exit(0)


def _exceed(number: int, frame: object) -> NoReturn:
    raise Exceeded(number)


def _wait(child: int, worker: socket.socket, said: "Said") -> tuple[str, str]:
    poll, ended = select.poll(), os.pidfd_open(child)
    for fd in (ended, worker.fileno(), said.fd):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if worker.fileno() in ready:
            return "died", "got a signal to end"
        if said.fd in ready and not said.read():
            poll.unregister(said.fd)
        if ended in ready:
            how = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            if how is None or how.si_code != os.CLD_EXITED:
                return "died", exit_text(how)
            return "exited" if how.si_status else "", exit_text(how)


class Said:
    """What the program writes."""

    def __init__(self, fd: int, echo: bool) -> None:
        self.fd, self.echo, self.kept, self.too_long = fd, echo, bytearray(), False
        os.set_blocking(fd, False)

    def read(self) -> bool:
        try:
            data = os.read(self.fd, 2**18)
        except BlockingIOError:
            return False
        if self.echo:
            self.kept += data
            del self.kept[:-TAIL_BYTES]
            with suppress(OSError):
                os.write(1, data)
        elif len(self.kept) + len(data) > MAX_BYTES:
            self.too_long = True
        else:
            self.kept += data
        return bool(data)


def _become_program(guard: int, program: Program, said_fd: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        end_with_parent()
        if os.getppid() == guard:
            program(said_fd)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(code)


def write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
