"""The warden: the parent process of one worker, which enforces its limits and leaves nothing of it behind.

Started by `worker_process.py` as `python -c`; forks the worker before anything is imported, then waits for: output of
the worker (captured), its end, requests of the server, the server's end. It kills a worker whose call is past its time
limit, or which uses too much memory or too many processes, and with it all that the worker started: as the child
subreaper it inherits even processes that left their session or lost their parent. It shares no GIL with users' code,
so a call that never releases the GIL is killed all the same.

Time and memory are limits of one call, measured here. The worker writes when a call starts into `CallState`, memory
that both share, so that neither needs a message. The memory limit is on the anonymous memory of all processes of
the worker, read from /proc: RLIMIT_AS would count address space that CUDA, Java or a thread pool only reserve. As a
brake for allocations that are faster than the watch, each process has RLIMIT_DATA at twice the limit.
"""

import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.cage.frames import FrameReader, encode

TAIL_BYTES = 64 * 2**10
"""Output kept in memory."""
LOG_BYTES = 2**20
"""Size at which a log file is rotated; one old file is kept."""
WATCH_S = 0.2
"""Interval at which memory is read."""
SCAN_INTERVAL_PER_COST = 100
"""Reading the process table takes longer the more processes a machine has: it may take one part in 100 of a core."""
MAX_PROCESSES = 256
"""Processes of one worker. A limit of the kernel (RLIMIT_NPROC) would count all processes of the user."""
KILL_S = 5.0
"""Longest wait for killed processes to end; one that is stuck in the kernel is left to init."""
DUMP_SIGNAL = signal.SIGRTMAX - 3
"""Makes the worker print the stacks of its threads (faulthandler), before it is killed for its time."""
DUMP_S = 0.5
"""Longest wait for these stacks."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class CallState:
    """What a worker tells its warden while it runs: eight numbers in memory that both processes share."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")

    def __getitem__(self, index: int) -> float:
        return self._numbers[index]

    def __setitem__(self, index: int, value: float) -> None:
        self._numbers[index] = value


DEADLINE, MARK, CURRENT, STARTED, DRAINED, RESIDENT = range(6)
"""Indices in CallState. By the worker: when the call must be over (`time.monotonic()`, 0 for no call), the output's
offset at its start, the running episode, the calls started. By the warden: bytes of output read, bytes of memory."""


class Output:
    """The last output of a worker, in memory and, with `path`, in a log file and its one predecessor."""

    def __init__(self, path: str | None) -> None:
        self.total, self._tail, self._path, self._log = 0, bytearray(), path, None
        if path is not None:
            with suppress(OSError):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._log = open(path, "ab", buffering=0)  # noqa: SIM115 (open for as long as the process)

    def add(self, data: bytes) -> None:
        """Take in what the worker printed."""
        self.total += len(data)
        self._tail += data[-TAIL_BYTES:]
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        with suppress(OSError):  # a full disk costs the log, not the worker
            self._write(data)

    def _write(self, data: bytes) -> None:
        while self._log is not None and data:
            room = LOG_BYTES - self._log.tell()
            if room <= 0:
                self._log.close()
                os.replace(f"{self._path}", f"{self._path}.1")
                self._log = open(f"{self._path}", "wb", buffering=0)  # noqa: SIM115
                data = data[-2 * LOG_BYTES :]
                room = LOG_BYTES
            self._log.write(data[:room])
            data = data[room:]

    def since(self, mark: float) -> str:
        """The output after this offset, its last 64 KiB."""
        wanted = min(TAIL_BYTES, self.total - int(mark))
        if wanted <= 0:
            return ""
        cut = self.total - int(mark) - wanted
        return (f"[{cut} bytes cut] ... " if cut else "") + self._tail[-wanted:].decode(errors="replace")


