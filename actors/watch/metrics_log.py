"""The records of a run, `metrics.jsonl`, read as they grow. Used by display, status and report; waits for nothing.

One JSON object per line and version, flat keys; an evaluation has a line of its own (`eval/...`). A learner that
restored an earlier version replaces the file and writes versions again: the later record counts. A line still being
written, or cut off by a crash, is left out.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

Record = dict[str, Any]
EVALUATED = "eval/version"
"""In records of evaluations: the version that was evaluated."""


class Records:
    """Records by version, read from the file at once. Example: `{3: {"version": 3, "reward/mean": 0.4}}`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_version: dict[int, Record] = {}
        self.evaluations: dict[int, Record] = {}
        """By the version that was evaluated; keys as in `eval/aime/pass@8`."""
        self._inode, self._offset = 0, 0
        self.read()

    def read(self) -> list[Record]:
        """Records written since the last call, or since construction, those of evaluations among them."""
        try:
            with open(self.path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:  # replaced by a restarted learner
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole_lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole_lines)
        records = [record for line in whole_lines.splitlines() if (record := _record(line)) is not None]
        return [record for record in records if self._take_up(record)]

    def _take_up(self, record: Record) -> bool:
        """Whether it is new."""
        kind, version = self.by_version, record["version"]
        if EVALUATED in record:
            if not sets_of(record):  # it was given up
                return False
            kind, version = self.evaluations, record[EVALUATED]
        fresh = kind.get(version) != record
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


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("version"), int) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value
