"""Processes below this one that the running file of tests has started: of several files in one process an earlier one
may have left some that live as long as it, such as the resource tracker of Python's `multiprocessing`."""

from contextlib import suppress

import psutil

TRACKER = "multiprocessing.resource_tracker"
_before: frozenset[psutil.Process] = frozenset()


def remember() -> None:
    """Take what runs now for another file's. Called as a file of tests begins, by `tests/conftest.py`."""
    global _before
    _before = frozenset(psutil.Process().children(recursive=True))


def children(recursive: bool = False) -> list[psutil.Process]:
    """As psutil's, without those of other files of tests."""
    return [process for process in psutil.Process().children(recursive) if process not in _before]


def trackers() -> list[psutil.Process]:
    """The resource trackers that live directly below this process: one, or none yet. It serves all files of tests in
    this process; the next that needs it fails with a warning if another has ended it."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if any(TRACKER in word for word in process.cmdline()):  # a zombie has none
                found.append(process)
    return found
