"""The records of a run, `metrics.jsonl`, read as they grow. For display, status, page and report; waits for nothing.

One JSON object per line and version, flat keys; an evaluation has a line of its own (`eval/...`), and so has each look
at servers and buffer (`kind`, `time`, no version). A learner that restored an earlier version replaces the file and
writes versions again: the later record counts. A line still being written, or cut off by a crash, is left out.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

Record = dict[str, Any]
EVALUATED = "eval/version"
"""In records of evaluations: the version that was evaluated."""


class Position(NamedTuple):
    """A place in the file: `offset` bytes into the file that has this inode. As text: `1234-5678`."""

    inode: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Undo `str`; the beginning for anything else."""
        inode, _, offset = text.partition("-")
        return cls(int(inode), int(offset)) if inode.isdigit() and offset.isdigit() else cls()


def read_after(path: Path, position: Position) -> tuple[list[Record], Position, bool]:
    """The whole lines after `position`, the place behind them, and whether the file was replaced since: then all of it
    was read. A file that is not there has no lines."""
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
    records = [record for line in whole_lines.splitlines() if (record := _record(line)) is not None]
    return records, Position(status.st_ino, start + len(whole_lines)), replaced


class Records:
    """Records by version, read from the file at once. Example: `{3: {"version": 3, "reward/mean": 0.4}}`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_version: dict[int, Record] = {}
        self.evaluations: dict[int, Record] = {}
        """By the version that was evaluated; keys as in `eval/aime/pass@8`."""
        self.servers: dict[float, Record] = {}
        """Looks at servers and buffer, by their time."""
        self.position = Position()
        """Up to where the file is read."""
        self.read()

    def read(self) -> list[Record]:
        """Records of versions and evaluations that were written since the last call, or since construction."""
        records, self.position, replaced = read_after(self.path, self.position)
        known = self.by_version, self.evaluations
        if replaced:  # what it does not have any more is trained again
            self.by_version, self.evaluations, self.servers = {}, {}, {}
        return [record for record in records if self._take_up(record, *known)]

    def _take_up(self, record: Record, versions: Mapping[int, Record], evaluations: Mapping[int, Record]) -> bool:
        """Whether it is of a version and differs from what was known before."""
        if is_of_servers(record):
            self.servers[record["time"]] = record
            return False
        kind, known, version = self.by_version, versions, record["version"]
        if EVALUATED in record:
            if not sets_of(record):  # it was given up
                return False
            kind, known, version = self.evaluations, evaluations, record[EVALUATED]
        fresh = known.get(version) != record
        kind[version] = record
        return fresh

    def ordered(self) -> list[Record]:
        """One record per version, by version."""
        return [self.by_version[version] for version in sorted(self.by_version)]

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Versions that have `key`, and its values there."""
        rows = [(record["version"], float(record[key])) for record in self.ordered() if _is_number(record.get(key))]
        return [version for version, _ in rows], [value for _, value in rows]

    def mean(self, key: str, last: int = 10) -> float | None:
        """Mean of the `last` records that have `key`."""
        values = self.column(key)[1][-last:]
        return fmean(values) if values else None


def sets_of(record: Record) -> dict[str, dict[str, float]]:
    """Figures by set of an evaluation's record. Example: `{"aime": {"mean@8": 0.4, "pass@8": 0.7, "version": 10}}`"""
    found: dict[str, dict[str, float]] = {}
    for key, value in record.items():
        first, name, figure = [*key.split("/", 2), "", ""][:3]
        if first == "eval" and figure:
            found.setdefault(name, {})[figure] = value
    return found


def shares(figures: Mapping[str, float]) -> list[str]:
    """Names of the figures that say how much is solved: mean@N, then pass@K and pass^K."""
    return [key for key in figures if key.startswith(("mean@", "pass@", "pass^"))]


def evaluation_lines(record: Record) -> list[str]:
    """An evaluation in words, a line for each set. Example: `aime: mean@8 0.400 (+- 0.050), pass@8 0.700, 3 failed`"""
    lines = []
    for name, figures in sets_of(record).items():
        words = [f"{key} {figures[key]:.3f}" for key in shares(figures)]
        words[:1] = [f"{word} (+- {figures['error']:.3f})" for word in words[:1]] if "error" in figures else words[:1]
        words += [f"reward {figures['reward']:.3f}"] if "reward" in figures else []
        words += [f"{figures['failed']:.0f} attempts failed"] if figures.get("failed") else []
        lines.append(f"{name}: {', '.join(words)}")
    return lines


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 values before it."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def is_of_servers(record: Record) -> bool:
    """Whether it is a look at servers and buffer."""
    return record.get("kind") == "servers"


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
