"""Opens the ledger's SQLite file: makes it, brings an older one to this schema, and refuses what is not sound.

Every page must have its checksum (`witness.py`). `PRAGMA quick_check` finds what was written wrong; RULES compare what
SQLite does not. Nothing here reads the samples.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from buffer.store import sql, start_checks, witness
from buffer.store.faults import StoreError
from buffer.store.witness import PAGE, Log

LOG_PAGES = 4096
"""In pages; then the log is begun anew."""
TO_BE_OPENED = "it must be a file that this user may read and write, in a folder that it may write to"
FOREIGN = "an SQLite file of another program; name another file"
LOADED = "(batch = -1 OR batch >= COALESCE((SELECT value FROM meta WHERE name = 'oldest'), 0))"
"""What a start reads, of millions of items."""
RULES = {
    "an item has an unknown state": f"""
        SELECT 'item ' || item FROM items WHERE {LOADED} AND
        state NOT IN ('waiting', 'leased', 'stored', 'batched', 'trained', 'dropped', 'quarantined')""",
    "a group has other samples than its item": """
        SELECT 'item ' || item FROM items LEFT JOIN samples USING (item) WHERE items.bytes > 0
        GROUP BY item HAVING COUNT(samples.idx) <> items.samples OR SUM(samples.bytes) <> items.bytes""",
    "an item is in a batch that was not formed": f"""
        SELECT 'item ' || item FROM items WHERE {LOADED} AND
        state IN ('batched', 'trained') AND batch NOT IN (SELECT version FROM batches)""",
    "the next batch does not follow the last one": """
        SELECT 'batch ' || value FROM meta
        WHERE name = 'version' AND value <> (SELECT MAX(version) + 1 FROM batches)""",
    "a sample lies outside of its segment": """
        SELECT 'item ' || item FROM samples LEFT JOIN segments USING (segment)
        WHERE size IS NULL OR position < 0 OR samples.bytes < 0 OR position + samples.bytes > size""",
}
"""By what is wrong: a query that names where."""


def require_whole(path: Path, known: witness.Commits | None) -> None:
    """Raise StoreError unless the ledger has all commits `known` to its witness, and each page its checksum.

    Reads all of the file, also beside a live buffer.
    """
    try:
        if is_begun(path):
            _require_whole(path, known)
        else:
            start_checks.require_all(path, known, None)
    except OSError as error:
        raise StoreError(f"buffer.path {path}: {error.filename or path}: {error.strerror}; {TO_BE_OPENED}") from None


def _require_whole(path: Path, known: witness.Commits | None) -> None:
    # the stream outlives the connection: closing it would end SQLite's locks
    with explained(path), open(path, "rb") as stream, closing(_connected(path)) as db:
        require_ledger(db, f"buffer.path {path}: {FOREIGN}")
        db.execute("BEGIN")
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        require_schema(schema, path)
        start_checks.require_all(path, known, witness.counted(db))
        if schema == sql.SCHEMA or witness.sums_of(path).exists():
            start_checks.require_same_pages(path, stream)


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)


def is_begun(path: Path) -> bool:
    """Whether there is more than an empty file, or the empty first page that SQLite writes before it makes the log."""
    size = path.stat().st_size if path.is_file() else 0
    return bool(size) and (size != PAGE or bool(Log(path).pages) or not path.read_bytes().startswith(b"SQLite format"))


def opened_sums(path: Path, fsync: bool) -> witness.PageSums:
    """The checksums of the ledger `path`, made where it has none. Raises StoreError, OSError."""
    if not path.is_file():
        raise StoreError(f"buffer.path {path}: unable to open database file; {TO_BE_OPENED}")
    if not (is_begun(path) and witness.sums_of(path).exists()):
        start_checks.begin_sums(path)
    return witness.PageSums(path, fsync, LOG_PAGES)


def opened(path: Path | None, fsync: bool, sums: witness.PageSums | None = None) -> sqlite3.Connection:
    """Open the ledger `path` for writing. Raises StoreError or sqlite3.Error.

    SQLite does not copy the log into the file by itself.
    """
    db = sqlite3.connect(path or ":memory:", isolation_level=None, cached_statements=64)
    try:
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        new = not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if not new:
            require_ledger(db, f"buffer.path {path}: {FOREIGN}")
            require_schema(schema, path)
            require_page_size(db, path)
            require_sound(db, path)
        _configure(db, fsync)
        if new or schema != sql.SCHEMA:
            _make(db, sql.TABLES if new else ";".join(sql.MIGRATIONS[one] for one in range(schema, sql.SCHEMA)))
        db.execute(sql.EVALUATIONS)
    except BaseException:
        close(db, sums)
        raise
    return db


def close(db: sqlite3.Connection, sums: witness.PageSums | None) -> None:
    """Close the ledger, which has SQLite copy the log into the file."""
    with suppress(OSError):
        if sums:
            sums.note_log()
    db.close()


def _configure(db: sqlite3.Connection, fsync: bool) -> None:
    db.execute(f"PRAGMA page_size = {PAGE}")  # has an effect on a new file only
    db.execute("PRAGMA secure_delete = OFF")  # Debian's SQLite would overwrite deleted content with zeros
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
    db.execute("PRAGMA wal_autocheckpoint = 0")


def _make(db: sqlite3.Connection, statements: str) -> None:
    db.execute("BEGIN IMMEDIATE")
    for statement in statements.split(";"):
        db.execute(statement)
    db.execute(sql.FIRST_COMMIT, [os.urandom(8).hex()])
    db.execute(f"PRAGMA application_id = {sql.APPLICATION}")
    db.execute(f"PRAGMA user_version = {sql.SCHEMA}")
    db.execute("COMMIT")


def require_ledger(db: sqlite3.Connection, refusal: str) -> None:
    if db.execute("PRAGMA application_id").fetchone()[0] != sql.APPLICATION:
        raise StoreError(refusal)


def require_schema(schema: int, path: Path | None) -> None:
    if schema not in sql.READABLE:
        raise StoreError(
            f"buffer.path {path}: written with schema {schema}, this Headrace has {sql.SCHEMA}; finish that run with "
            "the Headrace that wrote it, or choose another run.name"
        )


def require_page_size(db: sqlite3.Connection, path: Path | None) -> None:
    if path and (size := db.execute("PRAGMA page_size").fetchone()[0]) != PAGE:
        remedy = "finish that run with the Headrace that wrote it, or choose another run.name"
        raise StoreError(f"buffer.path {path}: its pages have {size} bytes, this Headrace reads {PAGE}; {remedy}")


def require_sound(db: sqlite3.Connection, path: Path | None) -> None:
    """Raise StoreError if a page is damaged, or rows contradict each other."""
    with explained(path):
        found = next(unsound(db), None)
    if found:
        raise damaged(path, found)


def unsound(db: sqlite3.Connection, most: int = 1) -> Iterator[str]:
    pages = [str(line).strip() for (line,) in db.execute(f"PRAGMA quick_check({most})")]
    yield from (" ".join(line.split()) for line in pages if line != "ok")
    for rule, query in RULES.items():
        yield from (f"{rule}: {where}" for (where,) in db.execute(f"{query} LIMIT {most}"))


NOT_OPENED = (sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH)


@contextmanager
def explained(path: Path | None) -> Iterator[None]:
    """Turn SQLite's errors into a StoreError with the remedy."""
    try:
        yield
    except UnicodeDecodeError:  # SQLite quotes the bytes in its error
        raise damaged(path, "the definition of a table is no text") from None
    except sqlite3.DatabaseError as error:
        if _code(error) == sqlite3.SQLITE_CORRUPT:
            raise damaged(path, str(error)) from None
        remedy = "is it the buffer's file, on a sound disk? Move it away to begin the run anew"
        if _code(error) in NOT_OPENED:
            remedy = TO_BE_OPENED
        raise StoreError(f"buffer.path {path}: {' '.join(str(error).split())}; {remedy}") from None


def is_damage(error: BaseException) -> bool:
    return _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _code(error: BaseException) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def damaged(path: Path | None, problem: str) -> StoreError:
    remedy = "bring back a copy of it, or begin anew with another run.name"
    return StoreError(f"buffer.path {path}: the file is damaged: {' '.join(problem.split())}; {remedy}")


def read_only(path: Path) -> sqlite3.Connection:
    """Open the file for reading, also beside a live buffer. Raises StoreError."""
    if not path.is_file():
        raise StoreError(f"{path}: no such file; a buffer writes it from its start on, unless buffer.path is null")
    with explained(path):
        db = _connected(path)
        try:
            require_ledger(db, f"{path}: not the file of a Headrace buffer")
            (schema,) = db.execute("PRAGMA user_version").fetchone()
            require_schema(schema, path)
            for statement in sql.AS_NOW.get(schema, ()):
                db.execute(statement)
        except BaseException:
            db.close()
            raise
    return db
