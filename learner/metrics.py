"""The record of a run: `metrics.jsonl`, one flat JSON object a version, written by learner rank 0.

Consumes the figures of each version; waits for nothing. The other ranks hold a `Metrics` that writes nowhere. Trackers
(`learner.trackers`) get the same records.
"""

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from learner.algorithms import alerts

logger = logging.getLogger(__name__)
Record = dict[str, float]
HISTORY = 20
"""Versions that alerts compare with."""


class Metrics:
    """`with metrics.span("train")` adds to `time/train_s`; `log` writes the record and starts the next one.

    `peak`: FLOP/s of all the learner's GPUs together, where known; `mfu` is of the time in training, `mfu/version` of
    all time, waiting included (formula: `learner.flops`).
    """

    def __init__(
        self,
        path: Path | None,
        trackers: Sequence[Callable[[Record], None]] = (),
        clock: Callable[[], float] = time.monotonic,
        peak: float | None = None,
    ):
        self.path, self.clock, self.trackers, self.peak = path, clock, trackers, peak
        self.history: list[Record] = []
        self._spans: dict[str, float] = {}
        self._started = clock()
        self._warned: dict[str, int] = {}
        self._begun = False

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what runs inside, failed or not."""
        start = self.clock()
        try:
            yield
        finally:
            self._spans[name] = self._spans.get(name, 0.0) + self.clock() - start

    def log(self, version: int, stats: Mapping[str, float]) -> None:
        """Record `version`, the policy that came of the batch that `stats` speak of."""
        record = self.record(version, stats)
        if self.path is None:
            return
        if not self._begun:
            self._begin(self.path, version)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        for line in alerts(record, self.history):
            key = line.partition(" ")[0]
            if version - self._warned.get(key, -HISTORY) >= HISTORY:  # one that stays is not told every version
                logger.warning("version %d: %s", version, line)
                self._warned[key] = version
        self.history = [*self.history, record][-HISTORY:]
        for track in self.trackers:
            track(record)

    def record(self, version: int, stats: Mapping[str, float]) -> Record:
        """All figures of `version`; what is not finite is left out. The next one's times begin."""
        now = self.clock()
        elapsed, self._started = now - self._started, now
        record: Record = {"version": version}
        record |= {key: value for key, value in stats.items() if math.isfinite(value)}
        record |= {f"time/{name}_s": seconds for name, seconds in self._spans.items()} | {"time/version_s": elapsed}
        if self.peak and "flops" in record:
            record["mfu"] = record["flops"] / max(self._spans.get("train", 0.0), 1e-9) / self.peak
            record["mfu/version"] = record["flops"] / max(elapsed, 1e-9) / self.peak
        self._spans = {}
        if "tokens" in record:
            record["tokens_per_s"] = record["tokens"] / max(elapsed, 1e-9)
        return record | memory()

    def _begin(self, path: Path, version: int) -> None:
        """Cut off what an earlier process recorded from `version` on: it has been trained again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read(path) if record["version"] < version] if path.exists() else []
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(path)
        self.history, self._begun = kept[-HISTORY:], True


def read(path: Path) -> list[Record]:
    """The records of a run, oldest first; a last line that was cut off in the writing is left out."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def memory() -> Record:
    """Largest memory so far in GiB: of this process, and of its GPU."""
    unit = 1024 if sys.platform == "linux" else 1
    figures = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        figures["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures
