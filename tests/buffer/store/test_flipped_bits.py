"""One flipped bit in any file of a killed buffer's ledger is refused in one line, or changes nothing that is read."""

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer.ledger.types import EvaluationRow, Lengths, Transaction
from buffer.problems import Problems
from buffer.store import pages
from buffer.store.faults import LostCommits, StoreError
from buffer.store.opening import require_whole
from buffer.store.sqlite import Store
from buffer.store.write_ahead import log_of
from tests.buffer.store.test_sqlite import accept, ledger_of

FILES = ("buffer.sqlite", "buffer.sqlite-wal", "buffer.sqlite-sums", "buffer.sqlite-commits")
PROBLEMS = Problems(100, lambda row: {"problem": f"What is {row} + {row}? " * 9, "answer": 2 * row}, "c" * 64)
Rows = dict[str, list[tuple[Any, ...]]]


def open_store(path: Path) -> Store:
    return Store(path, fsync=False, problems=PROBLEMS, digest=PROBLEMS.digest)


def everything(store: Store) -> tuple[Rows, object]:
    """All rows of all tables, and what a start reads."""
    db = store._db
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return {name: db.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in tables}, store.load()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a buffer that was killed: some pages of its ledger are in the file only, some in the log too."""
    live, killed = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("killed") / "run"
    with open_store(live / "buffer.sqlite") as store:
        ledger = ledger_of(store)
        for _ in range(30):
            accept(store, ledger, 1)
        ledger.batches.take(0), ledger.batches.trained(0), ledger.batches.take(1)
        evaluation = EvaluationRow(0, "done", 0, "rollout-0#3f", 1, "", '{"eval": {"mean@1": 0.5}}', "[]")
        changes = ledger.drain()
        changes.evaluations = {0: evaluation}
        changes.totals |= {("dropped", f"reason {number}"): Lengths(number) for number in range(40)}
        store.commit(Transaction(changes, noted=[("run.versions", 1, 2)]))
    with open_store(live / "buffer.sqlite") as store:
        accept(store, ledger_of(store), 1)
        shutil.copytree(live, killed, ignore=shutil.ignore_patterns("*.lock", "*-shm"))
    assert all((killed / name).stat().st_size for name in FILES)
    return killed


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_or_harmless(killed: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(killed, tmp_path / "sound")
    with open_store(tmp_path / "sound" / "buffer.sqlite") as store:
        wanted = everything(store)
    run, whole = tmp_path / "run", (killed / name).read_bytes()
    refused, draw = 0, random.Random(name)
    flips = 300 if name == "buffer.sqlite" else 30
    for _ in range(flips):
        bit = draw.randrange(8 * len(whole))
        shutil.copytree(killed, run)
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (run / name).write_bytes(data)
        try:
            with open_store(run / "buffer.sqlite") as store:
                assert everything(store) == wanted, f"bit {bit} of {name} was believed"
        except StoreError as error:
            assert "\n" not in str(error) and str(run / "buffer.sqlite") in str(error) and ";" in str(error)
            refused += 1
        shutil.rmtree(run)
    assert name == "buffer.sqlite-commits" or refused


def test_whoever_copies_the_log_into_the_file_causes_no_false_alarm(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "run")
    path = tmp_path / "run" / "buffer.sqlite"
    with closing(sqlite3.connect(path)) as db:  # SQLite copies the log when the last connection ends
        assert db.execute("SELECT COUNT(*) FROM items").fetchone() == (31,)
    assert not log_of(path).exists()
    open_store(path).close()


def test_a_log_that_was_begun_anew_many_times_leaves_all_checksums_right(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with Store(path, fsync=False) as store:
        store._db.execute("PRAGMA wal_autocheckpoint = 40")
        ledger = ledger_of(store)
        for number in range(300):
            accept(store, ledger, 1)
            if ledger.view.ready():
                ledger.batches.take(number // 2)
                ledger.batches.trained(number // 2)
            if number == 200:
                with pytest.raises(RuntimeError), store._transaction():
                    store._db.execute("UPDATE items SET reason = ?", ["x" * 2000])
                    raise RuntimeError
            if number % 50 == 7:
                require_whole(path, None)
                shutil.copytree(tmp_path, tmp_path / "killed", ignore=shutil.ignore_patterns("*.lock", "*-shm"))
                Store(tmp_path / "killed" / path.name, fsync=False).close()
                require_whole(tmp_path / "killed" / path.name, None)
                shutil.rmtree(tmp_path / "killed")


def test_the_file_of_checksums_grows_with_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with Store(path, fsync=False) as store:
        accept(store, ledger_of(store), 1)
        before = pages.file_of(path).read_bytes()
        assert store._sums
        store._sums.reserve(40_000)
        assert pages.file_of(path).read_bytes().startswith(before) and pages.file_of(path).stat().st_size >= 160_000
        accept(store, ledger_of(store), 1)
    require_whole(path, None)


def test_a_ledger_without_its_file_of_checksums_is_refused_until_that_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    Store(path).close()
    pages.file_of(path).unlink()
    with pytest.raises(LostCommits, match=r"buffer\.sqlite-sums, which has the checksums .* is gone; .*--accept-loss"):
        Store(path)
    pages.begin(path)
    Store(path).close()
