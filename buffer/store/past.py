"""What is known of a run before it is started again: from its ledger's file and its `config.yaml`. Reads only.

Used by the launcher and by the buffer before they write anything, and by `python -m actors status`.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from buffer.store.sqlite import reading
from configs.resume import Change, Settings, written
from configs.schema import Config

OPEN = "SELECT COUNT(*) FROM items WHERE batch = -1 AND state IN ('waiting', 'leased', 'stored')"
"""By the index of `batch`: a run may have millions of items."""


class Past(NamedTuple):
    """`settings` of the last launch, None for a new run, and how far the ledger is."""

    settings: Settings | None = None
    oldest: int = 0
    """Oldest batch that can be served again."""
    trained: int = 0
    """Versions trained."""
    used_up: bool = False
    """Every problem of every epoch that `data.epochs` asks for was trained or dropped."""
    servers: int = 0
    """Rollout servers that were wanted last; 0: as the run file has it."""
    by_person: bool = False
    """A person said so."""


def past(config: Config) -> Past:
    """Of the run of `config`. Raises ConfigError or StoreError for a file that cannot be read."""
    file = config.buffer.path and config.run.path / config.buffer.path
    if file is None or not file.exists():
        return Past(written(config.run.path))
    with closing(reading(file)) as db:
        meta = dict(db.execute("SELECT name, value FROM meta"))
        (num_open,) = db.execute(OPEN).fetchone()
    known = json.loads(meta["settings"]) if "settings" in meta else written(config.run.path)
    epochs, trained = config.data.epochs, meta.get("last_trained", -1) + 1
    dispatched = epochs is not None and meta.get("next_item", 0) >= epochs * meta.get("problems", 1)
    used_up = dispatched and not num_open and trained == meta["version"]
    wanted = meta.get("wanted_servers", 0), bool(meta.get("wanted_by_person", 0))
    return Past(known, meta.get("oldest", 0), trained, used_up, *wanted)


def history(db: sqlite3.Connection) -> Iterator[tuple[int, Change]]:
    """The settings that were changed while the run went on, and the version at which."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'changes'").fetchone():
        for version, key, old, new in db.execute("SELECT version, key, old, new FROM changes ORDER BY rowid"):
            yield version, Change(key, json.loads(old), json.loads(new))
