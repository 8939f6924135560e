"""Checksums of pages after kills, refused starts, full disks and failing syncs: a sound ledger is never refused."""

import errno
import multiprocessing
import os
import random
import shutil
import sqlite3
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from buffer.store import opening, sql, sqlite, start_checks, witness
from buffer.store.faults import DamagedPage, LostCommits, StoreError
from buffer.store.opening import LOG_PAGES, require_whole
from buffer.store.past import losses
from buffer.store.witness import FRAME, PAGE, Log, log_of
from configs.load import load
from tests.buffer.store.test_damage import as_schema_7, flip
from tests.buffer.store.test_flipped_bits import go_on, open_store
from tests.buffer.store.test_sqlite import accept, ledger_of

FORK = multiprocessing.get_context("fork")


def killed_before_its_note(folder: Path) -> Path:
    """The ledger of a buffer that was killed after a commit, before the checksums of its pages were noted."""
    path = folder / "live" / "buffer.sqlite"
    with open_store(path) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 3)
        before = witness.sums_of(path).read_bytes()
        accept(store, ledger, 3)
        shutil.copytree(path.parent, folder / "killed", ignore=shutil.ignore_patterns("*.lock", "*-shm"))
    killed = folder / "killed" / path.name
    witness.sums_of(killed).write_bytes(before)
    return killed


def test_a_refused_start_after_a_kill_causes_no_false_alarm(tmp_path: Path) -> None:
    """When the refused start closes the ledger, SQLite copies the log into the file."""
    path = killed_before_its_note(tmp_path)
    with pytest.raises(StoreError, match="undo the change of the problems"):
        sqlite.Store(path, digest="d" * 64)
    open_store(path).close()
    require_whole(path, None)


def test_a_refused_start_of_an_earlier_ledger_causes_no_false_alarm(tmp_path: Path) -> None:
    """It was brought to this schema by then."""
    path = tmp_path / "buffer.sqlite"
    open_store(path).close()
    as_schema_7(path)
    with pytest.raises(StoreError, match="undo the change of the problems"):
        sqlite.Store(path, digest="d" * 64)
    open_store(path).close()


@pytest.mark.parametrize("earlier", [False, True])
def test_a_start_on_a_full_disk_causes_no_false_alarm(tmp_path: Path, monkeypatch: Any, earlier: bool) -> None:
    path = killed_before_its_note(tmp_path)
    if earlier:
        open_store(path).close()
        as_schema_7(path)

    def full(descriptor: int, begins: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "posix_fallocate", full)
        open_store(path)
    open_store(path).close()


def test_checksums_that_a_full_disk_does_not_take_leave_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    open_store(path).close()
    draft = path.with_name(f"{witness.sums_of(path).name}.tmp")
    draft.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        start_checks.begin_sums(path)
    assert not draft.is_symlink()
    open_store(path).close()


