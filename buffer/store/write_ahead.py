"""Reads SQLite's write-ahead log: which pages were committed to it.

The log begins with a header and goes on with frames: a page with its number, the salt of the header, and a checksum of
all frames so far. The last frame of a commit also has the number of pages of the whole file. SQLite reads a page from
the file only if no committed frame has it. See https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

PAGE = 4096
"""Bytes of a page: SQLite's default."""
HEADER, HEAD = struct.Struct(">IIII8sII"), struct.Struct(">II8sII")
"""The log's header has byte order, format, page size, count, salt and checksum; the head of a frame has page number,
pages after the commit or 0, salt and checksum."""
FRAME = HEAD.size + PAGE
ORDERS = {0x377F0682: "<u4", 0x377F0683: ">u4"}
"""Byte order of the words that are summed."""
FORMAT = 3007000
AT_ONCE = 64
"""Frames read at a time."""
MASK = 0xFFFFFFFF
Sums = tuple[int, int]


def log_of(path: Path) -> Path:
    """The log of the ledger's file `path`."""
    return path.with_name(f"{path.name}-wal")


class Log:
    """The log of the ledger `path`: `pages` has the CRC32C of the newest version of each page, by page number.

    Reads up to the first frame that is not valid, as SQLite does. `follow` it while SQLite writes to it. `versions` has
    page number and CRC32C of all versions of all pages that it had when it was read.
    """

    def __init__(self, path: Path) -> None:
        self.pages: dict[int, int] = {}
        self.versions: set[tuple[int, int]] = set()
        self._path, self._salt, self._end = log_of(path), b"", HEADER.size
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
                    waiting, self._end = {}, end

    def follow(self) -> None:
        self.versions.clear()
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def next_commit(self) -> Iterator[tuple[int, int]]:
        """Numbers and CRC32C of the pages of the commit that SQLite has just made. Raises OSError.

        While one is handled, `pages` does not have it yet.
        """
        assert self._descriptor is not None, "follow it first"
        salt = os.pread(self._descriptor, HEADER.size, 0)[16:24]
        self.is_anew = salt != self._salt
        if self.is_anew:
            self._salt, self._end = salt, HEADER.size
            self.pages.clear()
        position, self.is_whole = self._end, False
        while data := os.pread(self._descriptor, AT_ONCE * FRAME, position):
            for at in range(0, len(data) - FRAME + 1, FRAME):
                number, size, *_ = HEAD.unpack_from(data, at)
                crc = crc32c(data[at + HEAD.size : at + FRAME])
                yield number, crc
                self.pages[number] = crc
                if size:
                    self._end, self.is_whole = position + at + FRAME, True
                    return
            position += AT_ONCE * FRAME

    @property
    def is_empty(self) -> bool:
        """SQLite has copied it into the file, and cut it off."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_size == 0

    @property
    def size(self) -> int:
        """Pages written since the log was begun."""
        return self._end // FRAME

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
    while (data := stream.read(AT_ONCE * FRAME)) and (count := len(data) // FRAME):
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
