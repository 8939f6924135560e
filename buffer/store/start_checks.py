"""What a start compares: a ledger's commits with its witness, and its pages with their checksums."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import numpy as np

from buffer.store.faults import ACCEPT, LostCommits
from buffer.store.witness import DAMAGED, NONE, ZEROS, Commits, Entries, Log, entries_of, file_of, log_of, sums_of
from configs.checkpoint_files import crc32c_of
from configs.variables import open_private
from configs.writing import removed_on_failure

WITHOUT_LOG = b"\x01\x01"
"""Bytes 18 and 19 of a file without a log."""


def require_all(path: Path, known: Commits | None, found: Commits | None) -> None:
    """Raise LostCommits unless the ledger, committed `found` times, has all commits `known` to its witness.

    The witness must be read before the ledger.
    """
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


def require_same_pages(path: Path, stream: BinaryIO) -> None:
    """Raise LostCommits unless the pages of the ledger `path`, open as `stream`, have their checksums.

    Beside a live buffer the caller must be in a read transaction. Then SQLite only writes pages to the file that the
    log has, so the file is read before the log.
    """
    remedy = f"bring back a copy of both files, or go on with the ledger as it is with {ACCEPT}"
    found = entries_of(stream)
    try:
        # checksums that were noted, and pages that came into the log, during the first look
        if other := _differing(found, path):
            other &= _differing(found, path)
    except FileNotFoundError:
        problem = f"{sums_of(path).name}, which has the checksums of its pages, is gone"
        raise LostCommits(f"buffer.path {path}: {problem}; {remedy}") from None
    if other:
        problem = f"page {min(other)} has not the checksum that {sums_of(path).name} has"
        causes = "is damaged, was changed by hand, or another program copied its log after a crash"
        raise LostCommits(f"buffer.path {path}: the file {causes}: {problem}; {remedy}")


def _differing(found: Entries, path: Path) -> set[int]:
    """Pages that have not the checksums in the file, unless the log has them.

    A page in the log differs nevertheless if it was damaged before SQLite changed it: it is marked as DAMAGED, or
    neither checksum is of a version in the log. But SQLite may have written a page that was never noted to the file
    before it made the log.
    """
    known = np.fromfile(sums_of(path), "<u4")
    count = max(found.size, known.size)
    found, known = _padded(found, count), _padded(known, count)
    wal = Log(path)

    def is_explained(page: int) -> bool:
        now, noted = int(found[page - 1]), int(known[page - 1])
        if page not in wal.pages or noted == DAMAGED:
            return False
        return not noted or not wal.versions.isdisjoint({(page, now ^ ZEROS), (page, noted ^ ZEROS)})

    return {page for page in (1 + np.flatnonzero(found != known)).tolist() if not is_explained(page)}


def _padded(entries: Entries, count: int) -> Entries:
    return np.pad(entries, (0, count - entries.size))


def begin_sums(path: Path) -> None:
    """Write the checksums of the ledger's file as it is. No connection of this process may be open.

    A copy that SQLite made (`VACUUM INTO`) has no log. To give it one changes page 1 in the file, so that comes first.
    """
    with open(path, "rb") as stream:
        formats = stream.read(20)[18:]
    if formats == WITHOUT_LOG:
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA journal_mode = WAL")
    with open(path, "rb") as stream:
        entries = entries_of(stream)
    draft = path.with_name(f"{sums_of(path).name}.tmp")
    with removed_on_failure(draft):
        with open(draft, "wb", opener=open_private) as made:
            made.write(entries.tobytes())
            made.flush()
            os.fsync(made.fileno())
        draft.replace(sums_of(path))
