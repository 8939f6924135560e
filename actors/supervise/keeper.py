"""A keeper: runs one process of a run, logs its output, restarts it when it fails, drains it on request.

One thread waits for the process and starts it again, another one reads its output.
"""

import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import BinaryIO

from actors.process import FINAL, JUDGES, PROGRESS, Event, EventKind, Process
from actors.supervise.guard import Guarded
from buffer.wire.awake import TICK_S, AwakeClock
from configs import entrypoint
from configs.entrypoint import ABOVE, BAD_INPUT, DONE, ENDINGS, PARENT
from configs.plain_text import colourless, conceal, visible
from configs.variables import for_children, open_private, private_folder

COUNTER_BITS, INCARNATION_BITS = 40, 80
"""An event's number is a random incarnation and a counter, because a clock may be set back."""
LINE_BYTES = 1 << 16
LOG_BYTES, LOG_FILES = 64 << 20, 3
"""`NAME.log` of this size becomes `NAME.log.1`, and so on."""
SHOWN_LINES, SHOWN_EVERY_S, SHOWN_CHARACTERS = 300, 30.0, 2000
"""Lines and characters that are reported in so many seconds; the log has all."""
SET_BY_RAY = {"OMP_NUM_THREADS", "PYTHONBREAKPOINT"}
"""Ray changes these in its workers; a process gets the launcher's."""


