"""Segments: the files that hold the samples' bytes, beside the SQLite file that says where.

Samples are appended and synced before the transaction that names them is committed; bytes that no committed row names
are overwritten. Space is allocated ahead, because a file that grows with each write is synced at a fifth of the speed.
A thread removes segments, because that takes the file system 50 ms.
"""

import errno
import os
import resource
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from buffer.store.faults import StoreGone
from buffer.store.witness import identity
from configs.variables import private_folder

SEGMENT_BYTES, AHEAD_BYTES = 64 * 2**20, 8 * 2**20
SPARES = 8
BLOCK_BYTES = 4096
"""A commit begins at a multiple of this: no write touches a block with committed bytes."""
BUFFERS = 512
"""Per system call; Linux takes 1024."""

Groups = Mapping[int, Sequence[bytes]]


class Place(NamedTuple):
    segment: int
    position: int


class Segments:
    """From byte `end` of segment `number` on."""

    def __init__(self, folder: Path, number: int, end: int, fsync: bool = True) -> None:
        self.folder, self.number, self.end, self._fsync = folder, number, end, fsync
        if not folder.is_dir():
            private_folder(folder)
            if fsync:
                _sync_folder(folder.parent)
        self._open: tuple[int, int] | None = None
        self._identity: tuple[int, int] | None = None
        self._allocated = 0
        self._spare: list[Path] = []
        self._remover = ThreadPoolExecutor(1, "segments")

    @contextmanager
    def appended(self, groups: Groups) -> Iterator[dict[int, Place]]:
        """Write `groups`; they count if the block ends without an error. Raises OSError."""
        before = self.number, self.end
        try:
            places: dict[int, Place] = {}
            self.end += -self.end % BLOCK_BYTES
            begin, waiting = self.end, list[bytes]()
            for item, samples in groups.items():
                size = sum(map(len, samples))
                if self.end and self.end + size > SEGMENT_BYTES:
                    if waiting:
                        self._write(begin, waiting)
                    self._close_file()
                    self.number, self.end, begin, waiting = self.number + 1, 0, 0, []
                places[item] = Place(self.number, self.end)
                waiting += samples
                self.end += size
            if waiting:
                self._write(begin, waiting)
            yield places
        except BaseException:
            self.number, self.end = before
            raise

    def read(self, place: Place, sizes: Sequence[int]) -> list[bytes]:
        """Samples of these sizes. Raises OSError if the file does not have them."""
        data = read(self.folder, place, sum(sizes))
        return [data[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]

    def path_of(self, number: int) -> Path:
        return path_of(self.folder, number)

    def missing(self, ends: Mapping[int, int]) -> Path | None:
        """The first file that is gone or shorter than its end."""
        for number, end in ends.items():
            path = path_of(self.folder, number)
            if not path.is_file() or path.stat().st_size < end:
                return path
        return None

    def keep(self, numbers: Collection[int]) -> None:
        """Delete all other segments: leftovers of a killed process."""
        kept = {path_of(self.folder, number) for number in (*numbers, self.number)}
        for path in [*self.folder.glob("[0-9]*.samples"), *self.folder.glob("[0-9]*.spare")]:
            if path not in kept:
                path.unlink()

    def remove(self, numbers: Collection[int]) -> None:
        """Reuse or delete segments later. What fails is repeated at the next start."""
        for number in numbers:
            self._remover.submit(self._remove, path_of(self.folder, number))

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            if len(self._spare) >= SPARES:
                path.unlink()
            else:
                self._spare.append(path.rename(path.with_suffix(".spare")))

    def close(self) -> None:
        self._remover.shutdown()
        self._close_file()
        while self._spare:
            self._spare.pop().unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._open:
            number, descriptor = self._open
            with suppress(OSError):  # its disk may be gone
                if number == self.number:
                    os.ftruncate(descriptor, self.end)
            os.close(descriptor)
            self._open = None

    def _write(self, position: int, samples: Sequence[bytes]) -> None:
        descriptor = self._descriptor()
        if self.end > self._allocated:
            with suppress(OSError):  # the write itself will raise
                os.posix_fallocate(descriptor, position, self.end - position + AHEAD_BYTES)
            self._allocated = self.end + AHEAD_BYTES
        for first in range(0, len(samples), BUFFERS):
            buffers = samples[first : first + BUFFERS]
            end = position + sum(map(len, buffers))
            if (position := position + os.pwritev(descriptor, buffers, position)) < end:
                position = _write_rest(descriptor, b"".join(buffers)[position - end :], position)
        if self._fsync:
            os.fdatasync(descriptor)

    def _descriptor(self) -> int:
        path = path_of(self.folder, self.number)
        if self._open and self._open[0] == self.number:
            if identity(path) != self._identity:
                raise StoreGone(path)
            return self._open[1]
        self._close_file()
        if self._spare and not path.exists():
            self._spare.pop().rename(path)
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._open, self._allocated = (self.number, descriptor), os.fstat(descriptor).st_size
        self._identity = identity(descriptor)
        if self._fsync:
            _sync_folder(self.folder)
        return descriptor


class InMemory:
    """`Segments` without files; each group is a segment."""

    number, end = 1, 0

    def __init__(self) -> None:
        self._groups: dict[int, bytes] = {}

    @contextmanager
    def appended(self, groups: Groups) -> Iterator[dict[int, Place]]:
        places = {item: Place(number, 0) for number, item in enumerate(groups, self.number + 1)}
        yield places
        self._groups |= {place.segment: b"".join(groups[item]) for item, place in places.items()}
        self.number += len(groups)

    def read(self, place: Place, sizes: Sequence[int]) -> list[bytes]:
        ends = list(accumulate(sizes, initial=place.position))
        return [self._groups[place.segment][begin:end] for begin, end in pairwise(ends)]

    def path_of(self, number: int) -> Path:
        return Path("memory")

    def missing(self, ends: Mapping[int, int]) -> None:
        """Nothing can be missing in memory."""

    def keep(self, numbers: Collection[int]) -> None:
        """Does nothing."""

    def remove(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._groups.pop(number, None)

    def close(self) -> None:
        """Does nothing."""


def folder_of(file: Path) -> Path:
    return file.with_name(f"{file.name}-samples")


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.samples"


def read(folder: Path, place: Place, size: int) -> bytes:
    """Raises OSError if the file does not have the bytes, FileNotFoundError once removed."""
    path = path_of(folder, place.segment)
    descriptor = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, size, place.position)
    finally:
        os.close(descriptor)
    path.stat()  # raises if it was renamed meanwhile
    if len(data) != size:
        found = f"{len(data)} bytes from {place.position} on, {size} were written"
        raise OSError(errno.EIO, found, str(path))
    return data


def open_file(path: Path, flags: int, mode: int = 0o777) -> int:
    """Open a file, with the reserve if the process has no open file left."""
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    with reserve():
        return os.open(path, flags, mode)


@contextmanager
def reserve() -> Iterator[None]:
    """Let the process open as many files as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _write_rest(descriptor: int, data: bytes, position: int) -> int:
    """Write what the system left over, as on a nearly full disk; returns the position after it."""
    rest = memoryview(data)
    while rest:
        number = os.pwrite(descriptor, rest, position)
        rest, position = rest[number:], position + number
    return position


def _sync_folder(folder: Path) -> None:
    """A new file survives a power cut only once its folder is synced."""
    descriptor = open_file(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
