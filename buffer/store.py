"""The store: the ledger and its samples in one SQLite file, a transaction each transition. Used by `buffer/answers.py`.

Readable with any SQLite tool, also while the buffer runs:
`sqlite3 buffer.sqlite "SELECT state, COUNT(*) FROM items GROUP BY state"`

    items     item, row, epoch     number for life, row of the data set, pass over the data set
              state, reason        waiting, leased, stored, batched, trained, dropped; why dropped, or failed last
              version, server      dispatch version and server of the last lease
              lease, request       number of the last lease; number of the Ask that was answered with it
              attempts             dispatches so far
              batch                batch it went into; dropped: the one then collected; else -1
              samples, tokens, sampled, truncated   sums over its group
              leased_at, stored_at, changed_at      Unix time
              bytes                size of its samples here; 0 once removed
    samples   item, idx, tokens, sampled, reward, truncated; data: MessagePack of `buffer.protocol.Sample`
    batches   version, trained, formed_at, trained_at
    problems  row, problem         JSON of each problem that was dispatched
    totals    what, which, groups, samples, tokens, sampled, truncated   running sums, see `buffer/audit.py`
    meta      name, value          counters of the ledger, fingerprint of the run's config, digest of its data

Only one process may write: it holds a lock on FILE.lock until it ends, however it ends.
"""

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from buffer.records import Changes, Entry, Facts, LedgerError, Lengths, Saved

if TYPE_CHECKING:
    from buffer.problems import Problems  # imports pyarrow, which readers of the file can do without

APPLICATION, SCHEMA = 0x48445243, 1
PAGE_BYTES, WAL_PAGES = 16384, 1024
"""The write-ahead log is copied into the file when it has so many pages, and then written anew from its start."""

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE problems (row INTEGER PRIMARY KEY, problem TEXT NOT NULL);
CREATE TABLE items (
    item INTEGER PRIMARY KEY, row INTEGER NOT NULL, epoch INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    version INTEGER NOT NULL, server TEXT NOT NULL, lease INTEGER NOT NULL, request INTEGER NOT NULL,
    attempts INTEGER NOT NULL, batch INTEGER NOT NULL, samples INTEGER NOT NULL, tokens INTEGER NOT NULL,
    sampled INTEGER NOT NULL, truncated INTEGER NOT NULL,
    leased_at REAL, stored_at REAL, changed_at REAL, bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX items_by_batch ON items (batch);
CREATE TABLE samples (
    item INTEGER NOT NULL, idx INTEGER NOT NULL, tokens INTEGER NOT NULL, sampled INTEGER NOT NULL,
    reward REAL NOT NULL, truncated INTEGER NOT NULL, data BLOB, PRIMARY KEY (item, idx)
);
CREATE TABLE batches (version INTEGER PRIMARY KEY, trained INTEGER NOT NULL, formed_at REAL, trained_at REAL);
CREATE TABLE totals (
    what TEXT NOT NULL, which TEXT NOT NULL, groups INTEGER NOT NULL, samples INTEGER NOT NULL, tokens INTEGER NOT NULL,
    sampled INTEGER NOT NULL, truncated INTEGER NOT NULL, PRIMARY KEY (what, which)
) WITHOUT ROWID;
"""
ITEM = """
INSERT INTO items VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15,
    ?16, CASE WHEN ?12 THEN ?16 END, ?16, 0)
ON CONFLICT (item) DO UPDATE SET
    state = ?4, reason = ?5, version = ?6, server = ?7, lease = ?8, request = ?9, attempts = ?10, batch = ?11,
    samples = ?12, tokens = ?13, sampled = ?14, truncated = ?15,
    leased_at = CASE WHEN lease = ?8 THEN leased_at ELSE ?16 END,
    stored_at = CASE WHEN ?12 THEN COALESCE(stored_at, ?16) END, changed_at = ?16
"""
KEPT = """
SELECT item, row, epoch, CASE state WHEN 'trained' THEN 'batched' ELSE state END, reason, version, server, lease,
    request, attempts, batch, samples, tokens, sampled, truncated FROM items WHERE batch = -1 OR batch >= ?
