"""A lock on a file, which ends with the process that holds it."""

import fcntl
import os
from pathlib import Path


class InUse(OSError):
    """Another process holds the lock."""


def lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def holder(file: Path) -> str:
    """Id of the local process that holds the lock, or "". Makes no file."""
    try:
        lock = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(lock)
    return ""


def locked(file: Path) -> int:
    """Lock `file`, made if need be; returns its descriptor. Raises InUse, OSError."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise InUse(f"in use by process {holder}") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
