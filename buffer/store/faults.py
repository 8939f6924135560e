"""Errors of a run's ledger and samples on disk."""

import errno
from pathlib import Path

from buffer.ledger.types import LedgerError

ACCEPT = "--accept-loss"
"""The flag that accepts a loss."""


class StoreError(LedgerError):
    """The file cannot be the ledger's."""


class LostCommits(StoreError):
    """The ledger lacks commits, or is another one, or is gone."""


class StoreGone(OSError):
    """A file of the ledger was deleted or replaced while the buffer ran."""

    def __init__(self, path: Path) -> None:
        problem = f"{path.name} was deleted or replaced while the buffer ran, and what is written to it is lost"
        super().__init__(errno.ENOENT, f"{problem}; put the file back, or begin anew with another run.name")

    def __str__(self) -> str:
        return str(self.strerror)


class DamagedPage(OSError):
    """A page of the ledger was damaged while the buffer ran."""

    def __init__(self, page: int, path: Path) -> None:
        problem = f"page {page} was damaged, or changed by another program, before the last commit changed it"
        remedy = f"bring back a copy of {path.name}, its -wal and its -sums, or go on with it as it is with {ACCEPT}"
        super().__init__(errno.EIO, f"{problem}; {remedy}")

    def __str__(self) -> str:
        return str(self.strerror)


class DamagedSample(Exception):
    def __init__(self, item: int, index: int, path: Path, problem: str) -> None:
        super().__init__(f"sample {index} of item {item} in {path}: {problem}")
        self.item, self.index, self.path, self.problem = item, index, path, problem

    @property
    def reason(self) -> str:
        """The same text for all groups of a file."""
        return f"a sample is damaged in {self.path.name}"
