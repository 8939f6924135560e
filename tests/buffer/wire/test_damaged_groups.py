"""A group whose stored bytes are damaged is never served: its batch goes on without it, and all ranks agree."""

import asyncio
import errno
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer import inspect
from buffer.__main__ import advice_for
from buffer.store import start_checks
from buffer.store.faults import DamagedPage, StoreGone
from buffer.wire.message import Array
from buffer.wire.protocol import Part, Rewind, Take
from tests.buffer.store.test_damage import SEGMENT, flip
from tests.buffer.wire.test_many import Clients
from tests.harness.buffer_process import buffer, committed, in_loop, make_requests


def stored(path: Path, number: int, groups: int) -> None:
    """So many groups in the ledger `path`, batches of `groups` of them formed, and the buffer gone."""
    requests = make_requests(path, groups=groups, max_staleness=9)
    clients = Clients(requests)
    for item in clients.work("a", number):
        clients.put("a", item)
        clients.turn()  # in a commit of its own: at a block of its own
    for version in range(number // groups):
        requests.handlers.ledger.batches.take(version)
    committed(requests)
    requests.handlers.store.close()


def damage(path: Path, item: int) -> None:
    """Flip a bit of the group's second sample."""
    with sqlite3.connect(path) as db:
        query = "SELECT position, bytes FROM samples WHERE item = ? AND idx = 1"
        position, size = db.execute(query, [item]).fetchone()
    db.close()
    flip(path.parent / SEGMENT, 8 * (position + size - 1))


def reopened(path: Path, groups: int, ranks: int = 1) -> Clients:
    clients = Clients(make_requests(path, groups=groups, max_staleness=9), ranks)
    for rank in range(ranks):
        clients.say(f"l{rank}", Rewind(version=0))
    clients.turn()
    return clients


def take(clients: Clients, version: int, rank: int = 0, world: int = 1) -> Any:
    clients.say(f"l{rank}", Take(version=version, rank=rank, world=world))
    return [message for who, _, message in clients.turn() if who == f"l{rank}"]


def items_of_rank(part: Part) -> set[int]:
    items = part.rows.item.numpy().tolist()
    return {items[position] for position in part.positions.numpy().tolist()}


def items_of(part: Part) -> set[int]:
    rows: Array = part.rows.item
    return set(rows.numpy().tolist())


def test_a_batch_is_served_without_its_damaged_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "buffer.sqlite"
    stored(path, 8, 4)
    damage(path, 2)
    damage(path, 5)
    clients = reopened(path, 4, ranks=2)
    with caplog.at_level(logging.ERROR):
        (first,) = take(clients, 0, 0, 2)
        (second,) = take(clients, 0, 1, 2)
    assert items_of(first) == items_of(second) == {0, 1, 3} and len(first.samples) + len(second.samples) == 6
    (line,) = [record.getMessage() for record in caplog.records]
    assert "item 2 is put into quarantine, batch 0 is served without it: sample 1 of item 2" in line
    handlers = clients.requests.handlers
    assert handlers.ledger.view.counts()["quarantined"] == 1
    handlers.store.close()
    clients = reopened(path, 4)
    assert items_of(take(clients, 0)[0]) == {0, 1, 3}, "it is remembered"
    assert items_of(take(clients, 1)[0]) == {4, 6, 7}
    assert clients.requests.handlers.ledger.view.counts()["quarantined"] == 2
    reason = clients.requests.handlers.store.closed(5).reason
    assert reason == "a sample is damaged in 000001.samples"
    clients.requests.handlers.store.close()


def test_a_batch_that_loses_its_only_group_is_formed_anew(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    stored(path, 1, 1)
    damage(path, 0)
    clients = reopened(path, 1)
    assert take(clients, 0) == []
    (item,) = clients.work("a", 1)
    clients.put("a", item)
    (part,) = [message for _, _, message in clients.turn() if isinstance(message, Part)]
    assert items_of(part) == {item.item} and item.item != 0
    clients.requests.handlers.store.close()


def test_bytes_of_an_earlier_release_that_are_no_sample_are_damage_too(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    stored(path, 2, 2)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE samples SET crc32c = NULL")
        (position,) = db.execute("SELECT position FROM samples WHERE item = 1 AND idx = 0").fetchone()
    db.close()
    start_checks.begin_sums(path)
    flip(path.parent / SEGMENT, 8 * position)
    clients = reopened(path, 2)
    assert items_of(take(clients, 0)[0]) == {0}
    clients.requests.handlers.store.close()


def test_damage_that_shows_once_a_rank_has_its_part_leaves_the_group_out_too(tmp_path: Path) -> None:
    """The parts name other groups then, by which the ranks find out that they have to take the batch again."""
    path = tmp_path / "buffer.sqlite"
    stored(path, 2, 2)
    clients = reopened(path, 2, ranks=2)
    (whole,) = take(clients, 0, 0, 2)
    damage(path, 0)
    damage(path, 1)
    assert items_of(whole) == {0, 1}
    damaged = 1 if items_of_rank(whole) == {0} else 0
    damage(path, 1 - damaged)  # it is whole again
    (other,) = take(clients, 0, 1, 2)
    assert items_of(other) == {1 - damaged}
    assert items_of(take(clients, 0, 0, 2)[0]) == {1 - damaged}
    clients.requests.handlers.store.close()


@in_loop
async def test_a_buffer_whose_ledger_is_deleted_ends_at_once(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with pytest.raises(StoreGone, match=r"buffer\.sqlite was deleted or replaced while the buffer ran"):
        async with buffer(make_requests(path)) as it:
            path.unlink()
            async with asyncio.timeout(60):
                await asyncio.wait({it.serving})  # it waits for messages for half a second at most


def test_what_to_do_is_said_by_error(tmp_path: Path) -> None:
    file = tmp_path / "bad.sqlite"
    with sqlite3.connect(file) as db:
        db.execute("CREATE TABLE t (x)")
        db.executemany("INSERT INTO t VALUES (?)", [("y" * 500,)] * 100)
    db.close()
    data = file.read_bytes()
    file.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    db = sqlite3.connect(file)
    with pytest.raises(sqlite3.DatabaseError) as found:
        db.execute("SELECT COUNT(x) FROM t WHERE x > 'a'").fetchall()
    db.close()
    assert "python -m buffer scrub RUN" in advice_for(found.value) and "room" not in advice_for(found.value)
    assert advice_for(StoreGone(file)) == advice_for(DamagedPage(7, file)) == ""
    assert "make room on its disk" in advice_for(OSError(errno.ENOSPC, "No space left on device"))


def test_people_see_that_a_sample_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    stored(path, 1, 1)
    damage(path, 0)
    with closing(inspect.reading(path)) as db:
        lines = [str(line) for line in inspect.show(db, 0)]
        assert any(line.startswith("sample 0     reward") for line in lines)
        assert "sample 1     damaged on disk; see `python -m buffer scrub`" in lines
        (line,) = inspect.export(db, tmp_path / "out.parquet")
    assert line.endswith("out.parquet: 1 samples; 1 are damaged and left out, see `python -m buffer scrub`")
