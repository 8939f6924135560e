"""Processes below this one that the running file of tests has started: of several files in one process an earlier one
may have left some that live as long as it, such as the resource tracker of Python's `multiprocessing`."""

import psutil

_before: frozenset[psutil.Process] = frozenset()


def remember() -> None:
    """Take what runs now for another file's. Called as a file of tests begins, by `tests/conftest.py`."""
    global _before
    _before = frozenset(psutil.Process().children(recursive=True))


def children(recursive: bool = False) -> list[psutil.Process]:
    """As psutil's, without those of other files of tests."""
    return [process for process in psutil.Process().children(recursive) if process not in _before]
