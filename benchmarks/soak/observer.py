"""What is seen of a run from outside, each with the second at which it was seen: versions, log lines, first progress.

`SoakObserver` reads what is appended to `metrics.jsonl` and to `logs/*.log` of the run's folder in a thread of its own.
It asks nobody and disturbs nobody; files have no event that a reader could wait for, so it looks every LOOK_S. Used by
`__main__.py`; `figures.py` judges what was seen.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOK_S = 0.02
STARTED = re.compile(r"--- (\S+) started: pid (\d+)")


class Stalled(RuntimeError):
    """The run has ended, or does not do what it was waited for."""


@dataclass(frozen=True)
class Sighting:
    """Something seen at `at`: a line of the log of process `who`, or `PROGRESS`. `Sighting(3.2, "buffer", "run x")`."""

    at: float
    who: str
    text: str


PROGRESS = "(first progress since its start)"


@dataclass
class Seen:
    """All that was seen so far, in seconds since the observer began."""

    versions: list[tuple[float, int]] = field(default_factory=list)
    """When each version was first recorded. Versions that a learner repeats after a restart do not stand here."""
    repeated: list[tuple[float, int]] = field(default_factory=list)
    """When versions were recorded that had been recorded before."""
    sights: list[Sighting] = field(default_factory=list)


class SoakObserver:
    """A context manager: looks at the run in `folder` from its beginning to its end. `alive`: the run goes on."""

    def __init__(self, folder: Path, alive: Callable[[], bool] = lambda: True) -> None:
        self.folder, self.alive, self.seen = folder, alive, Seen()
        self._began = time.monotonic()
        self._changed, self._ended = threading.Condition(), threading.Event()
        self._read: dict[Path, tuple[int, int, bytes]] = {}
        """By file: its inode, how far it was read, and the beginning of a line that is not complete."""
        self._records_read: set[str] = set()
        self._started: set[str] = set()
        self._thread = threading.Thread(target=self._look, name="observer", daemon=True)

    def __enter__(self) -> "SoakObserver":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def now(self) -> float:
        """Seconds since the observer began."""
        return time.monotonic() - self._began

    def wait(self, what: str, happened: Callable[[Seen], object], timeout_s: float) -> None:
        """Wait until `happened`. Raises Stalled if the run ends before, or after `timeout_s`."""
        until = self.now() + timeout_s
        with self._changed:
            while not happened(self.seen):
                if not self.alive():
                    raise Stalled(f"the run ended while this was waited for: {what}")
                if self.now() > until:
                    raise Stalled(f"{what}: not within {timeout_s:.0f} s")
                self._changed.wait(0.5)

    def pid(self, process: str) -> int:
        """Process id of the last start of `process`. Raises Stalled if it was not started yet."""
        with self._changed:
            for sight in reversed(self.seen.sights):
                if (found := STARTED.search(sight.text)) and found[1] == process:
                    return int(found[2])
        raise Stalled(f"{process} was not started")

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._changed:
                found = self._logs() + self._records()
                if found:
                    self._changed.notify_all()

    def _logs(self) -> int:
        found = len(self.seen.sights)
        for log in (self.folder / "logs").glob("*.log"):
            for line in self._lines(log):
                self.seen.sights.append(Sighting(self.now(), log.stem, line))
                if (start := STARTED.search(line)) and start[1] == log.stem:
                    self._started.add(log.stem)
        for name in [name for name in self._started if (self.folder / "logs" / f"{name}.progress").exists()]:
            self._started.remove(name)
            self.seen.sights.append(Sighting(self.now(), name, PROGRESS))
        return len(self.seen.sights) - found

    def _records(self) -> int:
        """A learner that restores replaces the file, with the records that it keeps as they were."""
        lines = [line for line in self._lines(self.folder / "metrics.jsonl") if line not in self._records_read]
        self._records_read.update(lines)
        for version in [record["version"] for record in map(json.loads, lines) if is_version(record)]:
            new = not self.seen.versions or version > self.seen.versions[-1][1]
            (self.seen.versions if new else self.seen.repeated).append((self.now(), version))
        return len(lines)

    def _lines(self, path: Path) -> list[str]:
        """The complete lines that were appended since the last call; all of a file that was replaced."""
        try:
            file = path.open("rb")
        except OSError:
            return []
        with file:
            inode = os.fstat(file.fileno()).st_ino
            before, position, partial = self._read.get(path, (inode, 0, b""))
            if before != inode:
                position, partial = 0, b""
            file.seek(position)
            *lines, partial = (partial + file.read()).split(b"\n")
            self._read[path] = inode, file.tell(), partial
        return [line.decode(errors="replace") for line in lines]


def is_version(record: dict[str, Any]) -> bool:
    """Whether a record is that of a version, not of an evaluation or of the servers."""
    return "version" in record and "eval/version" not in record and "kind" not in record
