"""The audit after a chaos run: compares the ledger's file with the learner's journal, its checkpoints and the problems.

`audit` only reads; it returns its counts, and raises `Finding` if something is wrong. It uses `reading` and
`Sample.unpack` of the buffer's code only: rows are read with SQLite.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffer.store.segments import folder_of
from buffer.store.sqlite import reading
from buffer.wire.sample import Sample, num_turns
from configs.schema import Config
from tests.system.chaos_learner import digest_of, following
from tests.system.chaos_run import ASKS, HOPELESS, PERMANENT, SAME, Run, kind_of, row, turns_of

LOST = (
    "was restarted",
    "its server ended",
    "was not heard of for",
    "lost: its server does not know",
    "could not be trained within",
    "warden were lost",
)
"""Reasons for the end of a lease that are not the fault of its problem."""
ZERO_VARIANCE = "zero variance"


class Finding(AssertionError):
    """A broken promise; the text says which."""


@dataclass
class Counts:
    """Numbers of what the audit has checked."""

    trained: int = 0
    dropped: int = 0
    open: int = 0
    batches: int = 0
    replayed: int = 0
    samples: int = 0
    discarded: int = 0
    met: int = 0
    """Episodes of agents whose server was killed meanwhile: the run counts them, not the ledger."""
    faults: Counter[str] = field(default_factory=Counter)
    """Faults that are no kills, as the run counts them."""
    oldest: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def plus(self, other: "Counts") -> "Counts":
        """The sum of both; of `oldest` the maximum."""
        numbers = {name: getattr(self, name) + getattr(other, name) for name in vars(self) if name != "oldest"}
        return Counts(**numbers, oldest=max(self.oldest, other.oldest))


def audit(run: Run, held: bool = False) -> Counts:
    """Raises Finding for the first thing that is wrong. `held`: the run goes on, and its learner is held before it
    trains the batch that it has taken (`chaos_learner.Journal.train`)."""
    config, counts = run.config(), Counts()
    with closing(reading(run.ledger)) as db:
        db.row_factory = sqlite3.Row
        db.execute("BEGIN")  # servers may go on: all of it is of one moment
        (verdict,) = db.execute("PRAGMA integrity_check").fetchone()
        need(verdict == "ok", f"SQLite's own check: {verdict}")
        items = {found["item"]: found for found in db.execute("SELECT * FROM items ORDER BY item")}
        _problems(items, config, counts)
        _samples(db, items, config, counts)
        _segments(db, run)
        _totals(db, items, counts)
        _batches(db, items, config, run, counts, held)
    return counts


def need(right: bool, otherwise: str) -> None:
    """Raises Finding(otherwise) unless `right`."""
    if not right:
        raise Finding(otherwise)


def _problems(items: dict[int, Any], config: Config, counts: Counts) -> None:
    """Each problem of each epoch once; trained, or dropped for a reason that fits it, or open where versions end it."""
    with config.data.train.open() as file:
        rows = sum(1 for _ in file)
    _numbers(items, rows, config.data.epochs)
    need(
        all(item["epoch"] == number // rows for number, item in items.items()),
        "an item of an epoch it does not belong to",
    )
    for number, times in Counter((item["epoch"], item["row"]) for item in items.values()).items():
        need(times == 1, f"problem {number[1]} of epoch {number[0]} was dispatched as {times} items")
    epochs, failed = config.data.epochs, Counter[int]()
    for item in items.values():
        if item["state"] == "dropped" and item["reason"] != ZERO_VARIANCE:
            failed[item["row"]] += item["attempts"]
    for item in items.values():
        if item["state"] == "trained":
            counts.trained += 1
        elif item["state"] == "dropped":
            counts.dropped += 1
            _dropped(item, failed[item["row"]], config, counts)
        else:
            counts.open += 1
            need(epochs is None, f"item {item['item']} is left {item['state']} although the problems are used up")


def _numbers(items: dict[int, Any], rows: int, epochs: int | None) -> None:
    """Each number has an item, but for places of rows that are left out: they failed for good in an epoch before."""
    end = 1 + max(items) if epochs is None else rows * epochs
    failed: set[int] = set()
    for first in range(0, end, rows):
        there = [items[number] for number in range(first, min(first + rows, end)) if number in items]
        without = min(first + rows, end) - first - len(there)
        left_out = failed - {item["row"] for item in there}
        need(without <= len(left_out), f"items are not numbered without gaps: {without} lack from number {first} on")
        failed |= {item["row"] for item in there if item["state"] == "dropped" and item["reason"] != ZERO_VARIANCE}


def _dropped(item: Any, failed: int, config: Config, counts: Counts) -> None:
    """For good: at the first attempt, or once all attempts of its row, in this epoch or those before, have failed."""
    kind, reason, attempts = kind_of(item["row"]), item["reason"], item["attempts"]
    what = f"item {item['item']} ({kind}) was dropped at attempt {attempts}: {reason or 'without a reason'}"
    counts.reasons[kind] += 1
    if kind in PERMANENT and PERMANENT[kind] in reason:
        return
    if reason == ZERO_VARIANCE:
        need(config.batch.skip_zero_variance and item["samples"] > 0, what)
        return
    known = (*LOST, *HOPELESS.values())
    need(
        any(word in reason for word in known) and failed >= config.rollout.attempts >= attempts and not item["samples"],
        what,
    )


def _samples(db: sqlite3.Connection, items: dict[int, Any], config: Config, counts: Counts) -> None:
    """Every group is complete, every sample valid and of its problem, sums are right, no token exceeds the bound."""
    stored: dict[int, list[Any]] = {}
    for found in db.execute("SELECT *, data_of(segment, position, bytes) AS data FROM samples ORDER BY item, idx"):
        stored.setdefault(found["item"], []).append(found)
    for number, item in items.items():
        rows = stored.pop(number, [])
        what = f"item {number} ({item['state']})"
        need(len(rows) == item["samples"], f"{what} has {len(rows)} samples, {item['samples']} were counted")
        wanted = config.batch.samples if item["state"] in ("trained", "batched", "stored") else len(rows)
        need(len(rows) == wanted, f"{what} has {len(rows)} samples of {wanted}")
        for name in ("tokens", "sampled", "truncated"):
            total = sum(found[name] for found in rows)
            need(total == item[name], f"{what}: {name} {item[name]}, of its samples {total}")
        need(sum(len(found["data"]) for found in rows) == item["bytes"], f"{what}: bytes are wrong")
        counts.samples += len(rows)
        for found in rows:
            _sample(found, item, what, config, counts)
        if item["state"] == "trained" and config.batch.skip_zero_variance:
            need(len({found["reward"] for found in rows}) > 1, f"{what} has equal rewards and was trained")
        hopeless = kind_of(item["row"]) in {**HOPELESS, **PERMANENT}
        need(not (rows and hopeless), f"{what} became a group, and could not")
    need(not stored, f"samples of items that are not there: {sorted(stored)[:5]}")


def _segments(db: sqlite3.Connection, run: Run) -> None:
    """The files are those that samples name, and the live bytes counted of each are those of its samples."""
    named = dict(db.execute("SELECT segment, SUM(bytes) FROM samples WHERE segment IS NOT NULL GROUP BY segment"))
    counted = dict(db.execute("SELECT segment, live FROM segments").fetchall())
    need(+Counter(counted) == +Counter(named), f"segments: {counted} bytes are counted, {named} are named")
    files = {int(file.stem) for file in folder_of(run.ledger).glob("*.samples")}
    need(files >= set(named), f"segments {set(named) - files} are gone")
    need(files <= {*counted, 1}, f"segments {files - set(counted)} were left behind")


def _sample(found: Any, item: Any, what: str, config: Config, counts: Counts) -> None:
    sample = Sample.unpack(found["data"])
    sampled = sample.sampled.numpy().astype(bool)
    tokens = sample.tokens.numpy()
    prompt = "".join(map(chr, tokens[~sampled]))
    turns = turns_of(item["row"], config)
    given = row(item["row"])["problem"] + ASKS * (turns - 1)
    need(prompt == given and num_turns(sampled) == turns, f"{what} holds an answer to {prompt!r} in other turns")
    seen = (len(tokens), int(sampled.sum()), sample.reward)
    need(seen == (found["tokens"], found["sampled"], found["reward"]), f"{what}: sample {found['idx']} is not its row")
    equal = kind_of(item["row"]) == SAME
    need(
        sample.reward == (1.0 if equal else float(sample.answer.rpartition("=")[2])),
        f"{what}: the reward of another answer",
    )
    need(turns == 1 or sample.metrics["task_score"] == sample.reward, f"{what}: a score that its agent did not give")
    if item["state"] == "trained":
        age = item["batch"] - int(np.min(sample.versions.numpy()[sampled]))
        counts.oldest = max(counts.oldest, age)
        bound = config.batch.max_staleness
        where = f"dispatched at {item['version']}, trained in batch {item['batch']}"
        need(age <= bound, f"{what}, {where}, has a token of age {age}, the bound is {bound}")


def _totals(db: sqlite3.Connection, items: dict[int, Any], counts: Counts) -> None:
    """The running totals are the sums over the rows."""
    names = ("groups", "samples", "tokens", "sampled", "truncated")
    totals: dict[str, Counter[str]] = {}
    for found in db.execute("SELECT * FROM totals"):
        totals.setdefault(found["what"], Counter()).update({name: found[name] for name in names})

    def add(states: tuple[str, ...], generated: bool = False) -> Counter[str]:
        sums: Counter[str] = Counter()
        for item in items.values():
            if item["state"] in states and (item["samples"] or not generated):
                sums.update({name: 1 if name == "groups" else item[name] for name in names})
        return sums

    have = {what: totals.get(what, Counter()) for what in ("trained", "dropped", "age", "generated", "discarded")}
    counts.discarded = have["discarded"]["groups"]
    everything = ("trained", "dropped", "stored", "batched")
    wanted = {
        "trained": add(("trained",)),
        "dropped": add(("dropped",)),
        "age": add(("trained", "batched")),
        "generated": add(everything, generated=True) + have["discarded"],
    }
    for what, sums in wanted.items():
        need(+have[what] == +sums, f"totals of {what}: {dict(have[what])}, of the rows {dict(sums)}")


def _batches(
    db: sqlite3.Connection, items: dict[int, Any], config: Config, run: Run, counts: Counts, held: bool
) -> None:
    """The learner trained the ledger's batches, to the byte, however often a version was repeated."""
    journal = list(_journal(run))
    counts.batches = len({line["version"] for line in journal})
    counts.replayed = len(journal) - counts.batches
    members: dict[int, list[int]] = {}
    for number, item in items.items():
        if item["state"] == "trained":
            members.setdefault(item["batch"], []).append(number)
    need(sorted(members) == list(range(len(members))), "the versions of the batches have gaps")
    marks = dict(db.execute("SELECT version, trained FROM batches").fetchall())
    need(not held or marks.pop(len(members), None) == 0, "the batch before which the learner is held is not there")
    need(marks == dict.fromkeys(members, 1), "table batches is not what the items say")
    need({line["version"] for line in journal} == set(members), "the learner's versions are not the ledger's")
    sizes = [len(members[version]) for version in sorted(members)]
    need(all(size == config.batch.groups for size in sizes[:-1]), f"batches of {Counter(sizes)} groups")
    digests, policies = {}, [""]
    for version in sorted(members):
        some = ",".join(map(str, members[version]))
        query = f"SELECT item, idx, data_of(segment, position, bytes) FROM samples WHERE item IN ({some})"
        digests[version] = digest_of(tuple(found) for found in db.execute(query))
        policies.append(following(policies[-1], digests[version]))
        old = [number for number in members[version] if items[number]["version"] + config.batch.max_staleness < version]
        need(not old, f"batch {version} has items {old} beyond the bound")
    for line in journal:
        version = line["version"]
        need(
            line["items"] == members[version], f"batch {version}: {line['items']} were trained, not {members[version]}"
        )
        need(line["digest"] == digests[version], f"batch {version}: other bytes were trained than the ledger has")
        need(line["policy"] == policies[version + 1], f"version {version + 1} is not the policy of these batches")
    last = max(run.checkpoints.glob("*.json"), key=lambda path: int(path.stem))
    version = int(last.stem)
    right = (held or version == len(members)) and json.loads(last.read_text()) == policies[version]
    need(right, f"the last checkpoint is {last.name}, or not of these {len(members)} batches")


def _journal(run: Run) -> Iterator[dict[str, Any]]:
    """What the learner trained, in order. A line that a kill cut off does not count."""
    for line in run.journal.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
