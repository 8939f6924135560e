"""CRC32C of each page of the ledger, in a file beside it: SQLite has checksums in its log only.

A commit appends the pages that it changes to the log. There `PageSums` reads them after the commit, and notes the
CRC32C of each. Then the store has SQLite copy the log into the ledger's file once it is long; any tool that opens the
file may do so too. So at a start each page of the file must have its checksum, unless SQLite reads it from the log.

The file of checksums has 4 bytes for each page: its CRC32C, exclusive or that of a page of zeros. So a page that was
never written, and that the ledger's file lacks or has a hole for, has 0. It is written through memory, as the witness
is, and synced before SQLite begins the log anew.

A kill or a power cut may leave pages in the log whose checksums were not noted, or not synced. `PageSums` notes them
before SQLite may copy the log into the file: before the ledger is opened for writing, and again before it is closed.

SQLite changes a page as it finds it. So when a page comes into the log for the first time since the log was begun, the
page in the file must still have its checksum. If not, the page gets DAMAGED in place of a checksum, and each start
refuses the ledger, also if the page in the file is whole again: what SQLite made of the damage is in the log.
"""

import logging
import os
import time
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from buffer.store.faults import ACCEPT, DamagedPage, LostCommits
from buffer.store.write_ahead import PAGE, Log
from configs.variables import open_private

log = logging.getLogger(__name__)
ZEROS = crc32c(bytes(PAGE))
ENTRY, AHEAD = 4, 2**16
"""Bytes of a checksum, and by how many bytes their file grows at once."""
AT_ONCE = 256
"""Pages read at a time."""
DAMAGED = 2**32 - 1
"""Stands where the checksum of a page would."""
LOOKS, LOOK_S = 3, 0.01
"""How often, and after how long, a page that seems damaged is read."""
LISTED = 20
Entries = npt.NDArray[np.uint32]


