"""Failures of a commit that end once somebody makes room, with their remedies."""

import errno
import sqlite3

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
NO_FILES = {errno.EMFILE, errno.ENFILE}
MAKE_ROOM = "make room on its disk"
END_LOCK = "another program holds the file locked: end what reads, copies or changes it with SQLite"
CLOSE_FILES = (
    "the buffer has no open file left, whatever room the disk has: end what opens connections to it, or start it "
    "where `ulimit -Hn` is higher"
)
SYSTEM_FILES = "this machine has no open file left (fs.file-max): end what holds so many"


def remedy(error: sqlite3.Error | OSError) -> str:
    """Return what ends a transient failure, in words; "" for any other."""
    if isinstance(error, OSError):
        if error.errno in DISK_FULL:
            return MAKE_ROOM
        return {errno.EMFILE: CLOSE_FILES, errno.ENFILE: SYSTEM_FILES}.get(error.errno or 0, "")
    code = getattr(error, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_IOERR_SHMSIZE or code & 0xFF == sqlite3.SQLITE_FULL:
        return MAKE_ROOM
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return END_LOCK
    return ""


def out_of_files(error: OSError) -> bool:
    return error.errno in NO_FILES
