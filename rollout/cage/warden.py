"""The parent process of one worker: enforces its limits and leaves nothing of it behind.

As subreaper it inherits even processes that left their session or lost their parent. It shares no GIL with users' code.
The memory limit is on anonymous memory: RLIMIT_AS would count address space that CUDA, Java or thread pools only
reserve. RLIMIT_DATA at twice the limit stops allocations faster than the watch.
"""

import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.parent_death import adopt_orphans, end_with_parent
from configs.plain_text import colourless, conceal, visible
from configs.variables import open_private, private_folder
from rollout.cage import CagedFunction
from rollout.cage.frames import encode, unpacker
from rollout.cage.process_table import (
    anonymous_bytes,
    below,
    children_of_all,
    has_signal,
    kill_below,
    proportional_bytes,
    stopped,
)

TAIL_BYTES = 4096
LINE_BYTES = 2**16
LOG_BYTES = 2**20
WATCH_S = 0.2
SCAN_INTERVAL_PER_COST = 20
"""Reading the process table takes at most 1/20 of a core."""
MAX_PROCESSES = 256
"""Most processes of one episode apart; RLIMIT_NPROC would count all of the user's."""
OUT_OF_MEMORY, TOO_MANY = signal.SIGUSR1, signal.SIGUSR2
STOPPED_S = 1.0
"""A wait so much longer means that this process was stopped."""
KILL_S = 5.0
"""Processes stuck in the kernel are left to init after this time."""
DUMP_SIGNAL = signal.SIGRTMAX - 3
DUMP_S, BLOCKED_S, DUMP_LOOK_S = 5.0, 0.5, 0.02
"""Most time for the stacks of a worker, which may get no processor for long. One that has blocked the signal goes on,
and nobody limits its memory meanwhile."""
KILLED, TOO_MANY_PROCESSES = "its process was killed", "started too many processes; all of them were killed"

DEADLINE, CURRENT, STARTED, APART, STOPPED = range(5)
"""Indices in CallState: deadline in `time.monotonic()` (0: no call), the call whose code runs, calls started, whether
episodes run apart, seconds for which warden and worker were stopped."""


