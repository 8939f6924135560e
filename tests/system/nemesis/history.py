"""The history of a run under the nemesis: an append-only file for each process, one event a line.

Servers, learner and the nemesis write it; `checker.py` judges it. Times are of the monotonic clock, which all processes
of a machine share and which no fault moves. A line is written by one system call, so that a kill leaves it whole.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Groups = list[tuple[int, list[str]]]
"""Items of a batch in order, each with the digests of its samples in order."""
INITIAL = "0" * 64
"""The policy of version 0."""


@dataclass(frozen=True)
class Event:
    """Something that happened at time `at` in process `who`: its name and its pid."""

    at: float
    who: str


@dataclass(frozen=True)
class Generated(Event):
    """A server has made a group, and begins to deliver it. `oldest`: lowest version among its sampled tokens."""

    item: int
    lease: int
    dispatched: int
    oldest: int
    samples: list[str]


@dataclass(frozen=True)
class Acknowledged(Event):
    """The buffer has answered a delivery."""

    item: int
    lease: int
    accepted: bool


@dataclass(frozen=True)
class Restored(Event):
    """A learner starts from a checkpoint, or from version 0."""

    version: int
    policy: str


@dataclass(frozen=True)
class Trained(Event):
    """The learner has trained batch `version`; `policy` is that of version + 1. Written before anybody learns of it."""

    version: int
    groups: Groups
    policy: str


@dataclass(frozen=True)
class Loaded(Event):
    """A server has weights in place that it takes for `version`. `policy`: what they are, found from their bytes."""

    version: int
    policy: str


@dataclass(frozen=True)
class Ended(Event):
    """What the ledger holds at the end, by item: reason of a drop, batch of a trained item, state of any other."""

    dropped: list[tuple[int, str]]
    trained: list[tuple[int, int]]
    open: list[tuple[int, str]]


KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Generated, Acknowledged, Restored, Trained, Loaded, Ended)
}


class History:
    """The file of one process in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.who = f"{name}#{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / f"{self.who}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, kind: type[Event], **fields: Any) -> None:
        """Append an event of now."""
        event = kind(at=time.monotonic(), who=self.who, **fields)
        line = json.dumps({"kind": kind.__name__, **asdict(event)}).encode() + b"\n"
        assert os.write(self._file, line) == len(line), "the disk of the history is full"


class Reader:
    """Follows all files of a folder; `events` has what was read so far, in order of time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.events = folder, list[Event]()
        self._read: dict[Path, int] = {}

    def refresh(self) -> list[Event]:
        """Read what is new; returns all events."""
        found = list[Event]()
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            found += map(parsed, whole.splitlines())
        if found:
            self.events = sorted(self.events + found, key=lambda event: event.at)
        return self.events


def parsed(line: bytes | str) -> Event:
    """The event of a line."""
    fields = json.loads(line)
    return KINDS[fields.pop("kind")](**fields)


def digest(data: bytes) -> str:
    """Name of the contents of a sample."""
    return hashlib.sha256(data).hexdigest()[:16]


def following(policy: str, groups: Iterable[tuple[int, list[str]]]) -> str:
    """The policy after `policy` was trained on these groups."""
    return hashlib.sha256(f"{policy}{json.dumps([list(group) for group in groups])}".encode()).hexdigest()
