"""The witness: a small file beside the ledger that knows how often the ledger was committed. Used by `sqlite.py`.

SQLite drops what it cannot read of its log without a word: a log that was cut off, or an older copy of the file that
somebody put back, is a sound database that lacks the last commits. So each transaction counts itself in the table
`commits`, and the number is written here after the commit and before anything is acknowledged. The file is not synced,
which would take as long as the commit: after a power cut it may be older than the ledger, never newer, unless the
disk lost what it had promised to keep, or `buffer.fsync` is false.

One line: name of the ledger, number of commits, CRC32C of the two, as in `3f0c9a52b7e1d684 000000004711 9c3e01f2`.
"""

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from google_crc32c import value as crc32c

from buffer.store.faults import ACCEPT, LostCommits


class Commits(NamedTuple):
    """The name of a ledger, and how often it was committed."""

    ledger: str
    number: int


class Witness:
    """The file of the ledger `path`, open for writing. It says `commits` from now on."""

    def __init__(self, path: Path, commits: Commits) -> None:
        self.ledger, self.number = commits
        self._descriptor = os.open(file_of(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._write()
            os.ftruncate(self._descriptor, len(_line(commits)))
        except BaseException:
            os.close(self._descriptor)
            raise

    def _write(self) -> None:
        os.pwrite(self._descriptor, _line(Commits(self.ledger, self.number)), 0)

    def note(self) -> None:
        """A transaction was committed."""
        self.number += 1
        with suppress(OSError):  # the commit is done and must not be repeated; the next one writes its number
            self._write()

    def close(self) -> None:
        """The last number is on disk when this returns."""
        with suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)


def file_of(path: Path) -> Path:
    """The witness of the ledger's file `path`."""
    return path.with_name(f"{path.name}-commits")


def noted(path: Path) -> Commits | None:
    """What the witness of the ledger `path` says; None if there is no witness. Raises ValueError if it is damaged."""
    try:
        text = file_of(path).read_bytes()
    except FileNotFoundError:
        return None
    found = text.split()
    with suppress(ValueError, UnicodeDecodeError):
        if len(found) == 3 and text == _line(commits := Commits(found[0].decode("ascii"), int(found[1]))):
            return commits
    raise ValueError(f"{file_of(path)} is damaged: it does not say how often the ledger was committed")


def counted(db: sqlite3.Connection) -> Commits | None:
    """How often the ledger that `db` reads was committed; None for the file of an earlier release."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'commits'").fetchone():
        return None
    row = db.execute("SELECT ledger, number FROM commits").fetchone()
    return Commits(*row) if row else None


def require_all(path: Path, known: Commits | None, found: Commits | None) -> None:
    """Raise LostCommits unless the ledger `path`, committed `found` times, has all commits that its witness has `known`
    of. `found` None: the file is gone, or is of an earlier release. Read the witness before the ledger."""
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


def _line(commits: Commits) -> bytes:
    text = f"{commits.ledger} {commits.number:012d}".encode("ascii")
    return b"%b %08x\n" % (text, crc32c(text))