class PageSums:
    """The open file of checksums of the ledger `path`, to which nobody else writes."""

    def __init__(self, path: Path, fsync: bool, log_pages: int) -> None:
        self._path, self._fsync, self._log_pages = path, fsync, log_pages
        self._descriptor = os.open(file_of(path), os.O_RDWR | os.O_CLOEXEC)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # closing it before the ledger would end SQLite's locks
        self._memory: mmap | None = None
        self._log: Log | None = None
        self._lags = True
        self.damaged: int | None = None
        """A page that was damaged while the ledger was open."""
        try:
            self.note_log()
        except BaseException:
            self.close()
            raise

    def note_log(self) -> None:
        """Note and sync all pages of the log. Raises OSError."""
        found = Log(self._path)
        self.reserve(max(found.pages, default=1))
        for page, crc in found.pages.items():
            self._note(page, crc)
        self.sync()
        if self._log:
            self._log.close()
        self._log = found

    def follow(self) -> None:
        """From now on `note` is called after each commit; the log has those before."""
        self.note_log()
        assert self._log
        self._log.follow()
        self._lags = False

    @property
    def log_is_full(self) -> bool:
        """SQLite may copy the log into the file now, and is to do it."""
        return not self._lags and self._log is not None and self._log.size >= self._log_pages

    def reserve(self, pages: int) -> None:
        """Make room for so many pages. Raises OSError: a write to memory for which the disk has no room ends the
        process."""
        size = os.fstat(self._descriptor).st_size
        if self._memory is not None and len(self._memory) == size >= ENTRY * pages:
            return
        size = max(size, ENTRY * pages)
        size += -size % AHEAD
        os.posix_fallocate(self._descriptor, 0, size)
        self._unmap()
        self._memory = mmap(self._descriptor, size)

    def note(self) -> None:
        """Note the pages of the commit that SQLite has just made. Raises DamagedPage."""
        try:  # the commit is done, whatever fails here
            if self._lags:
                return self.follow()
            assert self._log
            for page, crc in self._log.next_commit():
                if page not in self._log.pages:
                    self._require_as_noted(page, crc)
                self._note(page, crc)
            if not self._log.is_whole:
                return self._note_copied()
            if self._log.is_anew or self.log_is_full:
                self.sync()
        except DamagedPage:
            raise
        except OSError:
            self._lags = True

    def _require_as_noted(self, page: int, crc: int) -> None:
        """Raise DamagedPage if the file has another version of `page` than it may have, now that the log has it too.

        The file may have a version of the log already, and may just be written to if another program copies the log.
        """
        assert self._memory
        noted = int.from_bytes(self._memory[ENTRY * (page - 1) : ENTRY * page], "little") ^ ZEROS
        for _ in range(LOOKS):
            found = crc32c(os.pread(self._file, PAGE, PAGE * (page - 1)).ljust(PAGE, b"\0"))
            if found in (noted, crc) or (page, found) in Log(self._path).versions:
                return
            time.sleep(LOOK_S)
        self._enter(page, DAMAGED)
        self.damaged = page
        with suppress(OSError):
            self.sync()
        raise DamagedPage(page, self._path)

    def _note_copied(self) -> None:
        """Note what the file has: another program emptied the log before the last commit was read from it."""
        assert self._log and self._memory
        if not self._log.is_empty:
            self._lags = True
            return
        with open(self._file, "rb", closefd=False) as stream:
            stream.seek(0)
            found = _entries(stream)
        self.reserve(found.size)
        known = np.frombuffer(self._memory[: ENTRY * found.size], "<u4")
        changed = (1 + np.flatnonzero(found != known)).tolist()
        for page in changed:
            self._note(page, int(found[page - 1]) ^ ZEROS)
        self.sync()
        names = f"{changed[:LISTED]}{' and more' if len(changed) > LISTED else ''}"
        log.warning(
            "%s: another program emptied its log during a commit; pages %s are taken as they are", self._path, names
        )

    def _note(self, page: int, crc: int) -> None:
        if page != self.damaged:
            self._enter(page, crc ^ ZEROS)

    def _enter(self, page: int, entry: int) -> None:
        assert self._memory
        self._memory[ENTRY * (page - 1) : ENTRY * page] = entry.to_bytes(ENTRY, "little")

    def sync(self) -> None:
        """Raises OSError."""
        if self._fsync and self._memory is not None:
            self._memory.flush()

    def _unmap(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        with suppress(OSError):
            self.sync()
        self._unmap()
        if self._log:
            self._log.close()
        os.close(self._descriptor)
        os.close(self._file)


def file_of(path: Path) -> Path:
    """The file of checksums of the ledger's file `path`."""
    return path.with_name(f"{path.name}-sums")


def require_same(path: Path, stream: BinaryIO) -> None:
    """Raise LostCommits unless the pages of the ledger `path`, open as `stream`, have their checksums.

    If a buffer may write to it meanwhile, the caller must be in a read transaction. Then SQLite only writes pages to
    the file that the log has, so the file is read before the log. A checksum that was noted meanwhile counts too.
    """
    remedy = f"bring back a copy of both files, or go on with the ledger as it is with {ACCEPT}"
    found = _entries(stream)
    try:
        # the second look knows a commit whose checksums were noted, or whose pages came into the log, during the first
        if other := _differing(found, path):
            other &= _differing(found, path)
    except FileNotFoundError:
        problem = f"{file_of(path).name}, which has the checksums of its pages, is gone"
        raise LostCommits(f"buffer.path {path}: {problem}; {remedy}") from None
    if other:
        problem = f"page {min(other)} has not the checksum that {file_of(path).name} has"
        causes = "is damaged, was changed by hand, or another program copied its log after a crash"
        raise LostCommits(f"buffer.path {path}: the file {causes}: {problem}; {remedy}")


def _differing(found: Entries, path: Path) -> set[int]:
    """Pages that have not the checksums in the file, unless the log has them.

    A page in the log differs nevertheless if it was damaged before SQLite changed it: it is marked as DAMAGED, or
    neither checksum is of a version in the log. But SQLite may have written a page that was never noted to the file
    before it made the log.
    """
    known = np.fromfile(file_of(path), "<u4")
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


def _entries(stream: BinaryIO) -> Entries:
    found = list[int]()
    while data := stream.read(AT_ONCE * PAGE):
        found += [crc32c(data[at : at + PAGE]) ^ ZEROS for at in range(0, len(data), PAGE)]
    return np.array(found, "<u4")


def begin(path: Path) -> None:
    """Write the checksums of the ledger's file as it is. No connection of this process may be open."""
    with open(path, "rb") as stream:
        entries = _entries(stream)
    draft = path.with_name(f"{file_of(path).name}.tmp")
    with open(draft, "wb", opener=open_private) as made:
        made.write(entries.tobytes())
        made.flush()
        os.fsync(made.fileno())
    draft.replace(file_of(path))
