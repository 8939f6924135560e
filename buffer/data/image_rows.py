"""Where the images of a data file's rows are, and what is wrong with them.

A path is read when its row is dispatched. A parquet file's images are copied to a temporary file, because it compresses
row groups as a whole.
"""

import errno
import mmap
import os
import stat
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, overload

from buffer.data.images import ImageError, counted, source_size

IMAGES, MARK = "images", "<image>"
KINDS = "bytes, a path, or a struct with one of the two as `bytes` or `path`"
LASTING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors that a person must mend. Others may end by themselves, as when a file share comes back."""


class ImageUnavailable(ImageError):
    """An image file that cannot be read now, and perhaps soon."""


class ImagePlace(NamedTuple):
    """In the file `path`, or else in the copy."""

    position: int
    size: int
    path: str = ""
    written_at: int = 0
    """Nanoseconds."""


class ImageFiles(Sequence[bytes]):
    """The images of one row, each read when it is asked for.

    Raises ImageError for a file that is gone or changed, ImageUnavailable while its file share is away.
    """

    def __init__(self, places: Sequence[ImagePlace], copy: mmap.mmap | bytes) -> None:
        self._places, self._copy = places, copy

    @property
    def num_bytes(self) -> int:
        return sum(place.size for place in self._places)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self._read(place) for place in self._places[index]]
        return self._read(self._places[index])

    def __repr__(self) -> str:
        """Example: `2 images: 31,022 bytes; 8,310 bytes of photos/7.jpg`."""
        words = [f"{place.size:,} bytes{f' of {place.path}' if place.path else ''}" for place in self._places]
        return f"{counted(len(words), 'image')}: {'; '.join(words)}"

    def _read(self, place: ImagePlace) -> bytes:
        if not place.path:
            return self._copy[place.position : place.position + place.size]
        data, written_at = read_file(place.path)
        if (len(data), written_at) != (place.size, place.written_at):
            raise ImageError(f"{place.path}: changed since the start; bring back the image that was there")
        return data


class ImageRows:
    """`place` names a row. `every`: of so many rows, one row's images are looked at. `room`: a folder on the disk for
    the copy. Raises ImageError; OSError where the disk is full."""

    def __init__(
        self,
        found: Iterable[tuple[Any, Any, str]],
        place: Callable[[int], str],
        folder: Path,
        most: int,
        every: int = 1,
        room: Path | None = None,
    ) -> None:
        self.sizes: list[tuple[int, int]] = []
        """(height, width)"""
        self.broken: list[str] = []
        self.unread: tuple[int, str] | None = None
        """The first row with an image that would not be seen, and why."""
        self._place, self._folder, self._most, self._every = place, folder, most, every
        self._places: dict[int, list[ImagePlace]] = {}
        self._copy: mmap.mmap | bytes = b""
        mismatch = ""
        with tempfile.TemporaryFile(dir=room) as draft:
            for row, (images, text, problem) in enumerate(found):
                self.unread = self.unread or ((row, problem) if problem else None)
                places = self._add(row, images, draft)
                if places:
                    self._places[row] = places
                if num_slots(text) != len(places) and not mismatch:
                    has = f"{num_slots(text)} {MARK} in its text, but {counted(len(places), 'image')}"
                    mismatch = f"{place(row)}: {has}; correct it"
            draft.flush()
            if draft.tell():
                self._copy = mmap.mmap(draft.fileno(), 0, prot=mmap.PROT_READ)
        if self._places and mismatch:  # else it is text like any other
            raise ImageError(f"{mismatch}, or leave it out")

    def of(self, row: int) -> ImageFiles | None:
        places = self._places.get(row)
        return ImageFiles(places, self._copy) if places else None

    def num_bytes(self) -> list[int]:
        """The largest first."""
        return sorted((sum(place.size for place in places) for places in self._places.values()), reverse=True)

    def _add(self, row: int, images: Any, draft: IO[bytes]) -> list[ImagePlace]:
        if images is not None and not isinstance(images, list):
            raise ImageError(f"{self._place(row)}: images is {type(images).__name__}, not a list; an image is {KINDS}")
        if images and len(images) > self._most:
            problem = f"{self._place(row)}: {len(images)} images, data.max_images is {self._most}"
            raise ImageError(f"{problem}; raise it, or leave the row out")
        places, named = [], self._place(row) if images else ""
        for number, image in enumerate(images or ()):
            where = f"{named}: image {number}"
            given = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
            if isinstance(given, str) and given:
                place = self._stat(given, where)
            elif isinstance(given, bytes) and given:
                place = ImagePlace(draft.tell(), len(given))
                draft.write(given)
            else:
                raise ImageError(f"{where} is {described(image)}; it must be {KINDS}")
            if row % self._every == 0:
                self._look_at(given if isinstance(given, bytes) else place.path, where)
            places.append(place)
        return places

    def _stat(self, given: str, where: str) -> ImagePlace:
        """A pipe or a device would never end."""
        path, remedy = str(self._folder / given), "correct data.image_dir, or leave the row out"
        try:
            status = os.stat(path)
            problem = "" if stat.S_ISREG(status.st_mode) else "not a file"
        except (OSError, ValueError) as error:  # ValueError: a null character
            problem = getattr(error, "strerror", str(error))
        if problem:
            raise ImageError(f"{where}: {path:.300}: {problem}; {remedy}")
        return ImagePlace(0, status.st_size, path, status.st_mtime_ns)

    def _look_at(self, image: bytes | str, where: str) -> None:
        try:
            self.sizes.append(source_size(image if isinstance(image, bytes) else read_file(image)[0]))
        except ImageError as error:
            self.broken.append(f"{where}: {error}")


class JoinedImages:
    """`parts`: the number of a file's first row, what introduces its errors, and its images."""

    def __init__(self, parts: Sequence[tuple[int, str, ImageRows]]) -> None:
        self._starts, self._parts = [start for start, _, _ in parts], [images for _, _, images in parts]
        self.sizes = [size for images in self._parts for size in images.sizes]
        self.broken = [f"{where}: {line}" for _, where, images in parts for line in images.broken]
        unread = ((start + found[0], found[1]) for start, _, images in parts if (found := images.unread))
        self.unread = next(unread, None)

    def of(self, row: int) -> ImageFiles | None:
        part = bisect_right(self._starts, row) - 1
        return self._parts[part].of(row - self._starts[part]) if part >= 0 else None

    def num_bytes(self) -> list[int]:
        return sorted((size for images in self._parts for size in images.num_bytes()), reverse=True)


def read_file(path: str) -> tuple[bytes, int]:
    """The file's bytes, and when it was written, in nanoseconds. Raises ImageError, ImageUnavailable."""
    try:
        with open(path, "rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError as error:
        kind = ImageError if error.errno in LASTING else ImageUnavailable
        raise kind(f"{path}: {error.strerror}; bring the image back") from None


def num_slots(text: Any) -> int:
    """Counts MARK in a text, and parts of type `image` in a message."""
    if isinstance(text, str):
        return text.count(MARK)
    if isinstance(text, Mapping):
        part = text.get("type") == "image" or text.get("image") is not None
        return part + num_slots(text.get("content")) + num_slots(text.get("text"))
    return sum(map(num_slots, text)) if isinstance(text, list) else 0


def described(image: Any) -> str:
    if isinstance(image, Mapping) and not {"bytes", "path"} & set(image):
        return f"a struct of {', '.join(map(str, image)) or 'nothing'}"
    return "empty" if image is None or isinstance(image, Mapping | str | bytes) else type(image).__name__