class CallState:
    """Numbers that worker and warden share."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")

    def __getitem__(self, index: int) -> float:
        return self._numbers[index]

    def __setitem__(self, index: int, value: float) -> None:
        self._numbers[index] = value


class Warden:
    """Watches one worker and reports why it ended."""

    def __init__(self, function: CagedFunction, worker: int, status: socket.socket, capture: int, state: CallState):
        self.function, self.worker, self.status, self.capture, self.state = function, worker, status, capture, state
        self._tail, self._orphaned, self._server = b"", False, os.getppid()
        self._poll = select.poll()
        self._ended = os.pidfd_open(worker)
        os.set_blocking(capture, False)
        for fd in (self._ended, capture, status.fileno()):
            self._poll.register(fd, select.POLLIN)
        signal.signal(signal.SIGTERM, self._on_term)
        self._measure_at = self._scan_at = self._stop_at = 0.0
        self._begun = b""
        self._processes: dict[int, list[int]] = {}
        """All processes under 0, or those of an episode apart under its guard."""
        self._settled: set[int] = set()

    @property
    def memory(self) -> float:
        return (self.function.memory_gib or 0) * 2**30

    def _on_term(self, *_: object) -> None:
        self._orphaned = os.getppid() != self._server  # else SIGTERM went to all of a job: the server drains

    def run(self) -> None:
        end = None
        while end is None:
            until = min(self._measure_at, self.state[DEADLINE] or self._measure_at)
            ready = self._wait(until)
            if self.capture in ready:
                self._drain()
            end = self._answer() if self.status.fileno() in ready else None
            end = end or (self._reap() if self._ended in ready else self._judge())
        kill_all(self.worker)
        self._drain(64)
        self._log(b"", last=True)
        origin, how = end
        started, current = int(self.state[STARTED]), int(self.state[CURRENT])
        self._tell([origin, how, started, current, self._output()])

    def _wait(self, until: float) -> set[int]:
        """A stop of this process, as of a container, moves the deadline: the worker was stopped too."""
        began = time.monotonic()
        wait_s = max(0.0, until - began)
        ready = {fd for fd, _ in self._poll.poll(wait_s * 1000)}
        stopped_s = time.monotonic() - began - wait_s
        if stopped_s > STOPPED_S:
            self.state[STOPPED] += stopped_s
            if self.state[DEADLINE]:
                self.state[DEADLINE] += stopped_s
        return ready

    def _answer(self) -> tuple[str, str] | None:
        try:
            asked = self.status.recv(64)
        except OSError:
            asked = b""
        for _ in asked:
            self._drain(64)
            self._tell(self._output())
        return None if asked else ("died", "was running when its process got a signal to end")

    def _reap(self) -> tuple[str, str]:
        """Leaves a zombie: no other process can get its group's number."""
        return "died", exit_text(os.waitid(os.P_PID, self.worker, os.WEXITED | os.WNOWAIT))

    def _judge(self) -> tuple[str, str] | None:
        now, function = time.monotonic(), self.function
        if self._orphaned:
            return "died", "was running when its server ended"
        if 0 < self.state[DEADLINE] <= now:
            self._dump_stacks()
            if not 0 < self.state[DEADLINE] <= time.monotonic():  # the call has ended meanwhile
                return None
            limit = f"{function.prefix}timeout_s ({function.timeout_s:g} s)"
            if not self.state[STARTED]:
                limit = f"{function.load_timeout_s:g} s"
            return "timed_out", f"took longer than {limit}; its process was killed"
        if now < self._measure_at:
            return None
        self._measure_at = now + WATCH_S
        self._look(now)
        for guard, processes in list(self._processes.items()):
            if len(processes) > (MAX_PROCESSES if guard else function.max_processes):
                number, end = TOO_MANY, ("died", TOO_MANY_PROCESSES)
            elif self._held_bytes(guard, processes, now) > self.memory > 0:
                how = f"used more memory than {memory_limit(function)}; {KILLED}"
                number, end = OUT_OF_MEMORY, ("out_of_memory", how)
            else:
                continue
            if not guard:
                return end
            self._warn(guard, number)
        return None

    def _held_bytes(self, guard: int, processes: list[int], now: float) -> int:
        """Shared pages count once where that decides. Reading them while processes fork takes seconds: unless they have
        settled, they are stopped."""
        held = [anonymous_bytes(pid) for pid in processes]
        if not 0 < self.memory < sum(held) or len(held) < 2:
            return sum(held)
        if guard in self._settled:
            return sum(map(proportional_bytes, processes))
        if now < self._stop_at:
            return max(held)
        began = time.thread_time()
        with stopped(guard or os.getpid()) as found:
            together = sum(map(proportional_bytes, {*found, *processes}))
        self._stop_at = now + SCAN_INTERVAL_PER_COST * (time.thread_time() - began)
        return together

    def _look(self, now: float) -> None:
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != self.worker:
            os.waitpid(ended.si_pid, 0)
        if now < self._scan_at:
            return
        began, children, warden, before = time.thread_time(), children_of_all(), os.getpid(), self._processes
        if self.state[APART]:
            for orphan in set(children.get(warden, [])) - {self.worker}:  # its guard was killed
                kill_below(orphan, children)
            guards = children.get(self.worker, [])
            self._processes = {guard: [guard, *below(guard, children)] for guard in guards} | {0: [self.worker]}
        else:
            self._processes = {0: below(warden, children)}
        self._settled = {guard for guard, processes in self._processes.items() if before.get(guard) == processes}
        self._scan_at = now + SCAN_INTERVAL_PER_COST * (time.thread_time() - began)

    def _warn(self, guard: int, number: signal.Signals) -> None:
        del self._processes[guard]
        with suppress(ProcessLookupError, PermissionError):
            os.kill(guard, number)

    def _dump_stacks(self) -> None:
        until = time.monotonic() + (BLOCKED_S if has_signal(self.worker, DUMP_SIGNAL) else DUMP_S)
        with suppress(ProcessLookupError):
            os.kill(self.worker, DUMP_SIGNAL)
        while has_signal(self.worker, DUMP_SIGNAL) and time.monotonic() < until and self._drain():
            if self._orphaned:
                return
            select.select([self.capture], [], [], DUMP_LOOK_S)

    def _drain(self, times: int = 1) -> bool:
        """Return whether anybody could still print."""
        for _ in range(times):
            try:
                data = os.read(self.capture, 2**20)
            except BlockingIOError:
                return True
            if not data:
                with suppress(KeyError):
                    self._poll.unregister(self.capture)
                return False
            self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
            self._log(data)
        return True

    def _log(self, data: bytes, last: bool = False) -> None:
        whole, end, rest = (self._begun + data).rpartition(b"\n")
        if last or len(rest) > LINE_BYTES:
            whole, end, rest = whole + end + rest, b"", b""
        self._begun = rest
        path = self.function.log
        if not path or not whole + end:
            return
        text = shown(whole + end)
        with suppress(OSError):  # a full disk costs the log
            private_folder(Path(path).parent)
            with open(path, "ab", opener=open_private) as log:
                log.write(text.encode())
                full = log.tell() > LOG_BYTES
            if full:
                os.replace(path, f"{path}.1")

    def _output(self) -> str:
        return shown(self._tail)

    def _tell(self, message: Any) -> None:
        with suppress(OSError):  # the server is gone
            self.status.sendall(encode(message))


