"""Notices whether the ledger lacks commits, or was deleted or replaced while it is open.

SQLite silently drops what it cannot read of its log, and an older copy of the file is a sound database too. So each
transaction counts itself in the ledger, and the number is written to the witness, a small file beside it, after the
commit and before anything is acknowledged. The witness is not synced: after a power cut it may be older than the
ledger, never newer, unless the disk broke its promise or `buffer.fsync` is false.

The witness is one line: name of the ledger, number of commits, dashes, and CRC32C of these three. In place of dashes
an earlier release, which had no checksums of pages, left the CRC32C of the ledger's file at a clean end.

Linux lets a file be deleted while it is written. Such bytes are lost with the process, so `SameFiles` looks before each
commit.
"""

import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from google_crc32c import value as crc32c

from buffer.store import sql
from buffer.store.faults import ACCEPT, LostCommits, StoreGone
from buffer.store.pages import log_of
from configs.checkpoint_files import crc32c_of
from configs.variables import open_private

NONE = "-" * 8


class Commits(NamedTuple):
    """The name of a ledger, and how often it was committed."""

    ledger: str
    number: int
    file: str = NONE


class Witness:
    """The open witness. It is written through memory: a system call would change the time of the file, which waits for
    the disk's journal."""

    def __init__(self, path: Path, commits: Commits) -> None:
        self.ledger, self.number, _ = commits
        self._size = len(line_of(Commits(self.ledger, self.number)))
        self._descriptor = open_private(file_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, self._size)
            os.ftruncate(self._descriptor, self._size)
            self._memory = mmap(self._descriptor, self._size)
            self.note(commits=0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def note(self, commits: int = 1) -> None:
        """Count so many more commits. Raises OSError."""
        self.number += commits
        if os.fstat(self._descriptor).st_size < self._size:  # somebody cut it: what lies beyond its end has no memory
            os.ftruncate(self._descriptor, self._size)
        self._memory[:] = line_of(Commits(self.ledger, self.number))

    def close(self) -> None:
        with suppress(OSError):  # the ledger is complete without it
            self._memory.flush()
        self._memory.close()
        os.close(self._descriptor)


class SameFiles:
    """The files that are at `paths` now."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known = {str(path): identity(path) for path in paths}

    def require(self) -> None:
        """Raise StoreGone if a file is gone or another one."""
        for path, known in self._known.items():
            if identity(path) != known:
                raise StoreGone(Path(path))


def identity(file: Path | str | int) -> tuple[int, int] | None:
    """Device and inode, if there is such a file."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def file_of(path: Path) -> Path:
    """The witness of the ledger's file `path`."""
    return path.with_name(f"{path.name}-commits")


def noted(path: Path) -> Commits | None:
    """What the witness of the ledger `path` says. Raises ValueError if it is damaged."""
    try:
        text = file_of(path).read_bytes()
    except FileNotFoundError:
        return None
    if not text.strip(b"\0"):  # killed before it wrote the first line
        return None
    found = text.split()
    with suppress(ValueError, UnicodeDecodeError):
        words = [word.decode("ascii") for word in found]
        if len(words) == 4 and text == line_of(commits := Commits(words[0], int(words[1]), words[2])):
            return commits
    raise ValueError(f"{file_of(path)} is damaged: it does not say how often the ledger was committed")


def counted(db: sqlite3.Connection) -> Commits | None:
    """How often the ledger that `db` reads was committed; None for the file of an earlier release."""
    row = db.execute(sql.COMMITS).fetchone()
    return Commits(*row) if row else None


def require_all(path: Path, known: Commits | None, found: Commits | None) -> None:
    """Raise LostCommits unless the ledger, committed `found` times, has all commits `known` to its witness, which must
    be read before it."""
    if known is None or (found and found.ledger == known.ledger and found.number >= known.number):
        return
    if found and found.ledger == known.ledger:
        lost = known.number - found.number
        problem = f"lacks its last {lost} commits of {known.number}: its log was cut off, or an older copy was put back"
    elif path.exists():
        problem = f"is another ledger than the one that {file_of(path).name} knows, with {known.number} commits"
    else:
        problem = f"is gone, with {known.number} commits"
    remedy = f"bring the file and its -wal back as they were, or go on without what is lost with {ACCEPT}"
    raise LostCommits(f"buffer.path {path}: {problem}; {remedy}")


def require_same_bytes(path: Path, known: Commits | None) -> None:
    """Raise LostCommits if a ledger that an earlier release closed has other bytes now."""
    if known is None or known.file == NONE or not path.exists() or _has_log(path):
        return
    if (found := f"{crc32c_of(path):08x}") != known.file:
        problem = f"its CRC32C is {found}, and was {known.file} when the buffer closed it"
        remedy = f"bring back a copy of it, or go on with it as it is with {ACCEPT}"
        raise LostCommits(f"buffer.path {path}: the file is damaged, or was changed by hand: {problem}; {remedy}")


def _has_log(path: Path) -> bool:
    log = log_of(path)
    return log.exists() and log.stat().st_size > 0


def line_of(commits: Commits) -> bytes:
    text = b"%b %012d %b" % (commits.ledger.encode("ascii"), commits.number, commits.file.encode("ascii"))
    return b"%b %08x\n" % (text, crc32c(text))