"""
SAMPLE = "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?)"
TOTAL = "INSERT OR REPLACE INTO totals VALUES (?, ?, ?, ?, ?, ?, ?)"
BATCH = """
INSERT INTO batches VALUES (?1, ?2, ?3, CASE WHEN ?2 THEN ?3 END)
ON CONFLICT (version) DO UPDATE SET trained = ?2, trained_at = CASE WHEN ?2 THEN ?3 END
"""
TRAINED = """
UPDATE items SET state = CASE WHEN ?2 THEN 'trained' ELSE 'batched' END, changed_at = ?3
WHERE batch = ?1 AND state IN ('batched', 'trained')
"""


class StoreError(LedgerError):
    """The file cannot be the ledger's; the text names it and the remedy."""


class Store:
    """`path` None keeps everything in memory. With `fsync` a commit waits for the disk. Context manager.

    Raises StoreError for a file that is no Headrace buffer, is damaged, is of a run with another `fingerprint` or other
    `problems` (if given) or is in use by another process. Problems are written down as they are dispatched.
    """

    def __init__(
        self,
        path: Path | None,
        fsync: bool = True,
        fingerprint: str = "",
        problems: "Problems | None" = None,
    ) -> None:
        self.path, self._problems = path, problems
        with ExitStack() as ends, _explained(path):
            if path:
                ends.callback(os.close, _locked(path))
            threads = {"check_same_thread": False}  # one at a time: `commit` may run in another than the rest
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None, cached_statements=64, **threads)
            ends.callback(self._db.close)
            self._open(fsync, fingerprint)
            self._reader = reading(path) if path else self._db  # reads groups while a commit runs
            self._known_rows = {row for (row,) in self._db.execute("SELECT row FROM problems")}
            ends.callback(self._shorten)
            if path:
                ends.callback(self._reader.close)
            self._ends = ends.pop_all()

    def _open(self, fsync: bool, fingerprint: str) -> None:
        db, where = self._db, self.path
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        new = not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if not new and application != APPLICATION:
            raise StoreError(f"buffer.path {where}: an SQLite file of another program; name another file")
        if not new and schema != SCHEMA:
            raise StoreError(f"buffer.path {where}: schema {schema}, known is {SCHEMA}; use the Headrace that wrote it")
        db.execute("PRAGMA secure_delete = OFF")  # Debian's SQLite writes zeros over what is pruned, at half the speed
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        db.execute(f"PRAGMA journal_size_limit = {2 * PAGE_BYTES * WAL_PAGES}")
        if new:
            with self._transaction():
                for statement in TABLES.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {SCHEMA}")
        self._belongs("fingerprint", fingerprint, "config")
        self._belongs("problems_sha256", self._problems.digest if self._problems else "", "problems")

    def _belongs(self, name: str, value: str, what: str) -> None:
        """Refuse a file that was begun with another `value`; an empty one is not asked about."""
        known = self._db.execute("SELECT value FROM meta WHERE name = ?", [name]).fetchone()
        if known and value and known[0] != value:
            raise StoreError(
                f"buffer.path {self.path}: written by a run with {what} {known[0][:16]}, this one has {value[:16]}; "
                f"undo the change of the {what}, or choose another run.name"
            )
        if value and not known:
            self._db.execute("INSERT INTO meta VALUES (?, ?)", [name, value])

    def load(self) -> Saved:
        """Everything that `Ledger.restore` needs. Raises StoreError if the file is damaged."""
        with _explained(self.path):
            scalars = dict(self._db.execute("SELECT name, value FROM meta WHERE typeof(value) = 'integer'"))
            entries = tuple(Entry(*row) for row in self._db.execute(KEPT, [scalars.get("oldest", 0)]))
            totals = {(what, which): Lengths(*sums) for what, which, *sums in self._db.execute("SELECT * FROM totals")}
        return Saved(entries, totals, scalars)

    def commit(
        self, changes: Changes, payloads: Mapping[int, Sequence[bytes]] | None = None, void: Collection[int] = ()
    ) -> None:
        """Write `changes`, the samples (`Sample.pack()` each) of the groups accepted in them, and remove the samples of
        the items in `void`: all of it or, with sqlite3.Error raised, nothing."""
        now = time.time()
        with self._transaction():
            db, payloads = self._db, payloads or {}
            self._remove(changes.discarded)
            db.executemany(ITEM, [(*row, now) for row in changes.items.values()])
            db.executemany("INSERT OR REPLACE INTO problems VALUES (?, ?)", self._new_problems(changes))
            for item, facts in changes.facts.items():
                self._write_group(item, facts, payloads.get(item))
            for version, trained in sorted(changes.batches.items()):
                db.execute(BATCH, (version, trained, now))
                db.execute(TRAINED, (version, trained, now))
            db.executemany(TOTAL, [(*key, *lengths) for key, lengths in changes.totals.items()])
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", changes.scalars.items())
            self._remove(void)
        if self._problems is not None:
            self._known_rows.update(row[1] for row in changes.items.values())

    def samples(self, item: int) -> list[bytes]:
        """The packed samples of a group, in order; empty if it has none or they were removed."""
        query = "SELECT data FROM samples WHERE item = ? AND data IS NOT NULL ORDER BY idx"
        return [data for (data,) in self._reader.execute(query, [item])]

    def group(self, item: int) -> list[tuple[bytes, Facts]]:
        """The packed samples of a group, in order, each with its facts; empty as above."""
        query = "SELECT data, tokens, sampled, reward, truncated FROM samples WHERE item = ? ORDER BY idx"
        found = self._reader.execute(query, [item])
        return [(data, Facts(n, sampled, reward, bool(cut))) for data, n, sampled, reward, cut in found if data]

    def sizes(self) -> dict[int, int]:
        """Bytes of samples by item."""
        query = "SELECT item, bytes FROM items WHERE bytes AND (batch = -1 OR batch >= ?)"
        oldest = self._db.execute("SELECT value FROM meta WHERE name = 'oldest'").fetchone() or (0,)
        return dict(self._db.execute(query, oldest))

    def close(self) -> None:
        """Leave one complete file behind and let go of it."""
        self._ends.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shorten(self) -> None:
        # with a reader there, or a full disk, the log stays and is as good
        with suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _remove(self, items: Collection[int]) -> None:
        self._db.executemany("DELETE FROM samples WHERE item = ?", [(item,) for item in items])
        self._db.executemany("UPDATE items SET bytes = 0 WHERE item = ?", [(item,) for item in items])

    def _write_group(self, item: int, facts: Sequence[Facts], samples: Sequence[bytes] | None) -> None:
        data: Sequence[bytes | None] = samples or [None] * len(facts)
        rows = [
            (item, index, fact.tokens, fact.sampled, fact.reward, fact.truncated, blob)
            for index, (fact, blob) in enumerate(zip(facts, data, strict=True))
        ]
        self._db.executemany(SAMPLE, rows)
        self._db.execute("UPDATE items SET bytes = ? WHERE item = ?", (sum(map(len, samples or ())), item))

    def _new_problems(self, changes: Changes) -> list[tuple[int, str]]:
        if self._problems is None:
            return []
        rows = {int(row[1]) for row in changes.items.values()} - self._known_rows
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
    """A connection that only reads the file of a live or a dead buffer. Raises StoreError if there is none."""
    if not path.is_file():
        raise StoreError(f"{path}: no such file; a buffer writes it from its start on, unless buffer.path is null")
    with _explained(path):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
            db.close()
            raise StoreError(f"{path}: not the file of a Headrace buffer")
    return db


@contextmanager
def _explained(path: Path | None) -> Iterator[None]:
    """Say in words what SQLite finds wrong with a file when it is opened or read back."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        remedy = "is it the buffer's file, on a sound disk? Move it away to begin the run anew"
        raise StoreError(f"buffer.path {path}: {error}; {remedy}") from None


def _locked(path: Path) -> int:
    """Keep other buffers out; ends with the process. Beside the file, as closing that would end SQLite's own locks."""
    beside = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"buffer.path {path}: {error.strerror}; name a file in a folder that can be written") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise StoreError(
            f"buffer.path {path}: in use by process {holder}; stop that buffer, or choose another run.name"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
