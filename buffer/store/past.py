"""Reads the state of a run before it is started again."""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

from buffer.store import start_checks, witness
from buffer.store.faults import ACCEPT, LostCommits
from buffer.store.opening import explained, is_begun, require_whole
from buffer.store.sqlite import hold, reading
from configs.checkpoint_files import newest
from configs.load import ConfigError
from configs.resume import Change, Settings, written
from configs.schema import Config
from configs.writing import write_text

BEGINS = "begins.json"
OPEN = "SELECT COUNT(*) FROM items WHERE batch = -1 AND state IN ('waiting', 'leased', 'stored')"
"""By the index of `batch`: a run may have millions of items."""


class Past(NamedTuple):
    settings: Settings | None = None
    oldest: int = 0
    trained: int = 0
    used_up: bool = False
    servers: int = 0
    """Wanted last; 0: as the run file has it."""
    by_person: bool = False


def store_path(config: Config) -> Path | None:
    """The ledger's file; None: in memory."""
    return config.buffer.path and config.run.path / config.buffer.path


def past(config: Config) -> Past:
    """Raises ConfigError or StoreError for an unreadable file."""
    file = store_path(config)
    if file is None or not is_begun(file):
        return Past(written(config.run.path))
    with closing(reading(file)) as db, explained(file):
        meta = dict(db.execute("SELECT name, value FROM meta"))
        (num_open,) = db.execute(OPEN).fetchone()
    known = json.loads(meta["settings"]) if "settings" in meta else written(config.run.path)
    epochs, trained = config.data.epochs, meta.get("last_trained", -1) + 1
    dispatched = epochs is not None and meta.get("next_item", 0) >= epochs * meta.get("problems", 1)
    used_up = dispatched and not num_open and trained == meta["version"]
    wanted = meta.get("wanted_servers", 0), bool(meta.get("wanted_by_person", 0))
    return Past(known, meta.get("oldest", 0), trained, used_up, *wanted)


def losses(config: Config) -> list[str]:
    """What a start would lose for ever. Raises StoreError for an unreadable file."""
    file = store_path(config)
    if file is None:
        return []
    found, known = list[str](), None
    with suppress(ValueError):  # the buffer reports a damaged witness
        known = witness.noted(file)
    try:
        require_whole(file, known)
    except LostCommits as error:
        found.append(str(error))
    checkpoints = config.run.path / "checkpoints"
    if not is_begun(file) and (version := newest(checkpoints)) > begins_with(config.run.path):
        problem = f"{checkpoints} has version {version}, and the ledger is gone: the run would begin again with the"
        remedy = f"bring the file back, or begin so on purpose with {ACCEPT}"
        found.append(f"buffer.path {file}: {problem} first problem under that version; {remedy}")
    return found


def accept_loss(config: Config) -> None:
    """Accept the `losses`: a new ledger begins with the newest checkpoint.

    Raises StoreError while a buffer holds the ledger: it notes checksums, which this would overwrite.
    """
    file = store_path(config)
    if file is None:
        return
    with ExitStack() as ends:
        ends.callback(os.close, hold(file))
        _accept(config, file)


def _accept(config: Config, file: Path) -> None:
    if commits := _counted(file):
        witness.Witness(file, commits).close()
        with explained(file):
            start_checks.begin_sums(file)
    else:
        witness.file_of(file).unlink(missing_ok=True)
    if not is_begun(file) and (version := newest(config.run.path / "checkpoints")):
        begin_with(config.run.path, version)


def begin_with(run: Path, version: int) -> None:
    """Note that a new ledger may begin with `version`. Raises WriteError."""
    write_text(run / BEGINS, json.dumps({"version": version}))


def begins_with(run: Path) -> int:
    """Version of the checkpoint with which a new ledger may begin; 0: the initial model."""
    try:
        return int(json.loads((run / BEGINS).read_text(encoding="utf-8"))["version"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{run / BEGINS}: cannot be read ({error}); remove it, and start with {ACCEPT}"]) from None


def _counted(file: Path) -> witness.Commits | None:
    if not is_begun(file):
        return None
    with closing(reading(file)) as db, explained(file):
        return witness.counted(db)


def history(db: sqlite3.Connection) -> Iterator[tuple[int, Change]]:
    """Settings that were changed while the run went on, and at which version."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'changes'").fetchone():
        for version, key, old, new in db.execute("SELECT version, key, old, new FROM changes ORDER BY rowid"):
            yield version, Change(key, json.loads(old), json.loads(new))
