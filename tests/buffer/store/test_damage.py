"""Bytes at rest: what was flipped, cut off, put back or deleted is noticed, and never served."""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from buffer.ledger.types import Transaction
from buffer.store import sql, start_checks, witness
from buffer.store.faults import DamagedSample, LostCommits, StoreError, StoreGone
from buffer.store.sqlite import Store, reading
from buffer.store.witness import Commits, file_of, line_of, noted
from configs.checkpoint_files import crc32c_of
from tests.buffer.store.test_sqlite import accept, ledger_of, packed
from tests.harness.buffer_process import samples_of

SEGMENT = Path("buffer.sqlite-samples") / "000001.samples"


def flip(file: Path, bit: int) -> None:
    """Flip one bit."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def begin(folder: Path, groups: int = 4, closed: bool = True) -> Path:
    """A ledger with so many groups; not `closed`: as a killed buffer leaves it, with its log."""
    path = folder / "buffer.sqlite"
    store = Store(path, fsync=False)
    ledger = ledger_of(store)
    for _ in range(groups):
        accept(store, ledger, 1, size=50)
    if closed:
        store.close()
        return path
    killed = folder / "killed"
    shutil.copytree(folder, killed, ignore=shutil.ignore_patterns("killed", "*.lock"))
    store.close()
    return killed / "buffer.sqlite"


@pytest.mark.parametrize("index", [0, 1])
def test_a_flipped_bit_of_a_sample_is_found_when_it_is_read(tmp_path: Path, index: int) -> None:
    path = begin(tmp_path)
    for bit in random.Random(0).sample(range(50 * 8), 40):
        flip(tmp_path / SEGMENT, 50 * 8 * index + bit)
        with Store(path) as store:
            for read in (lambda: store.group(0), lambda: store.samples(0, [index])):
                with pytest.raises(DamagedSample, match=rf"sample {index} of item 0 in .*: its CRC32C is \w+, and was"):
                    read()
            assert store.samples(0, [1 - index]) == [packed(0, 50)[1 - index]]
            assert store.group(1) == packed(1, 50), "the groups beside it are served"
        flip(tmp_path / SEGMENT, 50 * 8 * index + bit)


def test_a_segment_that_is_cut_or_deleted_while_it_is_served_is_damage(tmp_path: Path) -> None:
    path = begin(tmp_path)
    with Store(path) as store:
        os.truncate(tmp_path / SEGMENT, 20)
        with pytest.raises(DamagedSample, match=r"item 0 in .*bytes from 0 on, 100 were written"):
            store.group(0)
        (tmp_path / SEGMENT).unlink()
        with pytest.raises(DamagedSample, match=r"sample 1 of item 0 in .*No such file"):
            store.samples(0, [1])


def test_readers_of_the_file_get_no_damaged_sample(tmp_path: Path) -> None:
    path = begin(tmp_path)
    flip(tmp_path / SEGMENT, 3)
    with closing(reading(path)) as db:
        found = db.execute("SELECT data_of(segment, position, bytes, crc32c) FROM samples WHERE item = 0").fetchall()
    assert found == [(b"",), (packed(0, 50)[1],)]


def as_schema_4(path: Path) -> None:
    """The file as the release before wrote it: without what is known of each row of the data set."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DROP TABLE rows")
        db.execute("ALTER TABLE problems DROP COLUMN place")
        db.execute("PRAGMA user_version = 4")
    file_of(path).unlink()
    witness.sums_of(path).unlink()


