"""The records of a run, `metrics.jsonl`, read as they grow.

A line is a version, an evaluation (`eval/...`), or a look at servers and buffer (`kind`, `time`, no version). A learner
that restored an earlier version replaces the file and writes versions again: the later record counts. A line that a
crash cut off is left out.
"""

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from configs.plain_text import figure

Record = dict[str, Any]
EVALUATED = "eval/version"
FULL_LOOKS, MOST_LOOKS = 20, 3000
"""Last looks kept whole; looks altogether, evenly spread."""
OWN_FIGURES = ("tokens_per_s", "running", "waiting", "kv_usage")
MOST_SERVERS = 12
LONGEST_GAP_S = 600.0
"""A longer gap between looks means that the run was not alive."""


MOST_VERSIONS = 4000
"""Kept by a bounded reader, or drawn: the last half whole, older ones thinned."""


class Position(NamedTuple):
    """Bytes into the file with this inode. As text: `1234-5678`."""

    inode: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        inode, _, offset = text.partition("-")
        return cls(int(inode), int(offset)) if inode.isdigit() and offset.isdigit() else cls()


def read_after(path: Path, position: Position) -> tuple[list[Record], Position, bool]:
    """Whole lines after `position`, the next position, and whether the file was replaced and read from its start."""
    lines, position, replaced = _lines_after(path, position)
    return [record for line in lines if (record := _record(line)) is not None], position, replaced


def bytes_after(path: Path, position: Position) -> int:
    """What `read_after` would read, 0 where there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return status.st_size - (position.offset if status.st_ino == position.inode else 0)


def _lines_after(path: Path, position: Position) -> tuple[list[bytes], Position, bool]:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            replaced = (status.st_ino, True) != (position.inode, position.offset <= status.st_size)
            start = 0 if replaced else position.offset
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], position, False
    whole_lines = data[: data.rfind(b"\n") + 1]
    return whole_lines.splitlines(), Position(status.st_ino, start + len(whole_lines)), replaced


class Looks(dict[float, Record]):
    """Looks by time: the last FULL_LOOKS whole, older ones short and thinned."""

    def __init__(self) -> None:
        self.gpu_s = 0.0
        self._last: Record = {}
        self._full: deque[float] = deque()
        self._shortened, self._each = 0, 1

    def take_up(self, look: Record) -> None:
        time, seconds = look["time"], look["time"] - self._last.get("time", look["time"])
        if 0 < seconds <= LONGEST_GAP_S:
            self.gpu_s += seconds * self._last.get("gpus", 0)
        if time not in self:
            self._full.append(time)
        self._last = self[time] = look
        if len(self._full) <= FULL_LOOKS:
            return
        oldest = self._full.popleft()
        look = self.pop(oldest)
        if self._shortened % self._each == 0:
            self[oldest] = short_look(look)
        self._shortened += 1
        if len(self) > MOST_LOOKS:
            for time in [time for time in sorted(self) if time not in self._full][1::2]:
                del self[time]
            self._each *= 2


class Records:
    """Records by version. `looks` False: without looks at servers. `bounded`: at most MOST_VERSIONS."""

    def __init__(self, path: Path, looks: bool = True, bounded: bool = False) -> None:
        self.path, self.looks, self.bounded = path, looks, bounded
        self.by_version: dict[int, Record] = {}
        self.evaluations: dict[int, Record] = {}
        """By evaluated version."""
        self.servers = Looks()
        self.position = Position()
        """The file is read up to here."""
        self.read()

    def read(self) -> list[Record]:
        """Newly written records of versions and evaluations."""
        lines, self.position, replaced = _lines_after(self.path, self.position)
        known = self.by_version, self.evaluations
        if replaced:  # versions that it lacks are trained again
            self.by_version, self.evaluations, self.servers = {}, {}, Looks()
        return [record for line in lines if (record := _record(line)) and self._take_up(record, *known)]

    def _take_up(self, record: Record, versions: Mapping[int, Record], evaluations: Mapping[int, Record]) -> bool:
        if is_of_servers(record):
            if self.looks:
                self.servers.take_up(record)
            return False
        kind, known, version = self.by_version, versions, record["version"]
        if EVALUATED in record:
            if not sets_of(record):  # the evaluation was given up
                return False
            kind, known, version = self.evaluations, evaluations, record[EVALUATED]
        fresh = known.get(version) != record
        if self.bounded and kind is not known and FULL_LOOKS < version < max(known, default=0) - MOST_VERSIONS // 2:
            fresh = version in known and fresh  # read again; it may have been left out before
        kind[version] = record
        if self.bounded and len(kind) > MOST_VERSIONS:
            for old in thinned(sorted(kind)):
                del kind[old]
        return fresh

    def ordered(self) -> list[Record]:
        return [self.by_version[version] for version in sorted(self.by_version)]

    def column(self, key: str) -> tuple[list[int], list[float]]:
        rows = [(record["version"], float(record[key])) for record in self.ordered() if _is_number(record.get(key))]
        return [version for version, _ in rows], [value for _, value in rows]

    def mean(self, key: str, last: int = 10) -> float | None:
        values = self.column(key)[1][-last:]
        return fmean(values) if values else None


def thinned(versions: Sequence[int]) -> Sequence[int]:
    """The versions to leave out."""
    return versions[FULL_LOOKS : -MOST_VERSIONS // 2 : 2]


def sets_of(record: Record) -> dict[str, dict[str, float]]:
    """Example: `{"aime": {"mean@8": 0.4, "pass@8": 0.7, "version": 10}}`"""
    found: dict[str, dict[str, float]] = {}
    for key, value in record.items():
        first, name, figure = [*key.split("/", 2), "", ""][:3]
        if first == "eval" and figure:
            found.setdefault(name, {})[figure] = value
    return found


def shares(figures: Mapping[str, float]) -> list[str]:
    return [key for key in figures if key == "loss" or key.startswith(("mean@", "pass@", "pass^"))]


def evaluation_lines(record: Record) -> list[str]:
    """An evaluation in words, a line for each set."""
    lines = []
    for name, figures in sets_of(record).items():
        words = [f"{key} {figure(figures[key], '.3f')}" for key in shares(figures)]
        error = f" (+- {figure(figures['error'], '.3f')})" if "error" in figures else ""
        words[:1] = [f"{word}{error}" for word in words[:1]]
        words += [f"reward {figure(figures['reward'], '.3f')}"] if "reward" in figures else []
        words += [f"{figures['failed']:.0f} attempts failed"] if figures.get("failed") else []
        lines.append(f"{name}: {', '.join(words)}")
    return lines


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 values before it."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def is_of_servers(record: Record) -> bool:
    """Whether it is a look at servers and buffer."""
    return record.get("kind") == "servers"


def short_look(look: Record) -> Record:
    """Keep all sums, and OWN_FIGURES of MOST_SERVERS servers."""
    own, kept = list[str](), {}
    for key, value in look.items():
        first, name, figure = [*key.split("/", 2), "", ""][:3]
        if first == "server":
            if name not in own:
                own.append(name)
            if figure not in OWN_FIGURES or own.index(name) >= MOST_SERVERS:
                continue
        kept[key] = value
    return kept


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    known = _is_number(record.get("time")) if is_of_servers(record) else isinstance(record.get("version"), int)
    return record if known else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value
