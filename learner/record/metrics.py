"""The record of a run: `metrics.jsonl`, one flat JSON object per version, written by learner rank 0.

The record of an evaluation has the learner's `version` when it was written, and the evaluated one as `eval/version`.
Records of servers and buffer have `"kind": "servers"` and no `version`. A `Metrics` without a path writes nothing.
"""

import json
import logging
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from buffer.wire.protocol import EvaluationResult
from configs.flow.alerts import LOOKED_BACK, alerts
from configs.variables import open_private
from configs.writing import FULL, WriteError, removed_on_failure, writing

logger = logging.getLogger(__name__)
Record = dict[str, float]
REPEATED = 20
"""Versions for which an alert is not repeated."""


class Metrics:
    """`span("train")` adds to `time/train_s`; `log` writes the record and starts the next one. `peak`: FLOP/s of all
    the learner's GPUs. `mfu` is over the time in training, `mfu/version` over all time. While the disk is full, records
    are kept in memory: training goes on."""

    def __init__(
        self,
        path: Path | None,
        trackers: Sequence[Callable[[Record], None]] = (),
        clock: Callable[[], float] = time.monotonic,
        peak: float | None = None,
    ):
        self.path, self.clock, self.trackers, self.peak = path, clock, trackers, peak
        self._history: list[Record] = []
        self._spans: dict[str, float] = {}
        self._started = clock()
        self._alerted: dict[str, int] = {}
        self._opened = False
        self._first: int | None = None
        self._unwritten: list[Record] = []
        self._version = 0
        self._writing = threading.Lock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self._spans[name] = self._spans.get(name, 0.0) + self.clock() - start

    def log(self, version: int, stats: Mapping[str, float]) -> None:
        """Record `version`, made by the batch of `stats`."""
        record = self.record(version, stats)
        if self.path is None:
            return
        self._write(self.path, version, record)
        for line in alerts(record, self._history):
            key = line.partition(" ")[0]
            if version - self._alerted.get(key, -REPEATED) >= REPEATED:
                logger.warning("version %d: %s", version, line)
                self._alerted[key] = version
        self._history = [*self._history, record][-LOOKED_BACK:]

    def log_evaluations(self, version: int, results: Sequence[EvaluationResult]) -> None:
        for result in results:
            record = evaluation_record(version, result)
            if result.reason:
                logger.warning("the evaluation due at version %d was given up: %s", result.due, result.reason)
            if self.path is not None:
                self._write(self.path, version + 1, record)

    def log_servers(self, record: Mapping[str, float | str]) -> None:
        if self.path is None:
            return
        with self._writing:
            if self._opened:
                self._flush(self.path)
            self._append(self.path, dict(record))
            self._track({"version": self._version} | {key: value for key, value in record.items() if key != "kind"})

    def evaluations(self, version: int) -> list[int]:
        """Due versions of the evaluations recorded up to `version`."""
        self._version = version
        if self.path is None or not self.path.exists():
            return []
        found = _read_all(self.path, b'"eval/due"')  # spares the parsing of all other records
        return [int(record["eval/due"]) for record in found if record.get("version", 0) <= version]

    def close(self) -> None:
        """Write what a full disk has held back. Raises WriteError."""
        if self.path is not None and self._unwritten:
            with self._writing, writing(self.path):
                self._flush(self.path)

    def _write(self, path: Path, version: int, record: Record) -> None:
        """Append `record`. The first call removes what an earlier process recorded of `version` and later ones."""
        with self._writing:
            self._first = version if self._first is None else self._first
            self._version = int(record["version"])
            self._unwritten.append(record)
            try:
                with writing(path):
                    self._flush(path)
            except WriteError as error:
                if error.errno not in FULL:
                    raise
                if len(self._unwritten) == 1:
                    logger.warning("%s; until then the records of versions are kept in memory", error)
            self._track(record)

    def _flush(self, path: Path) -> None:
        if not self._opened:
            self._truncate(path, self._first or 0)
        while self._unwritten:
            self._append(path, self._unwritten[0])
            del self._unwritten[0]

    def _append(self, path: Path, record: Mapping[str, float | str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+", opener=open_private) as file:
            if end := file.tell():
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write((json.dumps(record) + "\n").encode())

    def _track(self, record: Mapping[str, Any]) -> None:
        for track in self.trackers:
            track(dict(record))

    def record(self, version: int, stats: Mapping[str, float]) -> Record:
        """All finite metrics of `version`. Resets the times."""
        now = self.clock()
        elapsed, self._started = now - self._started, now
        spans, self._spans = self._spans, {}
        record: Record = {"version": version}
        record |= {key: value for key, value in stats.items() if math.isfinite(value)}
        record |= {f"time/{name}_s": seconds for name, seconds in spans.items()} | {"time/version_s": elapsed}
        if self.peak and "flops" in record:
            record["mfu"] = record["flops"] / max(spans.get("train", 0.0), 1e-9) / self.peak
            record["mfu/version"] = record["flops"] / max(elapsed, 1e-9) / self.peak
        if "tokens" in record:
            record["tokens_per_s"] = record["tokens"] / max(elapsed, 1e-9)
        return record | peak_memory() | {"time": round(time.time(), 3)}

    def _truncate(self, path: Path, version: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _read_all(path) if path.exists() else []
        kept = [record for record in found if record.get("version", -1) < version]
        partial = path.with_suffix(".tmp")
        with removed_on_failure(partial):
            with open(partial, "w", encoding="utf-8", opener=open_private) as file:
                file.writelines(json.dumps(record) + "\n" for record in kept)
            partial.replace(path)
        self._history = [one for one in kept if "version" in one and "eval/due" not in one][-LOOKED_BACK:]
        self._opened = True


def evaluation_record(version: int, result: EvaluationResult) -> Record:
    """Example of a key: `eval/aime/pass@8`."""
    record: Record = {"version": version, "eval/due": result.due, "eval/version": result.version}
    for name, figures in result.figures.items():
        record |= {f"eval/{name}/{key}": value for key, value in figures.items()}
        record[f"eval/{name}/version"] = result.version
    return record


def read(path: Path) -> list[dict[str, Any]]:
    """The records of versions and evaluations, oldest first."""
    return [record for record in _read_all(path) if "version" in record]


def _read_all(path: Path, with_text: bytes = b"") -> list[dict[str, Any]]:
    """All records, or those of lines with `with_text`. A line that a disk has damaged is left out."""
    found = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if with_text not in line or not line.endswith(b"\n"):
                continue
            if (record := _record(line)) is not None:
                found.append(record)
            else:
                logger.warning("%s: line %d is damaged, and is left out", path, number)
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and type(record.get("version", 0)) is int
    return record if is_record and isinstance(record.get("eval/due", 0), int | float) else None


def peak_memory() -> Record:
    """Peak memory of this process and its GPU."""
    unit = 1024 if sys.platform == "linux" else 1
    record = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        record["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return record