def shown(printed: bytes) -> str:
    text = colourless(printed.decode(errors="replace")).replace("\r\n", "\n").replace("\r", "\n")
    return visible(text, 16 * len(text) + 1)


def exit_text(ended: os.waitid_result | None) -> str:
    code = ended.si_status if ended else 0
    if ended and ended.si_code == os.CLD_EXITED:
        return f"ended its process (exit code {code})"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended its process (killed by {names.get(code, f'signal {code}')})"


def kill_all(group: int) -> None:
    """Kill all processes below this one. Killing the `group` is atomic, even against a fork bomb."""
    until = time.monotonic() + KILL_S
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    while time.monotonic() < until:
        kill_below(os.getpid(), children_of_all())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def memory_limit(function: CagedFunction) -> str:
    return f"{function.prefix}memory_gib ({function.memory_gib:g} GiB)"


def main(control_fd: int, status_fd: int, server: int) -> tuple[CagedFunction, socket.socket, CallState]:
    """Fork the worker, in which this returns; the process itself becomes its warden."""
    adopt_orphans()
    end_with_parent(signal.SIGTERM)
    control, status, frames = socket.socket(fileno=control_fd), socket.socket(fileno=status_fd), unpacker()
    setup = None
    while setup is None:
        data = status.recv(2**16)
        if not data or os.getppid() != server:  # it ended before `end_with_parent`
            os._exit(0)
        frames.feed(data)
        setup = next(frames, None)
    function, state, (capture, printing), warden = CagedFunction(**setup), CallState(), os.pipe(), os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(capture)
        status.close()
        _become_worker(function, warden, printing)
        return function, control, state
    control.close()
    os.close(printing)
    conceal(function.concealed)
    try:
        Warden(function, worker, status, capture, state).run()
    except BaseException:  # an end without a reason means a lost warden
        with suppress(ChildProcessError, ProcessLookupError, PermissionError):
            os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.killpg(worker, signal.SIGKILL)
    os._exit(0)


def _outlive_sigterm() -> None:
    """Ignore SIGTERM, which schedulers send to all processes of a job: the server's drain ends calls. Forks of users'
    code end by it."""
    masks = threading.local()

    def ignore(*_: object) -> None:
        pass

    def before() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        in_parent()

    signal.signal(signal.SIGTERM, ignore)
    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _become_worker(function: CagedFunction, warden: int, printing: int) -> None:
    os.setsid()  # `kill(0, ...)` in users' code reaches the worker, not the warden
    _outlive_sigterm()
    end_with_parent()
    if os.getppid() != warden:
        os._exit(1)
    for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
        os.dup2(printing, fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if function.memory_gib:
        resource.setrlimit(resource.RLIMIT_DATA, (int(function.memory_gib * 2**31),) * 2)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # when memory runs out, the kernel kills this process first
