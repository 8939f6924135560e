"""A locked file names the process that holds it, until the lock is closed."""

import os
from pathlib import Path

import pytest

from buffer.store.lock import InUse, holder, locked


def test_a_file_is_held_by_one_process_until_its_lock_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "run.lock"
    assert holder(file) == "" and not file.exists()
    lock = locked(file)
    assert holder(file) == str(os.getpid())
    with pytest.raises(InUse, match=f"in use by process {os.getpid()}$"):
        locked(file)
    os.close(lock)
    assert holder(file) == "" and file.exists()
    os.close(locked(file))


@pytest.mark.parametrize(("written", "named"), [(b"", "unknown"), (b"\xff\n", "\ufffd")])
def test_a_lock_in_which_no_process_can_be_read_is_held_all_the_same(
    written: bytes, named: str, tmp_path: Path
) -> None:
    lock = locked(tmp_path / "run.lock")
    os.ftruncate(lock, 0)
    os.pwrite(lock, written, 0)
    assert holder(tmp_path / "run.lock") == named
    with pytest.raises(InUse, match=f"in use by process {named}"):
        locked(tmp_path / "run.lock")
    os.close(lock)


def test_a_holder_is_looked_up_without_leaving_the_file_open(tmp_path: Path) -> None:
    os.close(locked(tmp_path / "run.lock"))
    before = os.listdir("/proc/self/fd")
    assert holder(tmp_path / "run.lock") == "" and os.listdir("/proc/self/fd") == before
