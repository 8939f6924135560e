"""`python -m buffer problems RUN`: the drawn problems with solved share, attempts and state. The settings that say what
is solved, retired and left out are those of the last launch."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from buffer.ledger.counts import BANDS, Marks, RowRecord
from buffer.ledger.reasons import MOST_LEFT_OUT
from configs.schema import DifficultyConfig

STATES = (*BANDS, "retired", "left_out")
DRAWN = """
SELECT rows.*, place, items.state FROM rows LEFT JOIN problems USING (row)
LEFT JOIN items ON items.item = rows.last_item ORDER BY rows.row
"""
FIELDS = 11
OPEN_OR_WAITING = ("waiting", "leased", "stored")


class ListedProblem(NamedTuple):
    """A row that was drawn at least once."""

    record: RowRecord
    place: str
    """Its file and line."""
    band: str
    """"" for a row that is left out."""
    is_retired: bool

    @property
    def state(self) -> str:
        return "retired" if self.is_retired else self.band or "left_out"


class Rules(NamedTuple):
    """What decides a row's state, by the settings of the last launch."""

    attempts: int
    marks: Marks
    pause: int | None
    """Versions for which a retired row is not drawn; None: no row retires."""
    version: int


def listed(db: sqlite3.Connection) -> Iterator[ListedProblem]:
    rules = _rules(db)
    for values in db.execute(DRAWN):
        record, (place, item_state) = RowRecord(*values[:FIELDS]), values[FIELDS:]
        where, left_out = place or f"row {record.row} of data.train", record.is_left_out(rules.attempts)
        is_done = rules.pause is not None and record.streak >= rules.marks.streak and item_state not in OPEN_OR_WAITING
        is_retired = is_done and rules.version < record.last_version + (rules.pause or 0)
        band = "" if left_out else record.band(rules.marks.streak)
        yield ListedProblem(record, where, band, is_retired and not left_out)


def counts(db: sqlite3.Connection) -> tuple[dict[str, int], list[str]]:
    """`State.problems` and `State.left_out`."""
    rows, lines, (number,) = Counter[str](), list[str](), _counter(db, "problems") or (0,)
    for problem in listed(db):
        rows[problem.band or "left_out"] += 1
        rows["retired"] += problem.is_retired
        number -= 1
        if not problem.band and len(lines) < MOST_LEFT_OUT:
            lines.append(f"{problem.place}: {problem.record.reason}")
    rows["unseen"] += number
    names = [*BANDS, *(["retired"] if _rules(db).pause is not None else []), "left_out"]
    return {name: rows[name] for name in names}, lines


def problems(db: sqlite3.Connection, only: str | None = None) -> Iterable[str]:
    found, _ = counts(db)
    total = sum(found.values()) - found.get("retired", 0)
    shown = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in found.items())
    yield f"{total} problems: {shown}"
    if since := _counter(db, "rows_since"):
        yield f"counted from item {since[0]} on; the release that began this run counted nothing by problem"
    yield f"{'row':>8} {'solved':>7} {'samples':>8} {'groups':>7} {'failed':>7} {'drawn':>6}  {'state':<9} where"
    for problem in listed(db):
        record, state = problem.record, problem.state
        if only is not None and state != only:
            continue
        share = f"{record.solved / record.samples:7.3f}" if record.samples else f"{'':>7}"
        figures = f"{record.samples:>8} {record.groups:>7} {record.failed:>7} {record.drawn:>6}"
        why = f": {record.reason}" if record.reason and not record.groups else ""
        yield f"{record.row:>8} {share} {figures}  {state.replace('_', ' '):<9} {problem.place}{why}"


def _rules(db: sqlite3.Connection) -> Rules:
    settings = _settings(db)
    given = settings.get("data.difficulty")
    version = (_counter(db, "version") or (0,))[0]
    attempts = settings.get("rollout.attempts", 3)
    if given is None:
        return Rules(attempts, Marks(), None, version)
    difficulty = DifficultyConfig.model_validate(given)
    pause = difficulty.rest + difficulty.return_after
    return Rules(attempts, Marks(difficulty.solved_at, difficulty.groups), pause, version)


def _settings(db: sqlite3.Connection) -> dict[str, Any]:
    found = db.execute("SELECT value FROM meta WHERE name = 'settings'").fetchone()
    return json.loads(found[0]) if found else {}


def _counter(db: sqlite3.Connection, name: str) -> tuple[int] | None:
    found: tuple[int] | None = db.execute("SELECT value FROM meta WHERE name = ?", [name]).fetchone()
    return found
