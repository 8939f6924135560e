"""A guard: runs one command and sees to it that nothing the command started outlives it, or outlives the guard's owner.

The owner (`actors/supervise/keeper.py` for each process of a run, `actors/__main__.py` for the launcher) makes a `Guarded`, which
starts this file by path with the standard library and psutil only. Over a socket the owner says `{"argv": [...]}` once,
then `signal N` or `kill`; the guard answers `{"pid": N}` and, when nothing is left, `{"code": N, "left": N}`. The guard
waits for the owner's words and for SIGCHLD. An owner that dies closes the socket, which means `kill`: no command
outlives its owner, even one killed with SIGKILL. Being the subreaper of all that descends from the command, the guard
also finds what has left its session, as torch elastic's ranks do. A command whose guard is killed gets SIGKILL from the
kernel.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 2.0
"""How long descendants may take to follow a command that ended."""
STUCK_S = 30.0
"""A descendant that is there so long after SIGKILL (stuck in a driver) is left, and counted."""
TRACKER = "multiprocessing.resource_tracker"
"""Python's process that unlinks the shared memory of the dead: it ends by itself as soon as the others have."""
LOST = 137
"""Exit code of a command whose guard was killed."""


class Guarded:
    """The owner's end: a command under guard. `name` is what process listings show; `output` a file descriptor.

    Raises OSError when the system starts no more processes.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        self._owner, theirs = socket.socketpair()
        with theirs:
            starter = subprocess.Popen(
                [sys.executable, "-I", __file__, name],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                cwd=cwd,
                env=env,
            )
        starter.wait()  # the guard itself is no child of ours: see `main`
        self._owner.sendall(json.dumps({"argv": list(argv)}).encode() + b"\n")
        self._words = self._owner.makefile("r", encoding="utf-8")
        self.pid: int | None = self._hear().get("pid")
        """Of the command; None if it could not be started."""

    def signal(self, number: int) -> None:
        """Send the command itself, not its children, a signal."""
        self._say(f"signal {number}\n")

    def kill(self) -> None:
        """SIGKILL for the command and all that descends from it."""
        self._say("kill\n")

    def wait(self) -> int:
        """The exit code (128 + N for signal N), once the command and all its descendants are gone."""
        code = self._hear().get("code", LOST)
        self._words.close()
        self._owner.close()
        return int(code)

    def _say(self, words: str) -> None:
        with contextlib.suppress(OSError):
            self._owner.sendall(words.encode())

    def _hear(self) -> dict[str, Any]:
        try:
            line = self._words.readline()
        except OSError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer


class Guard:
    """The guard's end; `run` returns when the command and all its descendants are gone."""

    def __init__(self, owner: socket.socket) -> None:
        self.owner, self.said = owner, b""
        self.woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.command: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.killed = False

    def run(self) -> None:
        """Start the command the owner names, watch it, clear up after it, report its exit code."""
        while b"\n" not in self.said:
            words = self.owner.recv(65536)
            if not words:
                return
            self.said += words
        order, _, self.said = self.said.partition(b"\n")
        self.owner.setblocking(False)
        try:
            self.start(json.loads(order)["argv"])
        except OSError as error:
            print(f"cannot start {json.loads(order)['argv'][0]}: {error.strerror}", file=sys.stderr, flush=True)
            self.say({})
            self.say({"code": 127})
            return
        self.obey()
        while self.code is None and not self.killed:
            self.wait(None)
        left = self.clear()
        self.say({"code": LOST if self.code is None else self.code, "left": left})

    def start(self, argv: list[str]) -> None:
        libc, guard = ctypes.CDLL(None), os.getpid()

        def bind() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:  # the guard died before the line above
                os.kill(os.getpid(), signal.SIGKILL)

        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=bind)
        self.say({"pid": self.command.pid})

    def wait(self, seconds: float | None) -> None:
        """Until the owner speaks, a child ends, or `seconds` have passed."""
        watched: list[Any] = [self.woken] if self.killed else [self.woken, self.owner]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self.woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.woken, 4096)
        if self.owner in ready:
            self.listen()
        self.reap()

    def listen(self) -> None:
        try:
            words = self.owner.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        self.killed = not words
        self.said += words
        self.obey()

    def obey(self) -> None:
        *lines, self.said = self.said.split(b"\n")
        for line in lines:
            if line == b"kill":
                self.killed = True
            elif self.command is not None and self.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.command.pid, int(line.split()[1]))

    def reap(self) -> None:
        """Take the exit codes of all that ended; as their subreaper nobody else will."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if self.command is not None and found[0] == self.command.pid:
                    code = os.waitstatus_to_exitcode(found[1])
                    self.code = self.command.returncode = code if code >= 0 else 128 - code

    def clear(self) -> int:
        """End all descendants: SIGTERM and a grace, then SIGKILL until none is there. Returns how many are left."""
        now = time.monotonic()
        send(signal.SIGTERM if not self.killed else signal.SIGKILL, spare=TRACKER)
        while descendants() and not self.killed and (left := now + GRACE_S - time.monotonic()) > 0:
            self.wait(min(left, 0.2))  # a grandchild's end wakes nobody
        now = time.monotonic()
        while descendants() and time.monotonic() < now + STUCK_S:
            send(signal.SIGKILL, spare=TRACKER if time.monotonic() < now + 1 else "")
            self.wait(0.1)
        self.reap()
        return len(descendants())

    def say(self, words: dict[str, object]) -> None:
        with contextlib.suppress(OSError):
            self.owner.sendall(json.dumps(words).encode() + b"\n")


def descendants() -> list[psutil.Process]:
    """All that descends from this process and still runs."""
    return [process for process in psutil.Process().children(recursive=True) if _runs(process)]


def send(number: int, spare: str) -> None:
    """Send all descendants a signal, but those with `spare` in their command line."""
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            if not spare or spare not in " ".join(process.cmdline()):
                process.send_signal(number)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def main() -> None:
    """Step out of the owner's children (Ray kills those of a dying actor, one level deep), then guard."""
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, set())  # a mask would reach the command
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: that would reach the command
    with socket.socket(fileno=0) as owner:
        Guard(owner).run()


if __name__ == "__main__":
    main()
