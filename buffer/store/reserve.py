"""Opens a file of the store though connections have used up the open files that the process allows itself.

`buffer/resources.py` keeps the soft limit below what the system lets the process have; the rest is for the store.
"""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_file(path: Path, flags: int, mode: int = 0o777) -> int:
    """As `os.open`, with the reserve where no file is left."""
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
