"""The store: the ledger in one SQLite file, a transaction for each commit, the samples beside it in segments.

Used by `buffer/wire/handlers.py`; the tables are in `sql.py`, the samples' files in `segments.py`. Only one process may
write: it holds a lock on FILE.lock until it ends, however it ends.
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from buffer.ledger.state import EXAMPLES
from buffer.ledger.types import Changes, EvaluationRow, ItemState, LedgerError, Lengths, Saved, Transaction
from buffer.store import segments, sql
from buffer.store.lock import InUse, lock_of, locked
from buffer.store.segments import Groups, InMemory, Place, Segments
from configs.resume import Change, Settings
from configs.variables import open_private, run_folder

LOG_PAGES = 4096
"""The write-ahead log is copied into the file when it has so many pages, and then written anew from its start."""


class StoreError(LedgerError):
    """The file cannot be the ledger's; the text names it and the remedy."""


class Store:
    """`path` None keeps everything in memory. With `fsync` a commit waits for the disk. Context manager.

    `problems` are the rows of the data set, written down as they are dispatched, `digest` is of their file. Raises
    StoreError for a file that is no Headrace buffer, is damaged, is of a run with another `digest` (if given) or is in
    use by another process.
    """

    def __init__(
        self,
        path: Path | None,
        fsync: bool = True,
        problems: Sequence[Mapping[str, Any]] = (),
        digest: str = "",
    ) -> None:
        self.path, self._problems = path, problems
        with ExitStack() as ends, _explained(path):
            if path:
                ends.callback(os.close, _locked(path))
            if path and not path.exists():
                os.close(open_private(path, os.O_CREAT | os.O_RDWR))  # SQLite gives its other files the same mode
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None, cached_statements=64)
            ends.callback(self._db.close)
            self._open(fsync)
            self._require_same_problems(digest)
            self._segments = self._opened_segments(fsync)
            ends.callback(self._segments.close)
            self._known_rows: set[int] = set()
            """Rows that are known to be written down: those looked up, or written, since the start."""
            ends.callback(self._shorten_log)
            self._ends = ends.pop_all()

    def _open(self, fsync: bool) -> None:
        db, where = self._db, self.path
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        new = not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if not new and application != sql.APPLICATION:
            raise StoreError(f"buffer.path {where}: an SQLite file of another program; name another file")
        if not new:
            _require_schema(schema, where)
        db.execute("PRAGMA secure_delete = OFF")  # Debian's SQLite would overwrite deleted content with zeros
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        if new:
            with self._transaction():
                for statement in sql.TABLES.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {sql.APPLICATION}")
                db.execute(f"PRAGMA user_version = {sql.SCHEMA}")
        db.execute(sql.EVALUATIONS)

    def _require_same_problems(self, digest: str) -> None:
        """Refuse a file that was begun with other problems; an empty digest is not compared."""
        known = self._db.execute("SELECT value FROM meta WHERE name = 'problems_sha256'").fetchone()
        if known and digest and known[0] != digest:
            raise StoreError(
                f"buffer.path {self.path}: written by a run with problems {known[0][:16]}, this one has {digest[:16]}; "
                "undo the change of the problems, or choose another run.name"
            )
        if digest and not known:
            self._db.execute("INSERT INTO meta VALUES ('problems_sha256', ?)", [digest])

    def record_settings(self, settings: Settings, changed: Iterable[Change]) -> None:
        """Note the settings under which the ledger is served from now on, and what `changed` in them."""
        now, known = time.time(), self._db.execute("SELECT value FROM meta WHERE name = 'settings'").fetchone()
        if known and json.loads(known[0]) == settings:
            return
        rows = [(change.key, json.dumps(change.old), json.dumps(change.new), now) for change in changed]
        with self._transaction():
            self._db.execute(sql.CHANGES)
            self._db.executemany(sql.CHANGE, rows)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('settings', ?)", [json.dumps(settings)])

    def _opened_segments(self, fsync: bool) -> Segments | InMemory:
        """Raises StoreError if a file that holds named samples is missing."""
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
        """Everything that `Ledger.restore` needs. Raises StoreError if the file is damaged."""
        with _explained(self.path):
            scalars = dict(self._db.execute("SELECT name, value FROM meta WHERE typeof(value) = 'integer'"))
            items = tuple(ItemState(*row) for row in self._db.execute(sql.KEPT, [scalars.get("oldest", 0)]))
            totals = {(what, which): Lengths(*sums) for what, which, *sums in self._db.execute("SELECT * FROM totals")}
            failed = tuple(self._db.execute(sql.FAILED_ROWS, [EXAMPLES]))
            evaluations = tuple(EvaluationRow(*row) for row in self._db.execute(sql.EVALUATED))
        return Saved(items, totals, scalars, failed[::-1], evaluations)

    def dropped(self, item: int) -> ItemState | None:
        """An item that was dropped, which the ledger does not keep in memory."""
        row = self._db.execute(sql.DROPPED, [item]).fetchone()
        return ItemState(*row) if row else None

    def commit(self, transaction: Transaction) -> None:
        """Write the changes, name the samples of the groups accepted in them, and no longer those that are void: all of
        it or, with sqlite3.Error or OSError raised, nothing."""
        changes, payloads = transaction.changes, transaction.payloads
        groups = {item: payloads[item] for item in changes.sample_stats if item in payloads}
        with self._segments.appended(groups) as places, self._transaction():
            self._write(changes, groups, places)
            if transaction.void_before is not None:
                self._remove(item for (item,) in self._db.execute(sql.VOID, [transaction.void_before]).fetchall())
            self._note(transaction.noted)
            empty = self._db.execute(sql.EMPTY, [self._segments.number]).fetchall()
            self._db.executemany("DELETE FROM segments WHERE segment = ?", empty)
        self._segments.remove([number for (number,) in empty])
        if self._problems:
            self._known_rows.update(int(row[1]) for row in changes.items.values())

    def _note(self, noted: Sequence[tuple[str, object, object]]) -> None:
        if noted:
            self._db.execute(sql.CHANGES)
        for key, old, new in noted:
            self._db.execute(sql.CHANGE, (key, json.dumps(old), json.dumps(new), time.time()))

    def _write(self, changes: Changes, groups: Groups, places: Mapping[int, Place]) -> None:
        db, now = self._db, time.time()
        self._remove(changes.discarded)
        db.executemany(sql.ITEM, [(*row, now) for row in changes.items.values()])
        db.executemany("INSERT OR REPLACE INTO problems VALUES (?, ?)", self._new_problems(changes))
        rows, ends, sizes = list[tuple[Any, ...]](), list[tuple[int, int, int]](), list[tuple[int, int]]()
        for item, samples in groups.items():
            segment, position = places[item]
            for index, (stats, data) in enumerate(zip(changes.sample_stats[item], samples, strict=True)):
                rows.append((item, index, *stats.row_values(), segment, position, len(data)))
                position += len(data)
            size = position - places[item].position
            ends.append((segment, position, size))
            sizes.append((size, item))
        db.executemany(sql.SAMPLE, rows)
        db.executemany(sql.SEGMENT, ends)
        db.executemany("UPDATE items SET bytes = ? WHERE item = ?", sizes)
        for version, trained in sorted(changes.batches.items()):
            db.execute(sql.BATCH, (version, trained, now))
            db.execute(sql.TRAINED, (version, trained, now))
        db.executemany(sql.TOTAL, [(*key, *lengths) for key, lengths in changes.totals.items()])
        db.executemany(sql.EVALUATION, [(*row, now) for row in changes.evaluations.values()])
        if changes.evaluations:
            db.execute(sql.FORGET_SAMPLES)
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", changes.scalars.items())

    def _remove(self, items: Iterable[int]) -> None:
        """Name their samples no longer."""
        rows = [(item,) for item in items]
        for statement in (sql.FREE, "DELETE FROM samples WHERE item = ?", "UPDATE items SET bytes = 0 WHERE item = ?"):
            self._db.executemany(statement, rows)

    def group(self, item: int) -> list[bytes]:
        """The packed samples of a group, in order; empty if it has none or they were removed. Raises OSError."""
        rows = self._db.execute(sql.GROUP, [item]).fetchall()
        return self._segments.read(Place(*rows[0][:2]), [size for *_, size in rows]) if rows else []

    def samples(self, item: int, indexes: Sequence[int]) -> list[bytes]:
        """Some packed samples of a group that is stored, by their places in it. Raises OSError."""
        rows = self._db.execute(sql.GROUP, [item]).fetchall()
        if len(indexes) == len(rows):
            return self._segments.read(Place(*rows[0][:2]), [size for *_, size in rows])
        return [self._segments.read(Place(*rows[index][:2]), [rows[index][2]])[0] for index in indexes]

    def untrained_bytes(self) -> dict[int, int]:
        """Bytes of samples that are yet to be trained, by item."""
        return dict(self._db.execute(sql.UNTRAINED))

    def bytes_batched_since(self, version: int) -> dict[int, int]:
        """Bytes of samples by item, for batch `version` and all later batches, trained or not."""
        return dict(self._db.execute(sql.BATCHED_SINCE, [version]))

    def close(self) -> None:
        """Leave one complete file behind and release the lock."""
        self._ends.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _shorten_log(self) -> None:
        # with a reader, or a full disk, the log stays, which is as good
        with suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _new_problems(self, changes: Changes) -> list[tuple[int, str]]:
        if not self._problems:
            return []
        rows = {int(row[1]) for row in changes.items.values()} - self._known_rows
        rows = {row for row in rows if not self._db.execute(sql.KNOWN, [row]).fetchone()}
        return [(row, json.dumps(self._problems[row], ensure_ascii=False, default=repr)) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back for some errors
                self._db.execute("ROLLBACK")
            raise


def reading(path: Path) -> sqlite3.Connection:
    """A connection that only reads the file of a live or a dead buffer. Raises StoreError if there is none.

    Its SQL knows `data_of(segment, position, bytes)`: a packed sample, NULL once it was removed.
    """
    if not path.is_file():
        raise StoreError(f"{path}: no such file; a buffer writes it from its start on, unless buffer.path is null")
    with _explained(path):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        with ExitStack() as refused:
            refused.callback(db.close)
            if db.execute("PRAGMA application_id").fetchone()[0] != sql.APPLICATION:
                raise StoreError(f"{path}: not the file of a Headrace buffer")
            _require_schema(db.execute("PRAGMA user_version").fetchone()[0], path)
            refused.pop_all()
    folder = segments.folder_of(path)
    db.create_function("data_of", 3, lambda segment, *at: segment and _data(folder, segment, *at))
    return db


def _require_schema(schema: int, path: Path | None) -> None:
    if schema != sql.SCHEMA:
        raise StoreError(
            f"buffer.path {path}: written with schema {schema}, this Headrace has {sql.SCHEMA}; finish that run with "
            "the Headrace that wrote it, or choose another run.name"
        )


def _data(folder: Path, segment: int, position: int, size: int) -> bytes | None:
    """None if it was removed since the query began."""
    try:
        return segments.read(folder, Place(segment, position), size)
    except FileNotFoundError:
        return None


@contextmanager
def _explained(path: Path | None) -> Iterator[None]:
    """Turn SQLite's errors about a file into a StoreError with the remedy."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        remedy = "is it the buffer's file, on a sound disk? Move it away to begin the run anew"
        raise StoreError(f"buffer.path {path}: {error}; {remedy}") from None


def _locked(path: Path) -> int:
    """Lock out other buffers until this process ends, in a file beside it: closing this one ends SQLite's own locks."""
    try:
        run_folder(path.parent)
        return locked(lock_of(path))
    except InUse as error:
        raise StoreError(f"buffer.path {path}: {error}; stop that buffer, or choose another run.name") from None
    except OSError as error:
        raise StoreError(f"buffer.path {path}: {error.strerror}; name a file in a folder that can be written") from None
