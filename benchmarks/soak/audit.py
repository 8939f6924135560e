"""Nothing lost, nothing twice: the ledger of a run that has ended, compared with its problems and its records.

`audit` only reads, with SQLite and `Sample.unpack`; it returns what it has counted, and raises `Lost` for the first
thing that is wrong. The run kept all samples (`buffer.keep: all`) and ended by a signal, so items may be left open.
"""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from benchmarks.soak.observer import is_version
from buffer.problems import load_problems
from buffer.store.sqlite import reading
from buffer.wire.sample import Sample
from configs.schema import Config


class Lost(AssertionError):
    """Something was lost, or done twice; the text says what."""


def need(right: bool, otherwise: str) -> None:
    """Raises Lost(otherwise) unless `right`."""
    if not right:
        raise Lost(otherwise)


def audit(config: Config) -> Counter[str]:
    """Numbers of versions, groups, samples and tokens trained, and of groups that are left open."""
    run, counts = config.run.path, Counter[str]()
    assert config.buffer.path is not None
    with closing(reading(run / config.buffer.path)) as db:
        db.row_factory = sqlite3.Row
        (verdict,) = db.execute("PRAGMA integrity_check").fetchone()
        need(verdict == "ok", f"SQLite's own check: {verdict}")
        items = db.execute("SELECT * FROM items ORDER BY item").fetchall()
        _problems(items, len(load_problems(config.data.train, config.data)))
        _samples(db, items, config, counts)
        marks = dict(db.execute("SELECT version, trained FROM batches").fetchall())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if is_version(record)]
    _versions(items, records, marks, config, counts)
    return counts


def _problems(items: Sequence[Any], rows: int) -> None:
    """Each problem was dispatched as one item an epoch, and none was dropped."""
    need([item["item"] for item in items] == list(range(len(items))), "items are not numbered without gaps")
    seen = Counter((item["epoch"], item["row"]) for item in items)
    twice = [key for key, times in seen.items() if times > 1]
    need(not twice, f"problems that are two items of an epoch: {twice[:5]}")
    need(all(item["epoch"] <= item["item"] // rows for item in items), "an epoch began before the last one was used up")
    dropped = [item["item"] for item in items if item["state"] == "dropped"]
    need(not dropped, f"items that were dropped: {dropped[:5]}")


def _samples(db: sqlite3.Connection, items: Sequence[Any], config: Config, counts: Counter[str]) -> None:
    """Every group has all its samples, to the byte and to the token, and no token is older than the bound."""
    stored: dict[int, list[Any]] = defaultdict(list)
    for found in db.execute("SELECT *, data_of(segment, position, bytes) AS data FROM samples ORDER BY item, idx"):
        sample = Sample.unpack(found["data"])
        sampled = sample.sampled.numpy().astype(bool)
        sizes = (int(sample.tokens.shape[0]), int(sampled.sum()), sample.reward)
        need(sizes == (found["tokens"], found["sampled"], found["reward"]), f"item {found['item']}: not its row")
        stored[found["item"]].append((*sizes[:2], len(found["data"]), int(sample.versions.numpy()[sampled].min())))
    for item in items:
        rows, what = stored.pop(item["item"], []), f"item {item['item']} ({item['state']})"
        wanted = config.batch.samples if item["state"] in ("stored", "batched", "trained") else 0
        need(len(rows) == wanted, f"{what} has {len(rows)} samples of {wanted}")
        sums = tuple(sum(row[place] for row in rows) for place in range(3))
        need(not rows or sums == (item["tokens"], item["sampled"], item["bytes"]), f"{what}: sums are {sums}")
        if item["state"] == "trained":
            age = item["batch"] - min(row[3] for row in rows)
            need(age <= config.batch.max_staleness, f"{what} was trained with a token of age {age}")
            counts.update(groups=1, samples=len(rows), tokens=sums[0])
        else:
            counts.update(open=1)
    need(not stored, f"samples of items that are not there: {sorted(stored)[:5]}")


def _versions(
    items: Sequence[Any], records: Sequence[dict[str, Any]], marks: dict[int, int], config: Config, counts: Counter[str]
) -> None:
    """The learner's records have each version once, of just the groups that the ledger put into its batch."""
    batches: dict[int, list[Any]] = defaultdict(list)
    for item in items:
        if item["state"] == "trained":
            batches[item["batch"]].append(item)
    versions = [record["version"] for record in records]
    need(versions == list(range(1, len(versions) + 1)), "the records do not have each version once, in order")
    need(sorted(batches) == list(range(len(versions))), "the trained batches are not those of the records")
    unmarked = [version for version in batches if not marks.get(version)]
    need(not unmarked, f"batches that are not marked as trained: {unmarked[:5]}")
    for version, members in batches.items():
        record = records[version]
        need(len(members) == config.batch.groups, f"batch {version} has {len(members)} groups")
        sums = {"samples": len(members) * config.batch.samples}
        sums |= {"tokens": sum(item["tokens"] for item in members)}
        sums |= {"tokens_sampled": sum(item["sampled"] for item in members)}
        other = {name: (record[name], value) for name, value in sums.items() if record[name] != value}
        need(not other, f"version {version + 1} was trained on other samples than its batch has: {other}")
    counts["versions"] = len(versions)
