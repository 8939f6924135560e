"""A commit that cannot be made now says why, each cause in its own words, and holds nothing up."""

import asyncio
import errno
import os
import resource
import sqlite3
import time
from pathlib import Path

import pytest

from buffer.store import failures
from buffer.store.failures import remedy
from buffer.store.segments import open_file
from buffer.wire import server
from tests.harness.buffer_process import buffer, group, in_loop, make_requests, rollout


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "full"), failures.MAKE_ROOM),
        (OSError(errno.EDQUOT, "full"), failures.MAKE_ROOM),
        (OSError(errno.EMFILE, "files"), failures.CLOSE_FILES),
        (OSError(errno.ENFILE, "files"), failures.SYSTEM_FILES),
        (OSError(errno.EIO, "broken"), ""),
        (sqlite_error(sqlite3.SQLITE_FULL), failures.MAKE_ROOM),
        (sqlite_error(sqlite3.SQLITE_IOERR_SHMSIZE), failures.MAKE_ROOM),
        (sqlite_error(sqlite3.SQLITE_BUSY), failures.END_LOCK),
        (sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT), failures.END_LOCK),
        (sqlite_error(sqlite3.SQLITE_LOCKED), failures.END_LOCK),
        (sqlite_error(sqlite3.SQLITE_CORRUPT), ""),
        (sqlite_error(sqlite3.SQLITE_IOERR), ""),
    ],
)
def test_each_cause_has_its_own_words(error: sqlite3.Error | OSError, words: str) -> None:
    assert remedy(error) == words


@in_loop
async def test_a_locked_ledger_holds_nothing_up_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite waited for the lock in the event loop, 5 s at a time, and the log asked for room on the disk."""
    monkeypatch.setattr(server, "RETRY_S", (0.05, 0.1))
    path = tmp_path / "buffer.sqlite"
    async with buffer(make_requests(path)) as it, rollout(it.address) as served:
        (item,) = await served.ask(1) or []
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        putting = asyncio.create_task(served.put(item, group(item.item)))
        longest_s, began = 0.0, time.monotonic()
        while failures.END_LOCK not in caplog.text and time.monotonic() < began + 60:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.monotonic() - before)
        assert failures.END_LOCK in caplog.text and failures.MAKE_ROOM not in caplog.text
        assert longest_s < 4.0
        other.execute("ROLLBACK")
        other.close()
        assert (await putting).accepted


def test_the_store_opens_a_file_with_its_reserve_where_connections_took_all_others(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        os.close(open_file(tmp_path / "segment", os.O_RDWR | os.O_CREAT, 0o600))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == lowest + 1, "connections get none of it"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest)
    assert (tmp_path / "segment").stat().st_mode & 0o777 == 0o600
