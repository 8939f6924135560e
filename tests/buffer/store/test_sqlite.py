"""The store: what is written is read back, by us and others; what cannot be used is refused; a kill tears nothing."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer.ledger.rules import Ledger
from buffer.ledger.types import ItemState, Lengths, SampleStats, Saved, Transaction, item_values
from buffer.problems import Problems
from buffer.store import segments
from buffer.store.faults import StoreError
from buffer.store.opening import LOG_PAGES
from buffer.store.segments import AHEAD_BYTES, SEGMENT_BYTES, SPARES
from buffer.store.sql import APPLICATION, READABLE, SCHEMA
from buffer.store.sqlite import Store, reading
from tests.harness.buffer_process import samples_of

ROOT = Path(__file__).parents[3]
GROUP = (SampleStats(10, 6, 0.0), SampleStats(12, 8, 1.0, True))
PROBLEMS = Problems(100, lambda row: {"problem": f"Größe {row}", "answer": row}, "c" * 64)


def ledger_of(store: Store) -> Ledger:
    ledger = Ledger(100, groups=2, max_staleness=2, shuffle=False)
    ledger.restore(store.load(), 0.0)
    return ledger


def accept(store: Store, ledger: Ledger, number: int, size: int = 5, version: int = 0) -> list[int]:
    """Have `number` groups stored, of two samples of `size` bytes."""
    work = ledger.ask("a", version, number, 0.0)
    for it in work:
        assert ledger.put("a", it.item, it.lease, GROUP, 0.0) is None
    store.commit(Transaction(ledger.drain(), {it.item: packed(it.item, size) for it in work}))
    return [it.item for it in work]


def packed(item: int, size: int = 5) -> list[bytes]:
    return [bytes([item % 100]) * size, bytes([item % 100 + 100]) * size]


def test_a_new_store_is_empty(tmp_path: Path) -> None:
    for path in (None, tmp_path / "deep" / "buffer.sqlite"):
        with Store(path) as store:
            assert store.load() == Saved() and store.untrained_bytes() == {} and samples_of(store, 0) == []


@pytest.mark.parametrize("fsync", [True, False])
def test_samples_are_synced_before_they_are_acknowledged(fsync: bool, tmp_path: Path, monkeypatch: Any) -> None:
    path, synced, sync = tmp_path / "buffer.sqlite", list[Path](), os.fdatasync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", noted)
    with Store(path, fsync=fsync) as store:
        accept(store, ledger_of(store), 2)
        assert {file.parent for file in synced} == ({segments.folder_of(path)} if fsync else set())


@pytest.mark.parametrize("place", ["file", "memory"])
def test_samples_come_back_in_order(tmp_path: Path, place: str) -> None:
    with Store(tmp_path / "buffer.sqlite" if place == "file" else None) as store:
        ledger = ledger_of(store)
        for item in accept(store, ledger, 6):
            assert samples_of(store, item) == packed(item)
        assert store.untrained_bytes() == {item: 10 for item in range(6)}


def test_everything_is_read_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with Store(path) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 5)
        ledger.batches.take(0), ledger.batches.trained(0), ledger.batches.take(1)
        ledger.ask("a", 1, 1, 0.0, request=4)
        store.commit(Transaction(ledger.drain()))
        saved = store.load()
    with Store(path) as store:
        assert store.load() == saved
        again = ledger_of(store)
        assert (
            again.view.counts()
            == ledger.view.counts()
            == dict(leased=1, stored=1, waiting=0, batched=2, trained=2, dropped=0)
        )
        assert {e.number: item_values(e) for e in saved.items} == {
            e.number: item_values(e) for e in ledger.state.items.values()
        }
    states = {item.number: item.state for item in saved.items}
    assert states == {0: "batched", 1: "batched", 2: "batched", 3: "batched", 4: "stored", 5: "leased"}
    assert isinstance(saved.items[0], ItemState) and saved.totals[("trained", "")] == Lengths(2, 4, 44, 28, 2)


def test_void_samples_are_removed_and_the_record_of_the_item_stays(tmp_path: Path) -> None:
    with Store(tmp_path / "buffer.sqlite") as store:
        ledger = ledger_of(store)
        accept(store, ledger, 4)
        ledger.batches.take(0), ledger.batches.trained(0)
        ledger.batches.prune(1)
        store.commit(Transaction(ledger.drain(), {}, void_before=1))
        assert [samples_of(store, item) for item in range(4)] == [[], [], packed(2), packed(3)]
        assert store.untrained_bytes() == {2: 10, 3: 10}
        row = store._db.execute("SELECT state, tokens, bytes FROM items WHERE item = 0").fetchone()
        assert row == ("trained", 22, 0)
        assert [item.number for item in store.load().items] == [2, 3]


def test_samples_of_dropped_groups_go_with_the_batches_before_them() -> None:
    flat = (SampleStats(10, 6, 1.0), SampleStats(12, 8, 1.0))
    with Store(None) as store:
        ledger = Ledger(100, groups=1, max_staleness=0, shuffle=False, skip_zero_variance=True)
        for version in range(2):
            (it,) = ledger.ask("a", version, 1, 0.0)
            assert ledger.put("a", it.item, it.lease, flat, 0.0) is None
            store.commit(Transaction(ledger.drain(), {it.item: packed(it.item)}))
            accept(store, ledger, 1, version=version)
            assert ledger.batches.take(version)
            ledger.batches.trained(version)
        assert store.untrained_bytes() == {3: 10} and sorted(ledger.state.items) == [1, 3]
        ledger.batches.prune(1)
        store.commit(Transaction(ledger.drain(), void_before=1))
        assert [samples_of(store, item) for item in range(4)] == [[], [], packed(2), packed(3)]
        dropped = store.closed(2)
        assert dropped and dropped.accepted and dropped.reason == "zero variance" and store.closed(3) is None
        assert [item.number for item in store.load().items] == [3]


def test_a_group_put_and_pruned_in_one_commit_leaves_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "buffer.sqlite") as store:
        ledger = ledger_of(store)
        for it in ledger.ask("a", 0, 2, 0.0):
            ledger.put("a", it.item, it.lease, GROUP, 0.0)
        ledger.batches.take(0), ledger.batches.trained(0)
        ledger.batches.prune(1)
        store.commit(Transaction(ledger.drain(), {0: packed(0), 1: packed(1)}, void_before=1))
        assert store.untrained_bytes() == {} and samples_of(store, 0) == []


def test_samples_that_were_discarded_are_replaced() -> None:
    with Store(None) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 2)
        ledger.batches.rewind(9)
        store.commit(Transaction(ledger.drain()))
        assert samples_of(store, 0) == [] and store.untrained_bytes() == {}
        accept(store, ledger, 1, size=7, version=9)
        assert samples_of(store, 0) == packed(0, 7) and store.untrained_bytes() == {0: 14}


def test_payloads_of_groups_that_were_not_accepted_are_not_kept() -> None:
    with Store(None) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 1)
        assert ledger.put("a", 0, 1, GROUP, 0.0) is None, "a repeated Put"
        store.commit(Transaction(ledger.drain(), {0: packed(50), 7: packed(7)}))
        assert samples_of(store, 0) == packed(0) and samples_of(store, 7) == []


def test_a_failed_commit_changes_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    long = Problems(100, lambda row: {"problem": "x" * 9000}, "c" * 64)
    with Store(tmp_path / "buffer.sqlite", problems=long) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 1)
        before = store.load()
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        for it in ledger.ask("a", 0, 5, 0.0):
            ledger.put("a", it.item, it.lease, GROUP, 0.0)
        changes = ledger.drain()
        payloads = {item: packed(item, 100_000) for item in changes.sample_stats}
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.commit(Transaction(changes, payloads))
        assert store.load() == before and samples_of(store, 3) == []
        store._db.execute("PRAGMA max_page_count = 100000")
        store.commit(Transaction(changes, payloads))
        assert [samples_of(store, item) for item in payloads] == list(payloads.values()) and len(payloads) > 3
        assert ledger_of(store).view.counts() == ledger.view.counts()
    (file,) = (tmp_path / "buffer.sqlite-samples").iterdir()
    assert file.stat().st_size < 200_000 * len(payloads) + 10_000, "what failed is written over"


def test_a_failed_commit_without_samples_leaves_those_of_earlier_ones(tmp_path: Path) -> None:
    with Store(tmp_path / "buffer.sqlite") as store:
        ledger = ledger_of(store)
        accept(store, ledger, 1)
        store._db.execute("PRAGMA query_only = ON")
        ledger.ask("a", 0, 1, 0.0)
        changes = ledger.drain()
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.commit(Transaction(changes))
        store._db.execute("PRAGMA query_only = OFF")
        store.commit(Transaction(changes))
        accept(store, ledger, 1)
        assert [samples_of(store, item) for item in (0, 2)] == [packed(0), packed(2)]


def files(path: Path, store: Store | None = None) -> list[str]:
    """The files of the segments; with `store`, once it has removed what it was to remove."""
    if store:
        store._segments._remover.submit(int).result(60)
    return sorted(file.name for file in path.with_name(f"{path.name}-samples").iterdir())


def test_segments_end_are_written_over_when_pruned_and_found_again(tmp_path: Path) -> None:
    path, size = tmp_path / "buffer.sqlite", SEGMENT_BYTES // 6
    with Store(path, fsync=False) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 4, size)
        accept(store, ledger, 2, size=10)
        assert files(path) == ["000001.samples", "000002.samples"], "three groups in the first"
        assert [samples_of(store, item) for item in range(6)] == [packed(i, size if i < 4 else 10) for i in range(6)]
        for version in range(3):
            ledger.batches.take(version), ledger.batches.trained(version)
        ledger.batches.prune(1)
        store.commit(Transaction(ledger.drain(), void_before=1))
        assert files(path) == ["000001.samples", "000002.samples"], "one of its groups is kept"
        ledger.batches.prune(2)
        store.commit(Transaction(ledger.drain(), void_before=2))
        assert files(path, store) == ["000001.spare", "000002.samples"]
        rows = store._db.execute("SELECT segment, live FROM segments").fetchall()
        assert rows == [(2, 40)]
    assert (
        path.with_name("buffer.sqlite-samples").joinpath("000002.samples").stat().st_size < AHEAD_BYTES // 2 + 2 * size
    )
    with Store(path, fsync=False) as store:
        assert samples_of(store, 4) == packed(4, 10)
        accept(store, ledger_of(store), 1, version=3)
        assert files(path) == ["000002.samples"] and samples_of(store, 6) == packed(6)


def test_a_spare_segment_takes_the_place_of_a_new_one(tmp_path: Path) -> None:
    path, size = tmp_path / "buffer.sqlite", SEGMENT_BYTES // 6
    with Store(path, fsync=False) as store:
        ledger, most = ledger_of(store), 0
        for version in range(12):
            accept(store, ledger, 2, size, version=version)
            ledger.batches.take(version), ledger.batches.trained(version)
            assert [samples_of(store, 2 * version + i) for i in range(2)] == [
                packed(2 * version + i, size) for i in range(2)
            ]
            ledger.batches.prune(version)
            store.commit(Transaction(ledger.drain(), void_before=version))
            most = max(most, len(files(path, store)))
        spare = [name for name in files(path) if name.endswith(".spare")]
        assert most <= 5 and 1 <= len(spare) <= 2
    assert not [name for name in files(path) if name.endswith(".spare")]


def test_nobody_waits_for_the_file_system_to_delete_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = tmp_path / "buffer.sqlite", 2**15
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 2**17)
    may, begun, unlink = threading.Event(), threading.Event(), Path.unlink

    def slowly(file: Path, missing_ok: bool = False) -> None:
        if file.suffix == ".samples":
            begun.set()
            assert may.wait(60)
        unlink(file, missing_ok)

    with Store(path, fsync=False) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 2, size)
        for version in range(1, SPARES + 4):
            ledger.batches.take(version - 1), ledger.batches.trained(version - 1)
            accept(store, ledger, 2, size, version=version)
        monkeypatch.setattr(Path, "unlink", slowly)
        kept = ledger.batches.prune(SPARES + 1)
        store.commit(Transaction(ledger.drain(), void_before=kept))
        assert begun.wait(60), "more are empty than are kept as spares"
        items = accept(store, ledger, 1, version=SPARES + 3)
        assert samples_of(store, items[0]) == packed(items[0]) and not may.is_set(), "groups are stored meanwhile"
        may.set()
        found = files(path, store)
        assert len([name for name in found if name.endswith(".spare")]) == SPARES - 1, "one is in use again"
        named = {f"{number:06}.samples" for (number,) in store._db.execute("SELECT segment FROM segments")}
        assert {name for name in found if name.endswith(".samples")} == named
    assert not [name for name in files(path) if name.endswith(".spare")]


def test_a_reader_learns_that_a_sample_was_removed_while_it_read(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with Store(path) as store:
        accept(store, ledger_of(store), 1)
        db = reading(path)
        (tmp_path / "buffer.sqlite-samples" / "000001.samples").unlink()
        assert db.execute("SELECT data_of(segment, position, bytes) FROM samples").fetchall() == [(None,), (None,)]
        db.close()


def test_what_a_killed_process_wrote_and_did_not_commit_is_written_over_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    folder = tmp_path / "buffer.sqlite-samples"
    with Store(path) as store:
        accept(store, ledger_of(store), 2)
    with open(folder / "000001.samples", "ab") as file:
        file.write(b"x" * 50_000)
    (folder / "000002.samples").write_bytes(b"y" * 50_000)
    (folder / "000003.spare").write_bytes(b"z")
    (folder / "mine.samples").write_bytes(b"somebody's")
    with Store(path) as store:
        assert files(path) == ["000001.samples", "mine.samples"]
        accept(store, ledger_of(store), 2, size=60)
        assert [samples_of(store, item) for item in range(4)] == [packed(0), packed(1), packed(2, 60), packed(3, 60)]


def test_a_run_whose_samples_are_gone_is_refused(tmp_path: Path) -> None:
    path, file = tmp_path / "buffer.sqlite", tmp_path / "buffer.sqlite-samples" / "000001.samples"
    with Store(path) as store:
        accept(store, ledger_of(store), 2, size=9000)
    os.truncate(file, 20_000)
    with pytest.raises(StoreError, match=r"000001\.samples is gone or cut short, and holds samples"):
        Store(path)
    file.unlink()
    with pytest.raises(StoreError, match=r"000001\.samples is gone"):
        Store(path)


def test_anybody_can_read_the_tables_while_the_buffer_runs(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with Store(path, problems=PROBLEMS, digest=PROBLEMS.digest) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 2)
        ledger.batches.take(0), ledger.batches.trained(0)
        store.commit(Transaction(ledger.drain()))
        query = (
            "import sqlite3, sys; db = sqlite3.connect(f'file:{sys.argv[1]}?mode=ro', uri=True);"
            "print(db.execute('SELECT item, state, batch, problem, stored_at > 0 FROM items JOIN problems USING (row)"
            " JOIN batches ON batch = batches.version WHERE trained').fetchall())"
        )
        out = subprocess.run(
            [sys.executable, "-c", query, str(path)], capture_output=True, text=True, check=True
        ).stdout
        assert '(0, \'trained\', 0, \'{"problem": "Größe 0", "answer": 0}\', 1)' in out
        with reading(path) as db:
            assert db.execute("SELECT COUNT(*) FROM samples").fetchone() == (4,)
            accept(store, ledger, 1, version=1)
            assert db.execute("SELECT COUNT(*) FROM samples").fetchone() == (6,)
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                db.execute("DELETE FROM samples")
        db.close()
    dead = reading(path)
    assert dead.execute("SELECT COUNT(*) FROM problems").fetchone() == (3,)
    dead.close()


def test_a_rewind_shows_in_the_tables() -> None:
    with Store(None) as store:
        ledger = ledger_of(store)
        accept(store, ledger, 4)
        for version in range(2):
            ledger.batches.take(version), ledger.batches.trained(version)
        store.commit(Transaction(ledger.drain()))
        ledger.batches.rewind(1)
        store.commit(Transaction(ledger.drain()))
        assert store._db.execute("SELECT state FROM items").fetchall() == [("trained",)] * 2 + [("batched",)] * 2
        assert store._db.execute("SELECT trained, trained_at > 0 FROM batches").fetchall() == [(1, 1), (0, None)]


def test_the_files_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with Store(path, fsync=False) as store:
        ledger = ledger_of(store)
        for version in range(120):
            accept(store, ledger, 2, size=1_000_000, version=version)
            assert ledger.batches.take(version)
            ledger.batches.trained(version)
            ledger.batches.prune(version + 1)
            store.commit(Transaction(ledger.drain(), void_before=version + 1))
            assert len(files(path, store)) <= 2
            assert path.with_name("buffer.sqlite-wal").stat().st_size < 2 * 4096 * LOG_PAGES
        assert path.stat().st_size < 200_000, "the rows of pruned samples are used again"
    assert not path.with_name("buffer.sqlite-wal").exists()


def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    text, foreign, torn = tmp_path / "text.sqlite", tmp_path / "foreign.sqlite", tmp_path / "torn.sqlite"
    text.write_text("This is not a database, but long enough to have a header. " * 20)
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE cookies (name)")
    db.close()
    with Store(torn) as store:
        accept(store, ledger_of(store), 6)
    data = bytearray(torn.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    torn.write_bytes(data)
    (tmp_path / "file").write_text("")
    cases = {
        text: "file is not a database",
        foreign: "of another program",
        torn: "the file is damaged",
        tmp_path / "file" / "buffer.sqlite": "File exists|Not a directory",
        tmp_path: "unable to open database file; it must be a file that this user may read and write",
    }
    for path, words in cases.items():
        with pytest.raises(StoreError, match=words) as error, Store(path) as store:
            store.load()
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    for path, words in ((foreign, "not the file of a Headrace buffer"), (tmp_path / "absent", "no such file")):
        with pytest.raises(StoreError, match=words):
            reading(path)


def test_a_file_of_other_problems_is_refused_with_both_digests(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    Store(path).close()
    Store(path, problems=PROBLEMS, digest=PROBLEMS.digest).close()
    with pytest.raises(StoreError, match=r"problems c{16}, this one has d{16}; undo the change of the problems"):
        Store(path, digest="d" * 64)


@pytest.mark.parametrize("schema", [1, READABLE[0] - 1, 99])
def test_a_file_of_another_schema_is_refused_with_what_to_do(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "buffer.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value)")
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {schema}")
    before = path.read_bytes()
    wanted = (
        rf"written with schema {schema}, this Headrace has {SCHEMA}; finish that run .*, or choose another run\.name"
    )
    for opened in (Store, reading):
        with pytest.raises(StoreError, match=wanted) as error:
            opened(path)
        assert "\n" not in str(error.value)
    assert path.read_bytes() == before


def test_two_buffers_cannot_have_one_file_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    hold = "import sys, time; from pathlib import Path; from buffer.store.sqlite import Store;"
    hold += "s = Store(Path(sys.argv[1]));"
    hold += "print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match=f"in use by process {holder.pid}; stop that buffer"):
            Store(path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    Store(path).close()


def test_killed_at_any_system_call_the_store_is_in_the_state_before_or_after(tmp_path: Path) -> None:
    """Each of the transitions is killed at each of its system calls; tests/harness/crash.py says how."""
    command = [sys.executable, str(ROOT / "tests" / "harness" / "crash.py"), str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for transition in ("put", "many", "anew"):
        assert found[transition]["before"] >= 12 and found[transition]["after"] >= 1
    for transition in ("create", "reopen", "close"):
        assert found[transition]["after"] >= 12
