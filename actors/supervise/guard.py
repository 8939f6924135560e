"""A guard: runs one command and makes sure that nothing the command started outlives it or the guard's owner.

The owner's `Guarded` runs this file by path, isolated (`python -I`), so it imports only the standard library, psutil
and two small modules of `configs`. The socket carries the command line as a JSON list, then numbers of signals; and
back `{"pid": N}` and, when nothing is left, `{"code": N}`. The end of the owner's messages means kill, so no command
outlives an owner that got SIGKILL.

The guard is the subreaper of descendants, so it also finds those that left the session, as torch elastic's ranks do. If
the guard is killed, the kernel kills the command.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil

if __name__ == "__main__":  # isolated Python does not search this folder
    sys.path.insert(0, os.fspath(Path(__file__).parents[2]))

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A scheduler may send these to all processes of a run; a guard leaves them to its owner."""
GRACE_S = 2.0
"""Descendants get this time to end after the command."""
STUCK_S = 30.0
"""A descendant that outlives SIGKILL so long is stuck in a driver."""
TRACKER = "multiprocessing.resource_tracker"
"""Unlinks shared memory of dead processes, then ends by itself."""
MESSAGE_BYTES = 1 << 18
"""More than the kernel takes for one message, 208 KiB."""
LOST = 137
"""Exit code of a command whose guard was killed."""


class Guarded:
    """The owner's end. Raises OSError if no process can start."""

    def __init__(self, name: str, argv: Sequence[str], **options: Any) -> None:
        self._socket, guards_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        OWNED.add(self)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # the guard inherits it until it has handlers
        try:
            with guards_end:
                line = [sys.executable, "-I", __file__, name]
                starter = subprocess.Popen(line, stdin=guards_end.fileno(), **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        starter.wait()  # it has forked the guard: see `main`
        self._socket.sendall(json.dumps(argv).encode())
        self.pid: int | None = receive(self._socket, {}).get("pid")
        """None if the command could not be started."""

    def disown(self) -> None:
        """Close this process's end only."""
        self._socket.close()

    def signal(self, number: int) -> None:
        """Send a signal to the command alone."""
        send(self._socket, int(number))

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait(self) -> int:
        """The exit code, 128 + N for signal N, once nothing is left; LOST, once the command has ended, if the guard was
        killed."""
        with self._socket:
            code = receive(self._socket, {}).get("code")
        if code is None and self.pid is not None:  # the kernel closes a dead guard's socket before it kills the command
            await_end(self.pid)
        return LOST if code is None else int(code)


OWNED: WeakSet[Guarded] = WeakSet()


def disown() -> None:
    """Leave commands to the process that this one was forked from, which it may outlive."""
    for guarded in list(OWNED):
        guarded.disown()


os.register_at_fork(after_in_child=disown)


class Guard:
    """The guard's end."""

    def __init__(self, owner: socket.socket) -> None:
        self.owner = owner
        self.signals, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.command: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.killed = False

    def run(self) -> None:
        argv = receive(self.owner, [])
        if not argv:
            return
        try:
            self.start(argv)
        except OSError as error:
            print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
            send(self.owner, {"pid": None})
            send(self.owner, {"code": 127})
            return
        while self.code is None and not self.killed:
            self.wait(None)
        self.end_descendants()
        send(self.owner, {"code": LOST if self.code is None else self.code})

    def start(self, argv: list[str]) -> None:
        # here: `headrace` loads this file for `Guarded` alone, beside a user's package `configs`
        from configs.parent_death import adopt_orphans, end_with_parent

        guard = os.getpid()

        def die_with_guard() -> None:
            end_with_parent()
            if os.getppid() != guard:  # the guard died before the line above
                os.kill(os.getpid(), signal.SIGKILL)

        adopt_orphans()
        quiet = subprocess.DEVNULL
        self.command = subprocess.Popen(argv, stdin=quiet, start_new_session=True, preexec_fn=die_with_guard)
        send(self.owner, {"pid": self.command.pid})

    def wait(self, timeout_s: float | None) -> None:
        watched: list[Any] = [self.signals] if self.killed else [self.signals, self.owner]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if self.signals in ready:
            os.read(self.signals, 4096)
        if self.owner in ready:
            self.obey()
        self.reap()

    def obey(self) -> None:
        """Nothing comes from an owner that kills or is dead."""
        number = receive(self.owner, None)
        if number is None:
            self.killed = True
        elif self.command is not None and self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.command.pid, number)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if self.command is not None and found[0] == self.command.pid:
                    code = os.waitstatus_to_exitcode(found[1])
                    self.code = self.command.returncode = code if code >= 0 else 128 - code

    def end_descendants(self) -> None:
        start = time.monotonic()
        send_to_descendants(signal.SIGTERM if not self.killed else signal.SIGKILL, spare=TRACKER)
        while descendants() and not self.killed and (left_s := start + GRACE_S - time.monotonic()) > 0:
            self.wait(min(left_s, 0.2))  # the end of a grandchild sends no signal to the guard
        start = time.monotonic()
        while descendants() and time.monotonic() < start + STUCK_S:
            send_to_descendants(signal.SIGKILL, spare=TRACKER if time.monotonic() < start + 1 else "")
            self.wait(0.1)
        self.reap()


def send(end: socket.socket, message: object) -> None:
    """The other end may be dead."""
    with contextlib.suppress(OSError):
        end.sendall(json.dumps(message).encode())


def receive(end: socket.socket, at_end: Any) -> Any:
    """The next JSON value, or `at_end` when the other end is closed or dead."""
    with contextlib.suppress(OSError):
        try:
            message = end.recv(MESSAGE_BYTES)
        except ConnectionResetError:  # it ended before it read a message of ours; what it sent is still here
            message = end.recv(MESSAGE_BYTES)
        if message:
            return json.loads(message)
    return at_end


def await_end(pid: int) -> None:
    """Wait, STUCK_S at most, until process `pid`, which need not be a child, has ended."""
    with contextlib.suppress(OSError):  # it has ended already, or the kernel has no such call
        process = os.pidfd_open(pid)
        try:
            waiting = select.poll()
            waiting.register(process, select.POLLIN)
            waiting.poll(1000 * STUCK_S)
        finally:
            os.close(process)


def descendants() -> list[psutil.Process]:
    """All descendants of this process that still run."""
    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def send_to_descendants(number: int, spare: str) -> None:
    """Send a signal to all descendants but those with `spare` in their command line."""
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            if not spare or spare not in " ".join(process.cmdline()):
                process.send_signal(number)


def main() -> None:
    """Ray kills the children of a dying actor, so the guard must not be a child of its owner."""
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (*STOPPING, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    signal.pthread_sigmask(signal.SIG_SETMASK, set())  # the command would inherit a mask
    with socket.socket(fileno=0) as owner:
        Guard(owner).run()


if __name__ == "__main__":
    from configs.inner_command import inner_words

    inner_words("NAME")
    main()
