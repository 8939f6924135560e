"""One flipped bit in any file of a killed buffer's ledger is refused in one line, or changes nothing that is read."""

import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer.ledger.rules import Ledger
from buffer.ledger.types import EvaluationRow, Lengths, Transaction
from buffer.problems import Problems
from buffer.store import start_checks, witness
from buffer.store.faults import LostCommits, StoreError
from buffer.store.opening import require_whole
from buffer.store.past import accept_loss, losses, past
from buffer.store.sqlite import Store
from buffer.store.witness import log_of
from configs.load import load
from tests.buffer.store.test_sqlite import accept, ledger_of

FILES = ("buffer.sqlite", "buffer.sqlite-wal", "buffer.sqlite-sums", "buffer.sqlite-commits")
PROBLEMS = Problems(100, lambda row: {"problem": f"What is {row} + {row}? " * 9, "answer": 2 * row}, "c" * 64)
Rows = dict[str, list[tuple[Any, ...]]]


def open_store(path: Path) -> Store:
    return Store(path, fsync=False, problems=PROBLEMS, digest=PROBLEMS.digest)


def copy(source: str, target: str) -> None:
    """Segments are large, and only read here."""
    (os.link if source.endswith(".samples") else shutil.copyfile)(source, target)


def go_on(store: Store, ledger: Ledger) -> list[int]:
    """Have a group stored, and train the next batch if it is ready."""
    version = ledger.state.version
    if ledger.view.ready():
        ledger.batches.take(version), ledger.batches.trained(version)
    return accept(store, ledger, 1, version=ledger.state.version)


def everything(store: Store) -> tuple[Rows, object]:
    """All rows of all tables, and what a start reads."""
    db = store._db
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return {name: db.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in tables}, store.load()


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder that waits for no disk, where there is one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def killed(memory: Path) -> Path:
    """The folder of a buffer that was killed: some pages of its ledger are in the file only, some in the log too."""
    live, killed = memory / "live", memory / "killed"
    with open_store(live / "buffer.sqlite") as store:
        ledger = ledger_of(store)
        for _ in range(150):
            assert go_on(store, ledger)
        evaluation = EvaluationRow(0, "done", 0, "rollout-0#3f", 1, "", '{"eval": {"mean@1": 0.5}}', "[]")
        changes = ledger.drain()
        changes.evaluations = {0: evaluation}
        changes.totals |= {("dropped", f"reason {number}"): Lengths(number) for number in range(40)}
        store.commit(Transaction(changes, noted=[("run.versions", 1, 2)]))
    with open_store(live / "buffer.sqlite") as store:
        assert go_on(store, ledger_of(store))
        shutil.copytree(live, killed, ignore=shutil.ignore_patterns("*.lock", "*-shm"))
    assert all((killed / name).stat().st_size for name in FILES)
    return killed


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_or_harmless(killed: Path, memory: Path, name: str) -> None:
    shutil.copytree(killed, memory / "sound", copy_function=copy)
    with open_store(memory / "sound" / "buffer.sqlite") as store:
        wanted = everything(store)
    shutil.rmtree(memory / "sound")
    run, whole = memory / "run", (killed / name).read_bytes()
    refused, draw = 0, random.Random(name)
    flips = 300 if name == "buffer.sqlite" else 30
    for _ in range(flips):
        bit = draw.randrange(8 * len(whole))
        shutil.copytree(killed, run, copy_function=copy)
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
    assert refused > flips / 2 or name == "buffer.sqlite-commits"


def test_whoever_copies_the_log_into_the_file_causes_no_false_alarm(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "run")
    path = tmp_path / "run" / "buffer.sqlite"
    with closing(sqlite3.connect(path)) as db:  # SQLite copies the log when the last connection ends
        assert db.execute("SELECT COUNT(*) FROM items").fetchone() == (151,)
    assert not log_of(path).exists()
    open_store(path).close()


def test_a_log_that_was_begun_anew_many_times_leaves_all_checksums_right(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with Store(path, fsync=False) as store:
        store._db.execute("PRAGMA wal_autocheckpoint = 40")
        ledger = ledger_of(store)
        for number in range(300):
            assert go_on(store, ledger)
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
        before = witness.sums_of(path).read_bytes()
        assert store._sums
        store._sums.reserve(40_000)
        assert witness.sums_of(path).read_bytes().startswith(before) and witness.sums_of(path).stat().st_size >= 160_000
        accept(store, ledger_of(store), 1)
    require_whole(path, None)


def test_a_ledger_without_its_file_of_checksums_is_refused_until_that_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    Store(path).close()
    witness.sums_of(path).unlink()
    with pytest.raises(LostCommits, match=r"buffer\.sqlite-sums, which has the checksums .* is gone; .*--accept-loss"):
        Store(path)
    start_checks.begin_sums(path)
    Store(path).close()


def test_a_log_that_is_all_there_is_of_a_ledger_is_missed_when_its_first_page_is_damaged(tmp_path: Path) -> None:
    """SQLite then sees an empty file, as at the first start."""
    config = load(
        [f"--run.folder={tmp_path}", "--run.name=r", "--model.path=m", "--data.train=d", "--reward.function=math"]
    )
    path = config.run.path / "buffer.sqlite"
    with Store(path, fsync=False) as store:
        accept(store, ledger_of(store), 1)
        shutil.copytree(config.run.path, tmp_path / "killed", ignore=shutil.ignore_patterns("*.lock", "*-shm"))
    shutil.rmtree(config.run.path)
    (tmp_path / "killed").rename(config.run.path)
    data = bytearray(log_of(path).read_bytes())
    data[1000] ^= 1
    log_of(path).write_bytes(data)
    (line,) = losses(config)
    assert "is another ledger than the one that buffer.sqlite-commits knows, with 1 commits" in line
    with pytest.raises(LostCommits):
        Store(path)
    accept_loss(config)
    assert losses(config) == [] and past(config).trained == 0
    with Store(path) as store:
        assert store.load().items == ()
