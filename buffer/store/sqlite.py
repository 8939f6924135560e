"""The store: the ledger in one SQLite file, a transaction for each commit, the samples beside it in segments.

No byte is believed unchecked: samples have CRC32Cs; pages, commits and the files themselves are compared
(`witness.py`), and so are rows (`opening.py`).
"""

import errno
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from google_crc32c import value as crc32c

from buffer.ledger.counts import EXAMPLES
from buffer.ledger.types import Changes, EvaluationRow, ItemState, Lengths, Saved, Transaction
from buffer.store import segments, sql, start_checks, witness
from buffer.store.faults import DamagedSample, StoreError
from buffer.store.lock import InUse, lock_of, locked
from buffer.store.opening import (
    close,
    explained,
    opened,
    opened_sums,
    read_only,
    require_whole,
)
from buffer.store.segments import Groups, InMemory, Place, Segments
from buffer.store.witness import log_of
from configs.resume import Change, Settings
from configs.variables import open_private, run_folder

log = logging.getLogger(__name__)
SAMPLES_FIELD = 11
as_json = json.JSONEncoder(ensure_ascii=False, default=repr).encode
UNREADABLE = {errno.EIO, errno.ENOENT, errno.EUCLEAN}
"""Then a sample's bytes are lost."""


class Store:
    """The ledger on disk, or in memory without `path`. With `fsync` a commit waits for the disk.

    Raises StoreError for a file that is no buffer's, is damaged, in use, or of a run with another `digest` of its data.
    """

    def __init__(
        self,
        path: Path | None,
        fsync: bool = True,
        problems: Sequence[Mapping[str, Any]] = (),
        digest: str = "",
        place: Callable[[int], str | None] = lambda row: None,
    ) -> None:
        self.path, self._problems, self._place = path, problems, place
        self._witness: witness.Witness | None = None
        self._sums: witness.PageSums | None = None
        with ExitStack() as ends, explained(path):
            if path:
                ends.callback(os.close, hold(path))
                ends.callback(self._close_witness)
            known = _witnessed(path) if path else None
            if path and path.exists():
                require_whole(path, known)
            elif path:
                os.close(open_private(path, os.O_CREAT | os.O_RDWR))  # SQLite gives its other files the same mode
            if path:
                self._sums = opened_sums(path, fsync)
                ends.callback(self._sums.close)
                if known:
                    witness.Witness(path, known).close()  # forget the file's CRC32C, which an earlier release left
            self._db = opened(path, fsync, self._sums)
            ends.callback(close, self._db, self._sums)
            self._require_same_problems(digest)
            if path and self._sums:
                self._open_witness(path, known)
                self._sums.follow()
            self.files = witness.SameFiles([path, log_of(path), witness.sums_of(path)] if path else [])
            self._segments = self._opened_segments(fsync)
            ends.callback(self._segments.close)
            self._known_rows: set[int] = set()
            ends.callback(self._shorten_log)
            self._ends = ends.pop_all()

    def _close_witness(self) -> None:
        if self._witness:
            self._witness.close()

    def _open_witness(self, path: Path, known: witness.Commits | None) -> None:
        """Raises LostCommits if the witness knows of more commits."""
        found = witness.counted(self._db)
        assert found, "every ledger of this schema counts its commits"
        start_checks.require_all(path, known, found)
        self._witness = witness.Witness(path, found)

    def _require_same_problems(self, digest: str) -> None:
        known = self._db.execute("SELECT value FROM meta WHERE name = 'problems_sha256'").fetchone()
        if known and digest and known[0] != digest:
            raise StoreError(
                f"buffer.path {self.path}: written by a run with problems {known[0][:16]}, this one has {digest[:16]}; "
                "undo the change of the problems, or choose another run.name"
            )
        if digest and not known:
            self._db.execute("INSERT INTO meta VALUES ('problems_sha256', ?)", [digest])

    def record_settings(self, settings: Settings, changed: Iterable[Change]) -> None:
        now, known = time.time(), self._db.execute("SELECT value FROM meta WHERE name = 'settings'").fetchone()
        if known and json.loads(known[0]) == settings:
            return
        rows = [(change.key, json.dumps(change.old), json.dumps(change.new), now) for change in changed]
        with self._transaction():
            self._db.execute(sql.CHANGES)
            self._db.executemany(sql.CHANGE, rows)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('settings', ?)", [json.dumps(settings)])

    def _opened_segments(self, fsync: bool) -> Segments | InMemory:
        """Raises StoreError if a file with named samples is missing."""
        if not self.path:
            return InMemory()
        known = {number: (size, live) for number, size, live in self._db.execute("SELECT * FROM segments")}
        number = max(known, default=1)
        found = Segments(segments.folder_of(self.path), number, known.get(number, (0, 0))[0], fsync)
        if lost := found.missing({number: size for number, (size, live) in known.items() if live}):
            raise StoreError(
                f"buffer.path {self.path}: {lost} is gone or cut short, and holds samples of the run; bring it back "
                "to where it was, or choose another run.name"
            )
        found.keep(known)
        return found

    def load(self) -> Saved:
        """What `Ledger.restore` needs. Raises StoreError if the file is damaged."""
        with explained(self.path):
            scalars = dict(self._db.execute(sql.SCALARS))
            items = tuple(ItemState.of(row) for row in self._db.execute(sql.KEPT, [scalars.get("oldest", 0)]))
            totals = {(what, which): Lengths(*sums) for what, which, *sums in self._db.execute("SELECT * FROM totals")}
            failed = tuple(self._db.execute(sql.FAILED_ROWS, [EXAMPLES]))
            evaluations = tuple(EvaluationRow(*row) for row in self._db.execute(sql.EVALUATED))
            rows = tuple(self._db.execute(sql.KEPT_ROWS))
            self._db.execute("PRAGMA busy_timeout = 0")  # SQLite would wait, and with it the buffer's event loop
        return Saved(items, totals, scalars, failed[::-1], evaluations, rows)

    def closed(self, item: int) -> ItemState | None:
        row = self._db.execute(sql.CLOSED, [item]).fetchone()
        return ItemState.of(row) if row else None

    def commit(self, transaction: Transaction) -> None:
        """Write all of the transaction or, with sqlite3.Error or OSError raised, nothing."""
        self.files.require()
        changes, payloads = transaction.changes, transaction.payloads
        groups = {item: payloads[item] for item in changes.sample_stats if item in payloads}
        with self._segments.appended(groups) as places, self._transaction():
            self._write(changes, groups, places)
            if transaction.void_before is not None:
                self._remove(item for (item,) in self._db.execute(sql.VOID, [transaction.void_before]).fetchall())
            if transaction.noted:
                self._db.execute(sql.CHANGES)
                now = time.time()
                rows = [(key, json.dumps(old), json.dumps(new), now) for key, old, new in transaction.noted]
                self._db.executemany(sql.CHANGE, rows)
            empty = self._db.execute(sql.EMPTY, [self._segments.number]).fetchall()
            self._db.executemany("DELETE FROM segments WHERE segment = ?", empty)
        if empty:
            self._segments.remove([number for (number,) in empty])
        if self._problems:
            self._known_rows.update(int(row[1]) for row in changes.items.values())

    def _write(self, changes: Changes, groups: Groups, places: Mapping[int, Place]) -> None:
        db, now = self._db, time.time()
        if changes.discarded:
            self._remove(changes.discarded)
        fields = changes.items.values()
        db.executemany(sql.ITEM, [(*row, now, now if row[SAMPLES_FIELD] else None, now) for row in fields])
        db.executemany(sql.ROW, changes.rows.values())
        db.executemany("INSERT OR REPLACE INTO problems VALUES (?, ?, ?)", self._new_problems(changes))
        rows, ends, sizes = list[tuple[Any, ...]](), list[tuple[int, int, int]](), list[tuple[int, int]]()
        for item, samples in groups.items():
            segment, position = places[item]
            start = position
            for index, (stats, data) in enumerate(zip(changes.sample_stats[item], samples, strict=True)):
                counts = stats.tokens, stats.sampled, stats.reward, stats.truncated
                rows.append((item, index, *counts, segment, start, len(data), crc32c(data)))
                start += len(data)
            ends.append((segment, start, start - position))
            sizes.append((start - position, item))
        db.executemany(sql.SAMPLE, rows)
        db.executemany(sql.SEGMENT, ends)
        db.executemany("UPDATE items SET bytes = ? WHERE item = ?", sizes)
        if changes.quarantined and "version" in changes.scalars:  # a batch lost its last group
            db.execute(sql.UNFORMED, [changes.scalars["version"]])
        for version, trained in sorted(changes.batches.items()):
            db.execute(sql.BATCH, (version, trained, now, now if trained else None))
            db.execute(sql.TRAINED, (trained, now, version))
        db.executemany(sql.TOTAL, [(*key, *lengths) for key, lengths in changes.totals.items()])
        db.executemany(sql.EVALUATION, [(*row, now) for row in changes.evaluations.values()])
        if changes.evaluations:
            db.execute(sql.FORGET_SAMPLES)
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", changes.scalars.items())

    def _remove(self, items: Iterable[int]) -> None:
        rows = [(item,) for item in items]
        self._db.executemany(sql.FREE, [2 * row for row in rows])
        for statement in ("DELETE FROM samples WHERE item = ?", "UPDATE items SET bytes = 0 WHERE item = ?"):
            self._db.executemany(statement, rows)

    def group(self, item: int) -> list[bytes]:
        """The packed samples of a group, [] if there are none any more. Raises DamagedSample."""
        rows = self._db.execute(sql.GROUP, [item]).fetchall()
        return self._read(item, 0, rows) if rows else []

    def samples(self, item: int, indexes: Sequence[int]) -> list[bytes]:
        """Raises DamagedSample."""
        rows = self._db.execute(sql.GROUP, [item]).fetchall()
        if len(indexes) == len(rows):
            return self._read(item, 0, rows)
        return [self._read(item, index, rows[index : index + 1])[0] for index in indexes]

    def _read(self, item: int, first: int, rows: Sequence[tuple[int, int, int, int | None]]) -> list[bytes]:
        place, path = Place(*rows[0][:2]), self._segments.path_of(rows[0][0])
        try:
            found = self._segments.read(place, [size for _, _, size, _ in rows])
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            raise DamagedSample(item, first, path, str(error.strerror)) from None
        for index, (data, (*_, crc)) in enumerate(zip(found, rows, strict=True), first):
            if crc is not None and (now := crc32c(data)) != crc:
                raise DamagedSample(item, index, path, f"its CRC32C is {now:08x}, and was {crc:08x} when it was stored")
        return found

    def untrained_bytes(self) -> dict[int, int]:
        return dict(self._db.execute(sql.UNTRAINED))

    def bytes_batched_since(self, version: int) -> dict[int, int]:
        """By item, for batch `version` and all later ones."""
        return dict(self._db.execute(sql.BATCHED_SINCE, [version]))

    def close(self) -> None:
        self._ends.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _shorten_log(self) -> None:
        if self._sums and self._sums.damaged:
            return
        with suppress(OSError):
            if self._sums:
                self._sums.note_log()  # the last commits may not be noted
            self._copy_log("TRUNCATE")

    def _copy_log(self, how: str) -> None:
        with suppress(sqlite3.OperationalError):  # with a reader, or a full disk, the log stays
            self._db.execute(f"PRAGMA wal_checkpoint({how})").fetchall()

    def _new_problems(self, changes: Changes) -> list[tuple[int, str, str | None]]:
        if not self._problems:
            return []
        rows = {int(row[1]) for row in changes.items.values()} - self._known_rows
        rows = {row for row in rows if not self._db.execute(sql.KNOWN, [row]).fetchone()}
        texts = [as_json(self._problems[row]) for row in rows]
        return [(row, text, self._place(row)) for row, text in zip(rows, texts, strict=True)]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute(sql.NEXT_COMMIT)
            if self._sums:
                self._sums.reserve(self._db.execute("PRAGMA page_count").fetchone()[0])
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if self._sums:
            self._sums.note()
            if self._sums.log_is_full:
                self._copy_log("PASSIVE")
        if self._witness:
            with suppress(OSError):  # the commit is done; the next one writes its number
                self._witness.note()