class Keeper:
    """Keeps one process until a final event, a drain or a kill."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._changed = threading.Condition()
        self._events: deque[Event] = deque(maxlen=4000)
        self._incarnation = secrets.randbits(INCARNATION_BITS)
        self._number = self._incarnation << COUNTER_BITS
        self._last_lines: deque[str] = deque(maxlen=12)
        self._guarded: Guarded | None = None
        self._ending = threading.Event()
        self._writing = threading.Lock()
        self._progress = process.log.absolute().with_suffix(".progress")
        self._notice = self._progress.with_suffix(".notice")
        conceal(process.concealed)
        private_folder(process.log.parent)
        self._thread = threading.Thread(target=self._keep, name=f"keep-{process.name}", daemon=True)
        self._thread.start()

    def events(self, after: int, timeout_s: float) -> list[Event]:
        with self._changed:
            if after >> COUNTER_BITS != self._incarnation:  # a number of another keeper
                after = 0
            self._changed.wait_for(lambda: bool(self._events) and self._events[-1].number > after, timeout_s)
            return [event for event in self._events if event.number > after]

    def drain(self, timeout_s: float, clock: AwakeClock | None = None) -> None:
        """The process may read the timeout (`entrypoint.notice_s`). Time for which this process is stopped does not
        count."""
        with self._changed:
            if not self._ending.is_set():  # a second SIGTERM would force the process
                with suppress(OSError):
                    self._notice.write_text(f"{timeout_s:.1f}", encoding="utf-8")
                self._end(lambda guarded: guarded.signal(signal.SIGTERM))
        clock = clock or AwakeClock()  # the process may be stopped together with this one, as by Ctrl-Z
        until = clock.now() + timeout_s
        while self._thread.is_alive() and (left_s := until - clock.now()) > 0:
            self._thread.join(min(left_s, TICK_S))
        self.kill()

    def kill(self) -> None:
        self._end(Guarded.kill)
        self._thread.join()

    def _end(self, stop: Callable[[Guarded], None]) -> None:
        with self._changed:
            self._ending.set()
            if self._guarded is not None:
                stop(self._guarded)

    def last(self) -> tuple[list[str], bool]:
        """The last lines, and whether there was progress."""
        return list(self._last_lines), self._progress.exists()

    def _keep(self) -> None:
        ends = Ends(self.process)
        while not self._ending.is_set():
            started = time.monotonic()
            for file in (self._progress, self._notice):
                with suppress(OSError), self._changed:  # once a drain has begun, no process starts
                    file.unlink()
            code = self._run_once()
            if self._ending.is_set():
                return self._report("ended", f"exit code {code}", code)
            kind, text, delay_s = ends.judge(code, time.monotonic() - started, *self.last())
            self._report(kind, text, code)
            if kind in FINAL:
                return
            self._ending.wait(delay_s)
        self._report("ended", "it was waiting for its restart", DONE)

    def _run_once(self) -> int:
        self._last_lines.clear()
        try:
            guarded, reader = self._start()
        except (OSError, RuntimeError) as error:  # no files, processes or threads left
            text = f"cannot start {sys.executable}: {error}"
            self._write_log(f"{text}\n".encode())
            self._last_lines.append(text)
            self._report("line", text)
            return 127
        if guarded is None:
            return DONE
        self._report("started", f"pid {guarded.pid}")
        try:
            return guarded.wait()
        finally:
            with self._changed:
                self._guarded = None
            reader.join(5.0)  # for the last lines: all writers are gone

    def _start(self) -> tuple[Guarded | None, threading.Thread]:
        """None: the process is not wanted any more."""
        source, sink = os.pipe()
        with os.fdopen(sink, "wb"):
            output = os.fdopen(source, "rb")
            reader = threading.Thread(target=self._read, args=(output,), daemon=True)
            try:
                reader.start()
            except RuntimeError:
                output.close()
                raise
            with self._changed:
                if not self._ending.is_set():
                    name, argv, cwd = self.process.name, self.process.argv, self.process.cwd or None
                    told = {entrypoint.PROGRESS: str(self._progress), entrypoint.NOTICE: str(self._notice)}
                    env = environment(self.process) | told
                    self._guarded = Guarded(name, argv, cwd=cwd, env=env, stdout=sink, stderr=sink)
                return self._guarded, reader

    def _read(self, source: BinaryIO) -> None:
        shown, since = 0, time.monotonic()
        with source:
            while line := source.readline(LINE_BYTES):
                states = colourless(line.decode(errors="replace")).rstrip().split("\r")  # a progress bar writes several
                self._write_log("".join(f"{visible(state, LINE_BYTES)}\n" for state in states).encode())
                text = visible(states[-1], SHOWN_CHARACTERS)
                self._last_lines.append(text)
                now = time.monotonic()
                if now >= since + SHOWN_EVERY_S:
                    self._report_left_out(shown)
                    shown, since = 0, now
                shown += 1
                if shown <= SHOWN_LINES:
                    self._report("line", text)
            self._report_left_out(shown)

    def _report_left_out(self, shown: int) -> None:
        if shown > SHOWN_LINES:
            self._report("line", f"{shown - SHOWN_LINES} lines left out, see {self.process.log}")

    def _report(self, kind: EventKind, text: str, code: int | None = None) -> None:
        if kind != "line":
            self._write_log(f"--- {self.process.name} {kind}: {visible(text)}\n".encode())
        with self._changed:
            self._number += 1
            self._events.append(Event(self._number, kind, text, code))
            self._changed.notify_all()

    def _write_log(self, data: bytes) -> None:
        """A write to a full disk fails silently, because the process must not block on it. Each write opens the file,
        because somebody may move or truncate it."""
        log = self.process.log
        with self._writing, suppress(OSError):
            with open(log, "ab", buffering=0, opener=open_private) as file:
                file.write(data)
                full = file.tell() >= LOG_BYTES
            if full:
                names = [log, *(log.with_name(f"{log.name}.{age}") for age in range(1, LOG_FILES))]
                for newer, older in reversed(list(pairwise(names))):
                    if newer.exists():
                        newer.replace(older)


class Ends:
    """Judges the unexpected ends of a process."""

    def __init__(self, process: Process) -> None:
        self.process, self.failures, self.worked = process, 0, False

    def judge(self, code: int, lived_s: float, lines: Sequence[str], progressed: bool) -> tuple[EventKind, str, float]:
        role, restarts = self.process.role, self.process.restarts
        if role == "learner" and code in ENDINGS.values() and code != DONE:  # it says why the run ended
            return "ended", "\n".join(last_words(lines)), 0.0
        if code == DONE and role not in ("buffer", *JUDGES):  # the run needs those until they are drained
            return "ended", f"exit code {code}", 0.0
        self.worked |= progressed
        if code == BAD_INPUT and not self.worked:  # another start would end the same way
            return "refused", "\n".join(last_words(lines)), 0.0
        self.failures = 1 if progressed else self.failures + 1
        what = f"exit code {code} after {lived_s:.0f} s"
        if self.failures >= restarts.failures:
            never = f"it failed {self.failures} times in a row and never {PROGRESS[role]}"
            return "gave_up", "\n".join([f"{what}; {never}; its last lines:", *(f"  {line}" for line in lines)]), 0.0
        delay_s = 0.0 if progressed else min(restarts.first_s * 2 ** (self.failures - 1), restarts.most_s)
        return "failed", f"{what}; again {f'in {delay_s:g} s' if delay_s else 'at once'}", delay_s


def last_words(lines: Sequence[str]) -> Sequence[str]:
    """What a process said at its end, from the line on that names its command."""
    starts = [at for at, line in enumerate(lines) if line.startswith(("python -m ", "headrace "))]
    return list(lines)[starts[-1] :] if starts else list(lines)


def environment(process: Process) -> dict[str, str]:
    """The launcher's environment and `process.env`, without variables that give this node a place in another job or
    name the launcher's parent."""
    left_out = SET_BY_RAY | {PARENT}
    cleaned = for_children(os.environ)
    ours = {key: value for key, value in cleaned.items() if not key.startswith("RAY_") and key not in left_out}
    return {**ours, **process.env, "PYTHONUNBUFFERED": "1", ABOVE: str(os.getpid())}
