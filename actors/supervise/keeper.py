"""A keeper: runs one process of a run, files what it prints, restarts it when it fails, drains it on request.

Consumes a `Process` (a plain command, such as `python -m buffer runs/x/config.yaml`). Made by `actors/supervise/ray_cluster.py` as a
Ray actor on the node and with the GPUs of its process; nothing in here knows of Ray. One thread waits for the end of
the process and starts it anew, one reads its output; `events` waits until either has something to tell, `drain` until
the process is gone.
"""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from actors.supervise.guard import Guarded

BAD_INPUT = 2
"""Exit code of a process whose input is wrong: starting it again would not help."""
LINE_BYTES = 1 << 16
"""A longer line is cut in pieces."""
Role = Literal["buffer", "learner", "rollout"]
SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Ray changes these in its workers; a process gets them from the launcher only."""


@dataclass(frozen=True)
class Restarts:
    """When to start a failed process again: after `first_s`, doubled up to `most_s`; not after `failures` fast ones."""

    first_s: float = 1.0
    most_s: float = 60.0
    fast_s: float = 60.0
    """A process that lived longer has not failed fast: the count starts anew."""
    failures: int = 6


@dataclass(frozen=True)
class Process:
    """One process of a run as a plain command.

    Example: `Process("rollout-0", "rollout", (python, "-m", "rollout", file, "--name", "rollout-0"), log, gpus=2)`.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    log: Path
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    drain_s: float = 30.0
    """Most time between SIGTERM and SIGKILL when it is drained."""
    restarts: Restarts = Restarts()

    @property
    def may_end(self) -> bool:
        """Exit code 0 means that its work is done; the buffer is needed for as long as the run goes on."""
        return self.role != "buffer"


Kind = Literal["line", "started", "failed", "ended", "refused", "gave_up"]


@dataclass(frozen=True)
class Event:
    """What happened to a process, in order of `number`. The last three kinds are final; `code` is its exit code then.

    Example: `Event(17, "line", "version 3 ...")`, `Event(18, "failed", "exit code 1 after 3 s; again in 2 s", 1)`.
    """

    number: int
    kind: Kind
    text: str
    code: int | None = None


FINAL: tuple[Kind, ...] = ("ended", "refused", "gave_up")


class Keeper:
    """Keeps one process from its construction until it is done, refused, given up, drained or killed."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._told = threading.Condition()
        self._events: deque[Event] = deque(maxlen=4000)
        self._number = time.time_ns()  # a successor of this keeper counts on from above
        self._tail: deque[str] = deque(maxlen=12)
        self._guarded: Guarded | None = None
        self._ending = threading.Event()
        self._log = Log(process.log)
        self._thread = threading.Thread(target=self._keep, name=f"keep-{process.name}", daemon=True)
        self._thread.start()

    def events(self, after: int, wait_s: float) -> list[Event]:
        """Events later than number `after`; waits up to `wait_s` for one."""
        with self._told:
            self._told.wait_for(lambda: bool(self._events) and self._events[-1].number > after, wait_s)
            return [event for event in self._events if event.number > after]

    def drain(self, bound_s: float) -> None:
        """SIGTERM, SIGKILL for what is left after `bound_s`; returns when nothing is left. It is not started again."""
        self._end(lambda guarded: guarded.signal(signal.SIGTERM))
        self._thread.join(bound_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for the process and all that descends from it; returns when nothing is left."""
        self._end(Guarded.kill)
        self._thread.join()

    def _end(self, how: Callable[[Guarded], None]) -> None:
        with self._told:
            self._ending.set()
            if self._guarded is not None:
                how(self._guarded)

    def _keep(self) -> None:
        failures, restarts = 0, self.process.restarts
        while not self._ending.is_set():
            began = time.monotonic()
            code = self._once()
            lived = time.monotonic() - began
            if self._ending.is_set() or (code == 0 and self.process.may_end):
                return self._tell("ended", f"exit code {code}", code)
            if code == BAD_INPUT:
                return self._tell("refused", "\n".join(self._tail), code)
            failures = failures + 1 if lived < restarts.fast_s else 1
            what = f"exit code {code} after {lived:.0f} s"
            if failures >= restarts.failures:
                last = "\n".join(f"  {line}" for line in self._tail)
                return self._tell("gave_up", f"{what}, {failures} times in a row; its last lines:\n{last}", code)
            delay = min(restarts.first_s * 2 ** (failures - 1), restarts.most_s)
            self._tell("failed", f"{what}; again in {delay:g} s", code)
            self._ending.wait(delay)
        self._tell("ended", "it waited to be started again", 0)

    def _once(self) -> int:
        """Run the process once; its exit code. This thread outlives the process."""
        self._tail.clear()
        source, sink = os.pipe()
        reader = threading.Thread(target=self._read, args=(source,), daemon=True)
        reader.start()
        try:
            with self._told:
                if self._ending.is_set():
                    return 0
                name, argv = self.process.name, self.process.argv
                self._guarded = Guarded(name, argv, self.process.cwd or None, environment(self.process), sink)
        except OSError as error:
            os.write(sink, f"cannot start {sys.executable}: {error}\n".encode())
            return 127
        finally:
            os.close(sink)
        self._tell("started", f"pid {self._guarded.pid}")
        try:
            return self._guarded.wait()
        finally:
            with self._told:
                self._guarded = None
            reader.join(5.0)  # the last lines; all who could write are gone

    def _read(self, pipe: int) -> None:
        with open(pipe, "rb") as source:
            while line := source.readline(LINE_BYTES):
                self._log.write(line)
                text = (
                    line.decode(errors="replace").rstrip().rpartition("\r")[2]
                )  # of a progress bar what it shows last
                self._tail.append(text)
                self._tell("line", text)

    def _tell(self, kind: Kind, text: str, code: int | None = None) -> None:
        if kind != "line":
            self._log.write(f"--- {self.process.name} {kind}: {text}\n".encode())
        with self._told:
            self._number += 1
            self._events.append(Event(self._number, kind, text, code))
            self._told.notify_all()


class Log:
    """A log file, written for as long as the disk takes it: a full disk must not block the process that prints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, data: bytes) -> None:
        try:
            with self._lock, open(self.path, "ab") as file:  # opened anew: it may be moved away or truncated meanwhile
                file.write(data)
        except OSError:
            return


def environment(process: Process) -> dict[str, str]:
    """What the process would see when started by hand, and the accelerators that Ray gave this keeper."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key not in SET_BY_RAY}
    return {**ours, **process.env, "PYTHONUNBUFFERED": "1"}