def reading(path: Path) -> sqlite3.Connection:
    """Open the file for reading, also beside a live buffer. Raises StoreError.

    Its SQL knows `data_of(segment, position, bytes, crc32c)`: a packed sample, NULL once it was removed, empty where
    its bytes are damaged.
    """
    db, folder = read_only(path), segments.folder_of(path)
    db.create_function("data_of", -1, lambda segment, *at: segment and _data(folder, segment, *at))
    return db


def _data(folder: Path, segment: int, position: int, size: int, crc: int | None = None) -> bytes | None:
    try:
        data = segments.read(folder, Place(segment, position), size)
    except FileNotFoundError:
        return None
    if crc is not None and crc32c(data) != crc:
        where = segments.path_of(folder, segment)
        log.warning("%s: the %d bytes from %d on are damaged; see `python -m buffer scrub RUN`", where, size, position)
        return b""
    return data


def _witnessed(path: Path) -> witness.Commits | None:
    """Raises LostCommits if the witness knows of a ledger, and there is none."""
    try:
        known = witness.noted(path)
    except ValueError as error:
        log.warning("%s; it is written anew", error)
        return None
    if not path.exists():
        start_checks.require_all(path, known, None)
    start_checks.require_same_bytes(path, known)
    return known


def hold(path: Path) -> int:
    """Lock a file beside the ledger `path`, until the descriptor is closed: closing the ledger's own would end SQLite's
    locks. Raises StoreError if another process holds it."""
    try:
        run_folder(path.parent)
        return locked(lock_of(path))
    except InUse as error:
        raise StoreError(f"buffer.path {path}: {error}; stop that buffer, or choose another run.name") from None
    except OSError as error:
        raise StoreError(f"buffer.path {path}: {error.strerror}; name a file in a folder that can be written") from None