def as_schema_3(path: Path) -> None:
    """The file as a release with schema 3 wrote it: without checksums and the count of commits."""
    as_schema_4(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("ALTER TABLE samples DROP COLUMN crc32c")
        db.execute("DELETE FROM meta WHERE name IN ('ledger', 'commits')")
        db.execute("PRAGMA user_version = 3")


def as_schema_7(path: Path) -> None:
    """The file as a release with schema 7 closed it: without checksums of its pages, with one of the whole file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 7")
    witness.sums_of(path).unlink()
    name, number, *_ = file_of(path).read_text().split()
    file_of(path).write_bytes(line_of(Commits(name, int(number), f"{crc32c_of(path):08x}")))


def test_a_ledger_of_the_release_before_is_read_on_and_new_samples_are_checked(tmp_path: Path) -> None:
    path = begin(tmp_path)
    as_schema_3(path)
    with closing(reading(path)) as db:
        query = "SELECT data_of(segment, position, bytes, crc32c) FROM samples WHERE item = 0"
        assert [data for (data,) in db.execute(query)] == packed(0, 50)
    with Store(path) as store:
        assert [samples_of(store, item) for item in range(4)] == [packed(item, 50) for item in range(4)]
        assert accept(store, ledger_of(store), 1) == [4]
        assert store._db.execute("SELECT item FROM samples WHERE crc32c IS NOT NULL GROUP BY item").fetchall() == [(4,)]
    with Store(path) as store:
        assert samples_of(store, 4) == packed(4)
        assert store._db.execute("PRAGMA user_version").fetchone() == (sql.SCHEMA,)


def cut_log(path: Path) -> None:
    log = path.with_name("buffer.sqlite-wal")
    os.truncate(log, log.stat().st_size * 2 // 3)


def flip_log(path: Path) -> None:
    log = path.with_name("buffer.sqlite-wal")
    flip(log, log.stat().st_size * 8 // 2)


def delete_log(path: Path) -> None:
    path.with_name("buffer.sqlite-wal").unlink()


@pytest.mark.parametrize("damage", [cut_log, flip_log, delete_log])
def test_a_log_that_lost_its_tail_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = begin(tmp_path, groups=8, closed=False)
    Store(begin(tmp_path / "whole", groups=8, closed=False)).close()
    damage(path)
    with pytest.raises(LostCommits, match=r"lacks its last \d commits of 8|is another ledger than") as error:
        Store(path)
    assert "\n" not in str(error.value) and "--accept-loss" in str(error.value) and str(path) in str(error.value)


def test_an_older_copy_that_was_put_back_is_refused(tmp_path: Path) -> None:
    path = begin(tmp_path)
    shutil.copyfile(path, tmp_path / "copy")
    with Store(path) as store:
        accept(store, ledger_of(store), 1)
        noted = file_of(path).read_bytes()
    shutil.copyfile(tmp_path / "copy", path)
    file_of(path).write_bytes(noted)
    with pytest.raises(LostCommits, match=r"lacks its last 1 commits of 5: its log was cut off, or an older copy"):
        Store(path)
    other = begin(tmp_path / "other")
    shutil.copyfile(other, path)
    with pytest.raises(LostCommits, match=r"is another ledger than the one that buffer\.sqlite-commits knows"):
        Store(path)
    path.unlink()
    with pytest.raises(LostCommits, match="is gone, with 5 commits; bring the file"):
        Store(path)
    assert not path.exists(), "a refused start writes nothing"


def test_a_flipped_bit_of_a_closed_ledger_is_refused(tmp_path: Path) -> None:
    path = begin(tmp_path)
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 40):
        flip(path, bit)
        with pytest.raises(StoreError) as error:
            Store(path)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
        path.write_bytes(whole)
    Store(path).close()


def test_a_flipped_bit_of_a_ledger_that_an_earlier_release_closed_is_refused(tmp_path: Path) -> None:
    path = begin(tmp_path)
    as_schema_7(path)
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 40):
        flip(path, bit)
        with pytest.raises(StoreError, match=r"damaged|not a database|another program|schema") as error:
            Store(path)
        assert "\n" not in str(error.value) and not witness.sums_of(path).exists()
        path.write_bytes(whole)
    Store(path).close()
    Store(path).close()
    assert witness.sums_of(path).exists() and file_of(path).read_text().split()[2] == "-" * 8


def test_a_witness_that_is_gone_or_damaged_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = begin(tmp_path)
    whole = file_of(path).read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 30):
        file_of(path).write_bytes(whole)
        flip(file_of(path), bit)
        caplog.clear()
        Store(path, fsync=False).close()
        assert file_of(path).read_bytes() == whole and "is damaged: it does not say how often" in caplog.text
    file_of(path).unlink()
    Store(path).close()
    assert file_of(path).read_bytes() == whole


def test_a_commit_is_noted_once_it_is_made(tmp_path: Path) -> None:
    with Store(tmp_path / "buffer.sqlite") as store:
        ledger = ledger_of(store)
        for number in range(3):
            accept(store, ledger, 1)
            assert int(file_of(tmp_path / "buffer.sqlite").read_text().split()[1]) == number + 1
        store._db.execute("PRAGMA query_only = ON")
        ledger.ask("a", 0, 1, 0.0)
        with pytest.raises(sqlite3.OperationalError):
            store.commit(Transaction(ledger.drain()))
        assert int(file_of(tmp_path / "buffer.sqlite").read_text().split()[1]) == 3


def damage_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 3 + 200] = bytes(200)
    path.write_bytes(data)
    start_checks.begin_sums(path)


def say(path: Path, statement: str) -> None:
    """Have the ledger's file say so, as if the buffer had written it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(statement)
    start_checks.begin_sums(path)


def test_a_table_whose_definition_is_no_text_any_more_is_refused(tmp_path: Path) -> None:
    """SQLite quotes the definition in its error, which Python cannot decode."""
    path = begin(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"CREATE TABLE items", b"CREATE TABLE\xd5items", 1))
    start_checks.begin_sums(path)
    with pytest.raises(StoreError, match=r"the file is damaged: .*bring back a copy of it") as error:
        Store(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_page, "the file is damaged: "),
        (lambda path: say(path, "UPDATE items SET state = 'stoled' WHERE item = 1"), "unknown state: item 1"),
        (lambda path: say(path, "UPDATE items SET bytes = 9 WHERE item = 2"), "other samples than its item: item 2"),
        (lambda path: say(path, "DELETE FROM samples WHERE item = 2 AND idx = 1"), "other samples than its item"),
        (lambda path: say(path, "UPDATE samples SET position = 1 << 40 WHERE item = 3"), "outside of its segment"),
        (lambda path: say(path, "UPDATE samples SET segment = 77 WHERE item = 3"), "outside of its segment: item 3"),
        (lambda path: say(path, "UPDATE items SET state = 'batched', batch = 9"), "a batch that was not formed"),
        (lambda path: say(path, "INSERT INTO batches VALUES (5, 0, 0, 0)"), "next batch does not follow"),
    ],
)
def test_a_damaged_ledger_is_refused_at_the_start(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    path = begin(tmp_path)
    damage(path)
    with pytest.raises(StoreError, match=words) as error:
        Store(path)
    assert "\n" not in str(error.value) and "room" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("name", ["buffer.sqlite", "buffer.sqlite-wal", str(SEGMENT)])
@pytest.mark.parametrize("how", ["delete", "replace", "move"])
def test_a_file_that_goes_while_it_is_written_ends_it(tmp_path: Path, name: str, how: str) -> None:
    file = tmp_path / name
    store = Store(tmp_path / "buffer.sqlite", fsync=False)
    ledger = ledger_of(store)
    accept(store, ledger, 1)
    if how == "replace":
        shutil.copyfile(file, tmp_path / "other")
        (tmp_path / "other").replace(file)
    elif how == "move":
        file.rename(tmp_path / "other")
    else:
        file.unlink()
    with pytest.raises(StoreGone, match=f"{file.name} was deleted or replaced while the buffer ran") as error:
        accept(store, ledger, 1)
    assert "\n" not in str(error.value)
    store.close()


def test_a_witness_that_somebody_cuts_while_it_is_open_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with Store(path, fsync=False) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 1)
        os.truncate(file_of(path), 0)
        accept(store, ledger, 1)
        known = noted(path)
        assert known and known.number == 2
