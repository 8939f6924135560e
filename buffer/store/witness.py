"""Notices whether the ledger lacks commits, has damaged pages, or was deleted or replaced while it is open.

SQLite silently drops what it cannot read of its log, and an older copy of the file is a sound database too. So each
transaction counts itself in the ledger, and the number is written to the witness, a small file beside it, before
anything is acknowledged. The witness is not synced: after a power cut it may be older than the ledger, never newer,
unless the disk broke its promise or `buffer.fsync` is false. It is one line: name of the ledger, number of commits,
dashes (in place of which an earlier release left a CRC32C), and CRC32C of these.

SQLite has checksums in its log only, so a second file has one of each page. A commit appends pages to the log;
`PageSums` reads them there and notes the CRC32C of each. Then the store has SQLite copy the log into the ledger's file
once it is long; any tool that opens the file may do so too. So at a start each page of the file must have its checksum,
unless SQLite reads it from the log.

A checksum is stored exclusive or that of a page of zeros, so a page that was never written has 0. The checksums are
synced before SQLite begins the log anew. A kill may leave pages in the log whose checksums were not noted. `PageSums`
notes them before SQLite may copy the log: before the ledger is opened for writing, and before it is closed.

SQLite changes a page as it finds it. So when a page comes into the log for the first time since the log was begun, the
page in the file must still have its checksum. If not, the page gets DAMAGED in place of a checksum, and each start
refuses the ledger, also if the page in the file is whole again: what SQLite made of the damage is in the log.

The log begins with a header and goes on with frames: a page with its number, the salt of the header, and a checksum of
all frames so far. The last frame of a commit also has the number of pages of the whole file. See
https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

import logging
import os
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from buffer.store import sql
from buffer.store.faults import DamagedPage, StoreGone
from configs.variables import open_private

log = logging.getLogger(__name__)
NONE = "-" * 8
PAGE = 4096
HEADER, HEAD = struct.Struct(">IIII8sII"), struct.Struct(">II8sII")
"""Header: byte order, format, page size, count, salt and checksum. Head of a frame: page number, pages after the commit
or 0, salt and checksum."""
FRAME = HEAD.size + PAGE
ORDERS = {0x377F0682: "<u4", 0x377F0683: ">u4"}
"""Byte order of the words."""
FORMAT = 3007000
FRAMES_AT_ONCE = 64
MASK = 0xFFFFFFFF
Sums = tuple[int, int]
ZEROS = crc32c(bytes(PAGE))
ENTRY, AHEAD = struct.Struct("<I"), 2**16
"""A checksum, and by how many bytes their file grows."""
PAGES_AT_ONCE = 256
DAMAGED = MASK
"""Stands where the checksum of a page would."""
LOOKS, LOOK_S = 3, 0.01
"""How often, and after how long, a page that seems damaged is read."""
LISTED = 20
Entries = npt.NDArray[np.uint32]


class Commits(NamedTuple):
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
        if os.fstat(self._descriptor).st_size < self._size:  # somebody cut it: beyond its end there is no memory
            os.ftruncate(self._descriptor, self._size)
        self._memory[:] = line_of(Commits(self.ledger, self.number))

    def close(self) -> None:
        with suppress(OSError):  # the ledger is complete without it
            self._memory.flush()
        self._memory.close()
        os.close(self._descriptor)


class SameFiles:
    """The files at `paths`. Linux lets a file be deleted while it is written; its bytes end with the process."""

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
    return path.with_name(f"{path.name}-commits")


def noted(path: Path) -> Commits | None:
    """What the witness says. Raises ValueError if it is damaged."""
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
    """None for the file of an earlier release."""
    row = db.execute(sql.COMMITS).fetchone()
    return Commits(*row) if row else None


def line_of(commits: Commits) -> bytes:
    text = b"%b %012d %b" % (commits.ledger.encode("ascii"), commits.number, commits.file.encode("ascii"))
    return b"%b %08x\n" % (text, crc32c(text))


class PageSums:
    """The open file of checksums, to which nobody else writes."""

    def __init__(self, path: Path, fsync: bool, log_pages: int) -> None:
        self._path, self._fsync, self._log_pages = path, fsync, log_pages
        self._descriptor = os.open(sums_of(path), os.O_RDWR | os.O_CLOEXEC)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # closing it before the ledger would end SQLite's locks
        self._memory: mmap | None = None
        self._log: Log | None = None
        self._lags = True
        self.log_is_full = False
        """SQLite may copy the log into the file now, and is to do it."""
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
        assert self._memory
        for page, crc in found.pages.items():
            if page != self.damaged:
                ENTRY.pack_into(self._memory, ENTRY.size * (page - 1), crc ^ ZEROS)
        self.sync()
        if self._log:
            self._log.close()
        self._log = found

    def follow(self) -> None:
        """From now on `note` is called after each commit."""
        self.note_log()
        assert self._log
        self._log.follow()
        self._lags, self.log_is_full = False, self._log.end >= self._log_pages * FRAME

    def reserve(self, pages: int) -> None:
        """Make room for so many pages. Raises OSError: a write to memory for which the disk has no room ends the
        process."""
        size = os.fstat(self._descriptor).st_size
        if self._memory is not None and len(self._memory) == size >= ENTRY.size * pages:
            return
        size = max(size, ENTRY.size * pages)
        size += -size % AHEAD
        os.posix_fallocate(self._descriptor, 0, size)
        self._unmap()
        self._memory = mmap(self._descriptor, size)

    def note(self) -> None:
        """Note the pages of the commit that SQLite has just made. Raises DamagedPage."""
        try:  # the commit is done, whatever fails here
            if self._lags:
                return self.follow()
            assert self._log and self._memory
            for page, crc in self._log.next_commit():
                if page not in self._log.pages:
                    self._require_as_noted(page, crc)
                if page != self.damaged:
                    ENTRY.pack_into(self._memory, ENTRY.size * (page - 1), crc ^ ZEROS)
            if not self._log.is_whole:
                return self._note_copied()
            is_synced, self.log_is_full = self.log_is_full, self._log.end >= self._log_pages * FRAME
            if self.log_is_full or (self._log.is_anew and not is_synced):
                self.sync()
        except DamagedPage:
            raise
        except OSError:
            self._lags, self.log_is_full = True, False

    def _require_as_noted(self, page: int, crc: int) -> None:
        """Raise DamagedPage if the file has another version of `page` than it may have, now that the log has it too.

        The file may have a version of the log already, and may just be written to if another program copies the log.
        """
        assert self._memory
        noted = ENTRY.unpack_from(self._memory, ENTRY.size * (page - 1))[0] ^ ZEROS
        for _ in range(LOOKS):
            found = crc32c(os.pread(self._file, PAGE, PAGE * (page - 1)).ljust(PAGE, b"\0"))
            if found in (noted, crc) or (page, found) in Log(self._path).versions:
                return
            time.sleep(LOOK_S)
        ENTRY.pack_into(self._memory, ENTRY.size * (page - 1), DAMAGED)
        self.damaged = page
        with suppress(OSError):
            self.sync()
        raise DamagedPage(page, self._path)

    def _note_copied(self) -> None:
        """Note what the file has: another program emptied the log before the last commit was read from it."""
        assert self._log and self._memory
        self.log_is_full = False
        if not self._log.is_empty:
            self._lags = True
            return
        with open(self._file, "rb", closefd=False) as stream:
            stream.seek(0)
            found = entries_of(stream)
        self.reserve(found.size)
        known = np.frombuffer(self._memory[: ENTRY.size * found.size], "<u4")
        changed = (1 + np.flatnonzero(found != known)).tolist()
        for page in changed:
            if page != self.damaged:
                ENTRY.pack_into(self._memory, ENTRY.size * (page - 1), int(found[page - 1]))
        self.sync()
        names = f"{changed[:LISTED]}{' and more' if len(changed) > LISTED else ''}"
        log.warning(
            "%s: another program emptied its log during a commit; pages %s are taken as they are", self._path, names
        )

    def sync(self) -> None:
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


def sums_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-sums")


def entries_of(stream: BinaryIO) -> Entries:
    found = list[int]()
    while data := stream.read(PAGES_AT_ONCE * PAGE):
        found += [crc32c(data[at : at + PAGE]) ^ ZEROS for at in range(0, len(data), PAGE)]
    return np.array(found, "<u4")


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


class Log:
    """SQLite's log: `pages` has the CRC32C of the newest version of each page, by page number.

    Reads up to the first frame that is not valid, as SQLite does. `follow` it while SQLite writes to it. `versions` has
    page number and CRC32C of all versions of all pages that it had when it was read.
    """

    def __init__(self, path: Path) -> None:
        self.pages: dict[int, int] = {}
        self.versions: set[tuple[int, int]] = set()
        self._path, self._salt = log_of(path), b""
        self.end = HEADER.size
        """Up to the last commit, in bytes."""
        self._descriptor: int | None = None
        self.is_anew = False
        """SQLite began the log anew with the last commit."""
        self.is_whole = True
        """All of the last commit was found."""
        waiting = dict[int, int]()
        with suppress(FileNotFoundError), open(self._path, "rb") as stream:
            for number, size, page, self._salt, end in _frames(stream):
                waiting[number] = crc32c(page)
                if size:
                    self.versions |= waiting.items()
                    self.pages |= waiting
                    waiting, self.end = {}, end

    def follow(self) -> None:
        self.versions.clear()
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def next_commit(self) -> Iterator[tuple[int, int]]:
        """Numbers and CRC32C of the pages of the newest commit; `pages` gets one once it is handled. Raises OSError."""
        assert self._descriptor is not None, "follow it first"
        salt = os.pread(self._descriptor, HEADER.size, 0)[16:24]
        self.is_anew = salt != self._salt
        if self.is_anew:
            self._salt, self.end = salt, HEADER.size
            self.pages.clear()
        position, self.is_whole = self.end, False
        while data := os.pread(self._descriptor, FRAMES_AT_ONCE * FRAME, position):
            for at in range(0, len(data) - FRAME + 1, FRAME):
                number, size, *_ = HEAD.unpack_from(data, at)
                crc = crc32c(data[at + HEAD.size : at + FRAME])
                yield number, crc
                self.pages[number] = crc
                if size:
                    self.end, self.is_whole = position + at + FRAME, True
                    return
            position += FRAMES_AT_ONCE * FRAME

    @property
    def is_empty(self) -> bool:
        """SQLite has copied it into the file, and cut it off."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_size == 0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _frames(stream: BinaryIO) -> Iterator[tuple[int, int, bytes, bytes, int]]:
    """Page number, pages after the commit or 0, page, salt, and end of each valid frame."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return
    order, version, page_size, _, salt, *noted = HEADER.unpack(header)
    words, before, end = ORDERS.get(order, ""), (noted[0], noted[1]), HEADER.size
    if not words or (version, page_size) != (FORMAT, PAGE) or _sums((0, 0), header[:24], words) != [before]:
        return
    while (data := stream.read(FRAMES_AT_ONCE * FRAME)) and (count := len(data) // FRAME):
        frames = np.frombuffer(data, np.uint8, count * FRAME).reshape(count, FRAME)
        summed = np.hstack([frames[:, :8], frames[:, HEAD.size :]])
        for at, now in enumerate(_sums(before, summed.tobytes(), words, count)):
            frame = data[at * FRAME : (at + 1) * FRAME]
            number, size, its_salt, *noted = HEAD.unpack_from(frame)
            if not number or its_salt != salt or tuple(noted) != now:
                return
            before, end = now, end + FRAME
            yield number, size, frame[HEAD.size :], salt, end


def _sums(before: Sums, data: bytes, words: str, parts: int = 1) -> list[Sums]:
    """SQLite's checksum after each of `parts` equal parts of `data`, which follow the sum `before`.

    For each two words x and y it computes a += x + b and b += y + a. So (a, b) after a part is a sum of all its words,
    each times two factors, and of a matrix times the (a, b) before it, modulo 2^32.
    """
    values = np.frombuffer(data, words).astype(np.uint32).reshape(parts, -1)
    factors, (aa, ab, ba, bb) = _factors(values.shape[1])
    found, (a, b) = list[Sums](), before
    for part_a, part_b in (values @ factors).tolist():
        a, b = (aa * a + ab * b + part_a) & MASK, (ba * a + bb * b + part_b) & MASK
        found.append((a, b))
    return found


@cache
def _factors(count: int) -> tuple[npt.NDArray[np.uint32], tuple[int, int, int, int]]:
    """For `count` words: the factors of each word in a and in b, and the matrix [aa, ab, ba, bb]."""
    factors = np.zeros((count, 2), np.uint32)
    aa, ab, ba, bb = 1, 0, 0, 1
    for word in range(count - 2, -1, -2):
        factors[word], factors[word + 1] = ((aa + ab) & MASK, (ba + bb) & MASK), (ab, bb)
        aa, ab, ba, bb = (aa + ab) & MASK, (aa + 2 * ab) & MASK, (ba + bb) & MASK, (ba + 2 * bb) & MASK
    return factors, (aa, ab, ba, bb)
