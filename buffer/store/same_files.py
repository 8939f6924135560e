"""Whether the files that a process has open are still at their paths. Used by `sqlite.py` and `segments.py`.

Linux lets a file be deleted, moved or replaced while it is written. Bytes written from then on are lost
with the process, so they must not be acknowledged.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from buffer.store.faults import StoreGone


class SameFiles:
    """`paths`, all of which exist, each with the file that is there now."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known = {str(path): identity(path) for path in paths}

    def require(self) -> None:
        """Raise StoreGone if there is no file, or another one, at one of the paths."""
        for path, known in self._known.items():
            if identity(path) != known:
                raise StoreGone(Path(path))


def identity(file: Path | str | int) -> tuple[int, int] | None:
    """Device and inode of a path or descriptor; None: there is no such file."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
