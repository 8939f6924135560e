"""The records of a run, `metrics.jsonl`, read as they grow. Used by display, status and report; waits for nothing.

One JSON object a line and a version, flat keys. A learner that restored an earlier version writes versions again: the
later record counts. A line still being written, or cut by a crash, is left out.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """Records by version. Example: `{3: {"version": 3, "reward/mean": 0.4, "age/max": 2}}`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_version: dict[int, Record] = {}
        self._read = 0

    def read(self) -> list[Record]:
        """Records that came since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        fresh = [record for line in whole.splitlines() if (record := _record(line)) is not None]
        for record in fresh:
            self.by_version[record["version"]] = record
        return fresh

    def ordered(self) -> list[Record]:
        """One record a version, by version."""
        return [self.by_version[version] for version in sorted(self.by_version)]

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """Versions that have `key`, and its values there."""
        rows = [(record["version"], float(record[key])) for record in self.ordered() if _number(record.get(key))]
        return [version for version, _ in rows], [value for _, value in rows]

    def mean(self, key: str, last: int = 10) -> float | None:
        """Mean of the `last` records that have `key`."""
        values = self.column(key)[1][-last:]
        return sum(values) / len(values) if values else None


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 values before it."""
    return [sum(part := values[max(0, i + 1 - window) : i + 1]) / len(part) for i in range(len(values))]


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("version"), int) else None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and value == value
