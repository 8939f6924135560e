"""prctl(2): has the kernel end a process with its parent, or hand it orphans. Only on Linux.

The C library is looked up at import: a forked process must not wait for the loader's lock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """The caller compares its parent's id afterwards: the parent may have ended before."""
    _prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of processes below this one that lose theirs."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if LIBC is not None and LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
