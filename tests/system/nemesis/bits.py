"""Flipping a bit in a file of a run, which may be running, and flipping it back."""

import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from buffer.store.segments import folder_of
from buffer.store.sqlite import reading
from tests.system.nemesis.run import NemesisRun

Span = tuple[Path, int, int]
"""A file, where the bytes in question begin, and how many they are."""


@dataclass(frozen=True)
class Flip:
    """One bit of `path` that was turned over."""

    path: Path
    position: int
    bit: int
    damaged: int
    """The byte as it is since."""

    @classmethod
    def of(cls, span: Span, draw: random.Random) -> "Flip":
        """Turn over a bit of the span."""
        path, begin, size = span
        position, bit = begin + draw.randrange(size), draw.randrange(8)
        with path.open("r+b", buffering=0) as file:
            (byte,) = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
        return cls(path, position, bit, byte ^ 1 << bit)

    def undo(self) -> bool:
        """Give the byte back, unless file or byte have changed since. Returns whether it did."""
        if not self.path.exists() or self.path.stat().st_size <= self.position:
            return False
        with self.path.open("r+b", buffering=0) as file:
            if os.pread(file.fileno(), 1, self.position) != bytes([self.damaged]):
                return False
            os.pwrite(file.fileno(), bytes([self.damaged ^ 1 << self.bit]), self.position)
        return True

    def __str__(self) -> str:
        return f"bit {self.bit} of byte {self.position} of {self.path.name}"


def ledger(run: NemesisRun) -> Span:
    return whole(run.ledger)


def copy_log(run: NemesisRun) -> None:
    """Have SQLite copy its log into the ledger's file, beside the live buffer: a young file has one page."""
    with closing(sqlite3.connect(run.ledger)) as db:
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def log_of_ledger(run: NemesisRun) -> Span:
    """SQLite's log, or the ledger where there is none."""
    path = run.ledger.with_name(f"{run.ledger.name}-wal")
    return whole(path if path.exists() and path.stat().st_size else run.ledger)


def page_sums(run: NemesisRun) -> Span:
    """The checksums of the ledger's pages; what follows them is room for more pages."""
    return run.ledger.with_name(f"{run.ledger.name}-sums"), 0, run.ledger.stat().st_size // 1024


def commits(run: NemesisRun) -> Span:
    """How often the ledger was committed."""
    return whole(run.ledger.with_name(f"{run.ledger.name}-commits"))


def key(run: NemesisRun) -> Span:
    return whole(run.path / "keys" / "buffer.secret")


def segment(run: NemesisRun) -> Span:
    """A sample of the newest batch, which a learner that starts again is served once more; else the latest sample."""
    wanted = "SELECT segment, position, samples.bytes FROM samples JOIN items USING (item) WHERE segment IS NOT NULL"
    with closing(reading(run.ledger)) as db:
        newest_first = f"{wanted} ORDER BY state IN ('batched', 'trained') DESC, batch DESC, item DESC LIMIT 1"
        number, position, size = db.execute(newest_first).fetchone()
    (path,) = [path for path in folder_of(run.ledger).glob("*.samples") if int(path.stem) == number]
    return path, position, size


def rows(run: NemesisRun) -> Span:
    """Where the rows of the data begin."""
    return whole(max(run.ledger.with_name(f"{run.ledger.name}-rows").iterdir(), key=lambda path: path.stat().st_size))


def newest_checkpoint(run: NemesisRun) -> Path:
    return max(path for path in run.checkpoints.glob("v*") if path.suffix == "")


def checkpoint(run: NemesisRun) -> Span:
    return whole(newest_checkpoint(run) / "state" / "shard.bin")


def manifest(run: NemesisRun) -> Span:
    return whole(newest_checkpoint(run) / "manifest.json")


def config(run: NemesisRun) -> Span:
    return whole(run.file)


def whole(path: Path) -> Span:
    return path, 0, path.stat().st_size


FILES: dict[str, Callable[[NemesisRun], Span]] = {
    "ledger": ledger,
    "wal": log_of_ledger,
    "sums": page_sums,
    "commits": commits,
    "segment": segment,
    "rows": rows,
    "checkpoint": checkpoint,
    "manifest": manifest,
    "config": config,
    "key": key,
}
"""The bytes of each kind of file of a run."""
