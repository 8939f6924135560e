"""CRC32C of each page of the ledger, in a file beside it: SQLite has checksums in its log only.

A commit appends the pages that it changes to the log. There `PageSums` reads them after the commit, and notes the
CRC32C of each. SQLite copies pages from the log into the ledger's file when it likes, as does any tool that opens the
file. So at a start every page of the file must have its checksum, but those that SQLite reads from the log.

The file of checksums has 4 bytes for each page: its CRC32C, exclusive or that of a page of zeros. So a page that was
never written, and that the ledger's file lacks or has a hole for, has 0. It is written through memory, as the witness
is, and synced before SQLite begins the log anew.

A kill or a power cut may leave pages in the log whose checksums were not noted, or not synced. `PageSums` notes them
before SQLite may copy the log into the file: before the ledger is opened for writing, and again before it is closed.

SQLite's log begins with a header and goes on with frames: a page with its number, the salt of the header, and a
checksum of all frames so far. The last frame of a commit also has the number of pages of the whole file. SQLite reads a
page from the file only if no committed frame has it. See https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from buffer.store.faults import ACCEPT, LostCommits
from configs.variables import open_private

PAGE = 4096
"""Bytes of a page: SQLite's default."""
HEADER, HEAD = struct.Struct(">IIII8sII"), struct.Struct(">II8sII")
"""The log's header has byte order, format, page size, count, salt and checksum; the head of a frame has page number,
pages after the commit or 0, salt and checksum."""
FRAME = HEAD.size + PAGE
ORDERS = {0x377F0682: "<u4", 0x377F0683: ">u4"}
"""Byte order of the words that are summed."""
FORMAT = 3007000
FRAMES_AT_ONCE = 64
MASK = 0xFFFFFFFF
Sums = tuple[int, int]
ZEROS = crc32c(bytes(PAGE))
ENTRY, AHEAD = struct.Struct("<I"), 2**16
"""A checksum, and by how many bytes their file grows at once."""
PAGES_AT_ONCE = 256
Entries = npt.NDArray[np.uint32]


class PageSums:
    """The open file of checksums of the ledger `path`, to which nobody else writes."""

    def __init__(self, path: Path, fsync: bool, log_pages: int) -> None:
        self._path, self._fsync, self._log_pages = path, fsync, log_pages
        self._descriptor = os.open(file_of(path), os.O_RDWR | os.O_CLOEXEC)
        self._memory: mmap | None = None
        self._log: Log | None = None
        self._lags = True
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
            ENTRY.pack_into(self._memory, ENTRY.size * (page - 1), crc ^ ZEROS)
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
        """Note the pages of the commit that SQLite has just made."""
        try:  # the commit is done, whatever fails here
            if self._lags:
                return self.follow()
            assert self._log and self._memory
            for page, crc in self._log.next_commit():
                ENTRY.pack_into(self._memory, ENTRY.size * (page - 1), crc ^ ZEROS)
            if self._log.is_anew or self._log.end >= self._log_pages * FRAME:
                self.sync()
        except OSError:
            self._lags = True

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
    """Pages that have not the checksums in the file, and are not in the log."""
    known = np.fromfile(file_of(path), "<u4")
    count = max(found.size, known.size)
    differing = 1 + np.flatnonzero(_padded(found, count) != _padded(known, count))
    return set(differing.tolist()) - Log(path).pages.keys()


def _padded(entries: Entries, count: int) -> Entries:
    return np.pad(entries, (0, count - entries.size))


def _entries(stream: BinaryIO) -> Entries:
    found = list[int]()
    while data := stream.read(PAGES_AT_ONCE * PAGE):
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


def log_of(path: Path) -> Path:
    """The log of the ledger's file `path`."""
    return path.with_name(f"{path.name}-wal")


class Log:
    """The log of the ledger `path`: `pages` has the CRC32C of the newest version of each page, by page number.

    Reads up to the first frame that is not valid, as SQLite does. `follow` it while SQLite writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.pages: dict[int, int] = {}
        self._path, self._salt = log_of(path), b""
        self.end = HEADER.size
        """Bytes of the log up to the last commit."""
        self._descriptor: int | None = None
        self.is_anew = False
        """SQLite began the log anew with the last commit."""
        waiting = dict[int, int]()
        with suppress(FileNotFoundError), open(self._path, "rb") as stream:
            for number, size, page, self._salt, end in _frames(stream):
                waiting[number] = crc32c(page)
                if size:
                    self.pages |= waiting
                    waiting, self.end = {}, end

    def follow(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def next_commit(self) -> Iterator[tuple[int, int]]:
        """Numbers and CRC32C of the pages of the commit that SQLite has just made. Raises OSError."""
        assert self._descriptor is not None, "follow it first"
        salt = os.pread(self._descriptor, HEADER.size, 0)[16:24]
        self.is_anew = salt != self._salt
        if self.is_anew:
            self._salt, self.end = salt, HEADER.size
        position = self.end
        while data := os.pread(self._descriptor, FRAMES_AT_ONCE * FRAME, position):
            for at in range(0, len(data) - FRAME + 1, FRAME):
                number, size, *_ = HEAD.unpack_from(data, at)
                yield number, crc32c(data[at + HEAD.size : at + FRAME])
                if size:
                    self.end = position + at + FRAME
                    return
            position += FRAMES_AT_ONCE * FRAME

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _frames(stream: BinaryIO) -> Iterator[tuple[int, int, bytes, bytes, int]]:
    """Page number, pages after the commit or 0, page, salt, and where the frame ends: of each valid frame."""
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
    """SQLite's checksum after each of `parts` equal parts of `data`, where that of all before it is `before`.

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