def test_a_full_log_of_an_earlier_ledger_is_not_begun_anew_before_its_pages_are_noted(tmp_path: Path) -> None:
    """A start makes two commits: SQLite would copy the log after the first, and begin it anew with the second."""
    path = tmp_path / "live" / "buffer.sqlite"
    open_store(path).close()
    as_schema_7(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("DROP TABLE evaluations")
        for number in range(LOG_PAGES // 4):
            db.execute("INSERT INTO problems VALUES (?, ?, '')", [number + 1000, "x" * 16_000])
        shutil.copytree(path.parent, tmp_path / "killed", ignore=shutil.ignore_patterns("*.lock", "*-shm"))
    path = tmp_path / "killed" / path.name
    assert log_of(path).stat().st_size > LOG_PAGES * FRAME
    open_store(path).close()
    open_store(path).close()


def test_a_sync_that_fails_after_a_commit_fails_no_commit(tmp_path: Path, monkeypatch: Any) -> None:
    """The commit is done: its caller would take it for undone, and write the next samples over those of this one."""
    path = tmp_path / "buffer.sqlite"
    with open_store(path) as store:
        ledger = ledger_of(store)
        assert store._sums
        monkeypatch.setattr(store._sums, "_log_pages", 1)
        with monkeypatch.context() as patch:

            def fail() -> None:
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(store._sums, "sync", fail)
            accept(store, ledger, 1)
        accept(store, ledger, 1)
        assert noted(path) >= Log(path).pages.items()
    open_store(path).close()


def noted(path: Path) -> set[tuple[int, int]]:
    data = witness.sums_of(path).read_bytes()
    return {(at // 4 + 1, int.from_bytes(data[at : at + 4], "little") ^ witness.ZEROS) for at in range(0, len(data), 4)}


def fail_to_read(descriptor: int, size: int, position: int) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


def test_commits_whose_pages_could_not_be_read_are_noted_with_the_next(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "buffer.sqlite"
    with open_store(path) as store:
        ledger = ledger_of(store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fail_to_read)
            accept(store, ledger, 1)
        accept(store, ledger, 1)
        assert noted(path) >= set(Log(path).pages.items())


def test_commits_whose_pages_could_not_be_read_are_noted_at_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    """Once the log is copied into the file, nobody knows their checksums."""
    path = tmp_path / "buffer.sqlite"
    with open_store(path) as store, monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail_to_read)
        accept(store, ledger_of(store), 5)
    open_store(path).close()


def test_checksums_are_synced_before_the_log_is_gone(tmp_path: Path, monkeypatch: Any) -> None:
    """A power cut in between would leave pages in the file whose checksums the disk has not."""
    path, sizes = tmp_path / "buffer.sqlite", list[int]()
    store = open_store(path)
    accept(store, ledger_of(store), 1)
    assert store._sums
    monkeypatch.setattr(store._sums, "sync", lambda: sizes.append(log_of(path).stat().st_size))
    store.close()
    assert sizes and sizes[0] > 0


def test_checksums_are_synced_if_another_program_had_the_log_begun_anew(tmp_path: Path, monkeypatch: Any) -> None:
    path, synced = tmp_path / "buffer.sqlite", list[bool]()
    with open_store(path) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 1)
        assert store._sums
        monkeypatch.setattr(store._sums, "sync", lambda: synced.append(True))
        accept(store, ledger, 1)
        assert not synced
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0] == 0
        accept(store, ledger, 1)
        assert synced


def test_checksums_are_synced_once_before_the_buffer_has_the_log_begun_anew(tmp_path: Path, monkeypatch: Any) -> None:
    """The first commit of the new log needs no sync: until there is another one, the log has its pages."""
    with open_store(tmp_path / "buffer.sqlite") as store:
        ledger, synced = ledger_of(store), list[bool]()
        assert store._sums and store._sums._log
        monkeypatch.setattr(store._sums, "sync", lambda: synced.append(True))
        store._sums._log_pages = 1
        accept(store, ledger, 1)
        assert len(synced) == 1 and not store._sums._log.is_anew
        store._sums._log_pages = 1000
        accept(store, ledger, 1)
        assert len(synced) == 1 and store._sums._log.is_anew


def write_until_killed(path: Path, ready: Any) -> None:
    """Commit again and again; the log is begun anew every few commits."""
    store = open_store(path)
    store._sums._log_pages = 30  # type: ignore[union-attr]
    ledger = ledger_of(store)
    ready.send(None)
    while True:
        go_on(store, ledger)


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.long)])
def test_a_ledger_whose_buffer_is_killed_at_any_time_is_never_refused(tmp_path: Path, kills: int) -> None:
    path, draw = tmp_path / "buffer.sqlite", random.Random(kills)
    for _ in range(kills):
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=write_until_killed, args=(path, theirs))
        process.start()
        theirs.close()
        ours.recv()  # EOFError: its start was refused
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.join()
        if draw.random() < 0.3:
            with pytest.raises(StoreError, match="undo the change"):
                sqlite.Store(path, digest="d" * 64)
    open_store(path).close()
    require_whole(path, None)


def test_a_ledger_whose_log_another_program_copied_after_a_kill_says_so(tmp_path: Path) -> None:
    path = killed_before_its_note(tmp_path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT COUNT(*) FROM items").fetchone()
    with pytest.raises(LostCommits, match=r"or another program copied its log after a crash: page \d+ has not"):
        open_store(path)


def test_whoever_reads_while_a_commit_is_not_noted_yet_sees_no_damage(tmp_path: Path, monkeypatch: Any) -> None:
    """SQLite has copied the commit, and the next one begins the log anew before the reader sees it."""
    path = tmp_path / "buffer.sqlite"
    with open_store(path) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 1)
        assert store._sums
        with store._transaction():
            store._db.execute(sql.CHANGES)
        store._db.execute("PRAGMA wal_autocheckpoint = 1")
        with monkeypatch.context() as patch:
            patch.setattr(store._sums, "note", lambda: None)
            change(store)

        def seen_while_the_next_commit_is_written(path: Path) -> Log:
            patch.setattr(witness, "Log", Log)
            assert store._sums
            store._sums.note()
            change(store)
            return Log(path.with_name("no such file"))

        with monkeypatch.context() as patch:
            patch.setattr(witness, "Log", seen_while_the_next_commit_is_written)
            require_whole(path, None)