class Warden:
    """Watches one worker until it ends; `run` returns after the server was told how."""

    def __init__(self, worker: int, setup: dict[str, Any], status: socket.socket, capture: int, state: CallState):
        self.worker, self.status, self.capture, self.state = worker, status, capture, state
        self.memory = setup["memory_bytes"]
        self.output = Output(setup["log"])
        self._told_to_end, self._printing = False, True
        self._wakeup, wakeup = os.pipe()
        for fd in (self._wakeup, wakeup, capture):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        self._poll = select.poll()
        for fd in (self._wakeup, capture, status.fileno()):
            self._poll.register(fd, select.POLLIN)
        self._measure_at = self._scan_at = 0.0
        self._processes: list[int] = []

    def _on_term(self, *_: object) -> None:
        self._told_to_end = True

    def run(self) -> None:
        """Wait for the worker's end, bring it about where a limit says so, and tell the server."""
        end = None
        while end is None:
            now = time.monotonic()
            until = min(self._measure_at, self.state[DEADLINE] or self._measure_at)
            ready = {fd for fd, _ in self._poll.poll(max(0.0, until - now) * 1000)}
            if self.capture in ready:
                self._drain(1)
            if self._wakeup in ready:
                with suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            end = (self._answer() if self.status.fileno() in ready else None) or self._reap() or self._judge()
        self._finish(end)

    def _answer(self) -> dict[str, Any] | None:
        """The server asked for the output of the current call, or is gone."""
        try:
            asked = self.status.recv(64)
        except OSError:
            asked = b""
        if not asked:
            return {"how": "closed"}
        self._drain(64)
        self._tell({"output": self.output.since(self.state[MARK])})
        return None

    def _reap(self) -> dict[str, Any] | None:
        """How the worker ended, if it did; other processes that ended are forgotten."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return {"how": "lost"}
            if ended is None:
                return None
            if ended.si_pid == self.worker:  # not waited for yet: its process group cannot be another's meanwhile
                exited = ended.si_code == os.CLD_EXITED
                return {"how": "exit" if exited else "signal", "number": ended.si_status}
            os.waitpid(ended.si_pid, 0)

    def _judge(self) -> dict[str, Any] | None:
        """The limit that the worker broke, if any."""
        if self._told_to_end:
            return {"how": "closed"}
        now = time.monotonic()
        if 0 < self.state[DEADLINE] <= now:
            self._dump_stacks()
            return {"how": "timed_out"}
        return self._measure(now) if now >= self._measure_at else None

    def _measure(self, now: float) -> dict[str, Any] | None:
        """Judge memory and the number of processes."""
        if now >= self._scan_at:
            self._processes = descendants(os.getpid())
            self._scan_at = now + SCAN_INTERVAL_PER_COST * (time.monotonic() - now)
        resident = sum(map(anonymous_bytes, self._processes))
        if self.memory and resident > self.memory and len(self._processes) > 1:  # pages that forks share count once
            resident = sum(map(proportional_bytes, self._processes))
        self.state[RESIDENT] = resident
        self._measure_at = now + WATCH_S
        if self.memory and resident > self.memory:
            return {"how": "out_of_memory"}
        return {"how": "processes"} if len(self._processes) > MAX_PROCESSES else None

    def _dump_stacks(self) -> None:
        """Have the worker print where it is: the last lines of its output tell why it took so long."""
        with suppress(ProcessLookupError):
            os.kill(self.worker, DUMP_SIGNAL)
        until, wait_s = time.monotonic() + DUMP_S, DUMP_S
        while self._printing and select.select([self.capture], [], [], wait_s)[0] and time.monotonic() < until:
            self._drain(1)
            wait_s = 0.02

    def _drain(self, times: int) -> None:
        for _ in range(times):
            try:
                data = os.read(self.capture, 2**20)
            except BlockingIOError:
                return
            if not data:  # nobody is left who could print
                if self._printing:
                    self._poll.unregister(self.capture)
                self._printing = False
                return
            self.output.add(data)
            self.state[DRAINED] = self.output.total

    def _finish(self, end: dict[str, Any]) -> None:
        self._kill_all()
        self._drain(64)
        end |= {"started": int(self.state[STARTED]), "current": int(self.state[CURRENT])}
        self._tell(end | {"output": self.output.since(self.state[MARK])})

    def _kill_all(self) -> None:
        """Kill every process below this one. Killing the group is atomic, also against a fork bomb."""
        until = time.monotonic() + KILL_S
        with suppress(ProcessLookupError):
            os.killpg(self.worker, signal.SIGKILL)
        while time.monotonic() < until:
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            self._poll.poll(5)

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the server is gone
            self.status.sendall(encode(message))


def descendants(root: int) -> list[int]:
    """The processes below `root`, from /proc; those that ended but were not waited for do not count."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, parent = stat.read().rpartition(b")")[2].split(None, 2)[:2]
                children.setdefault(int(parent), []).append(0 if state == b"Z" else int(name))
    found, new = [], children.get(root, [])
    while new:
        found += new
        new = [child for pid in new if pid for child in children.get(pid, [])]
    return [pid for pid in found if pid]


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs; 0 if it ended."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as statm:
        numbers = statm.read().split()
        return (int(numbers[1]) - int(numbers[2])) * mmap.PAGESIZE
    return 0


def proportional_bytes(pid: int) -> int:
    """The same, where each of n processes that share a page counts 1/n of it."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
        for line in rollup:
            if line.startswith(b"Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return anonymous_bytes(pid)


def main(control_fd: int, status_fd: int) -> None:
    """Fork the worker; this process stays as its warden."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    control, status = socket.socket(fileno=control_fd), socket.socket(fileno=status_fd)
    reader, setups = FrameReader(), list[Any]()
    while not setups:
        data = status.recv(2**16)
        if not data:
            return
        setups = reader.feed(data)
    setup = setups[0]
    if os.getppid() != setup["server"]:  # it ended before PDEATHSIG was set
        return
    state, (capture, printing) = CallState(), os.pipe()
    with suppress(OSError):
        fcntl.fcntl(printing, fcntl.F_SETPIPE_SZ, 2**20)
    warden = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(capture)
        status.close()
        _become_worker(setup, warden, printing)
        from rollout.cage.call_loop import work  # the warden stays small: it imports none of this

        work(setup, control, state, printing)
        return
    control.close()
    os.close(printing)
    try:
        Warden(worker, setup, status, capture, state).run()
    except BaseException:  # the outermost frame of this process: the server is told, the worker killed
        with suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
            status.sendall(encode({"how": "lost", "started": 0, "current": 0, "output": traceback.format_exc()}))
    os._exit(0)


def _become_worker(setup: dict[str, Any], warden: int, printing: int) -> None:
    """In the worker: a session of its own, limits, and output that goes to the warden."""
    os.setsid()  # `kill(0, ...)` in users' code reaches the worker, not the warden
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != warden:
        os._exit(1)
    os.dup2(printing, 1)
    os.dup2(printing, 2)
    sys.stdout = sys.__stdout__ = open(1, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if setup["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (2 * setup["memory_bytes"],) * 2)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the kernel takes this process first


def unread_bytes(printing: int) -> int:
    """Bytes of output that the warden has not read yet."""
    return int(struct.unpack("i", fcntl.ioctl(printing, termios.FIONREAD, b"\0\0\0\0"))[0])


def prctl(option: int, value: int) -> None:
    """prctl(2); raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