def copied(path: Path) -> None:
    """Another program has SQLite copy the log into the file, and cut it off."""
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


@pytest.mark.parametrize("end", ["closed", "killed", "beside a reader"])
@pytest.mark.parametrize("full", [False, True], ids=["", "the log is full"])
def test_a_page_that_is_damaged_while_the_buffer_runs_is_not_taken_over(tmp_path: Path, end: str, full: bool) -> None:
    """SQLite changes the page as it finds it, and the log has right checksums of wrong bytes."""
    path = tmp_path / "live" / "buffer.sqlite"
    store = open_store(path)
    ledger = ledger_of(store)
    accept(store, ledger, 3)
    with store._transaction():
        store._db.execute(sql.CHANGES)
    change(store)
    copied(path)
    (root,) = store._db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'changes'").fetchone()
    flip(path, 8 * (PAGE * root - 1))  # in its row
    store._db.execute("PRAGMA shrink_memory")  # SQLite reads the pages again
    if full:
        store._sums._log_pages = 1  # type: ignore[union-attr]
    reader = closing(opening.read_only(path)) if end == "beside a reader" else nullcontext()
    with reader as db:
        if db:
            db.execute("BEGIN").execute("SELECT * FROM meta").fetchall()
        with pytest.raises(DamagedPage, match=r"page \d+ was damaged, or changed by another program") as damaged:
            change(store)
        shutil.copytree(path.parent, tmp_path / "killed", ignore=shutil.ignore_patterns("*.lock", "*-shm"))
        store.close()
    if end == "killed":
        path = tmp_path / "killed" / path.name
    for _ in range(2):
        with pytest.raises(LostCommits, match=r"page \d+ has not the checksum"):
            open_store(path)
        if end != "closed":  # the disk gives the right byte again; the log has what SQLite made of the wrong one
            flip(path, 8 * (PAGE * root - 1))
    assert "\n" not in str(damaged.value) and "--accept-loss" in str(damaged.value)


@pytest.mark.parametrize("moment", ["before it is read", "while it is read"])
def test_a_log_that_another_program_empties_during_a_commit_causes_no_false_alarm(
    tmp_path: Path, moment: str, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "buffer.sqlite"
    with open_store(path) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 1)
        assert store._sums and store._sums._log
        note, pread = store._sums.note, os.pread

        def emptied() -> None:
            copied(path)
            note()

        def emptied_after_the_header(descriptor: int, size: int, position: int) -> bytes:
            data = pread(descriptor, size, position)
            if position == 0:
                copied(path)
            return data

        with monkeypatch.context() as patch:
            if moment == "before it is read":
                patch.setattr(store._sums, "note", emptied)
            else:
                patch.setattr(os, "pread", emptied_after_the_header)
            accept(store, ledger, 1)
        assert "another program emptied its log during a commit; pages [" in caplog.text
        accept(store, ledger, 1)
        require_whole(path, None)
    open_store(path).close()


def change(store: sqlite.Store) -> None:
    """A commit that writes to a page that no other commit writes to."""
    with store._transaction():
        store._db.execute("INSERT INTO changes VALUES (0, '', '', '', 0.0)")


def test_a_damaged_witness_hides_no_damaged_page_from_a_launch(tmp_path: Path) -> None:
    config = load(
        [f"--run.folder={tmp_path}", "--run.name=r", "--model.path=m", "--data.train=d", "--reward.function=math"]
    )
    path = config.run.path / "buffer.sqlite"
    open_store(path).close()
    flip(path, 8 * 5000)
    witness.file_of(path).write_text("no witness\n")
    (line,) = losses(config)
    assert "page 2 has not the checksum" in line


def test_a_ledger_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "buffer.sqlite"
    open_store(path).close()

    def refuse(file: Path, *mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(opening, "open", refuse, raising=False)
    line = r"buffer\.sqlite: Permission denied; it must be a file that this user may read and write"
    with pytest.raises(StoreError, match=line):
        require_whole(path, None)
