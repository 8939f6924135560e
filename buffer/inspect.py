"""What a run's buffer holds, for people: `python -m buffer stats|tail [-f]|show ITEM|export OUT.parquet RUN`.

RUN is the run's folder or its config. Reads the SQLite file, of a live or a dead run alike, without disturbing it;
`stats` also asks a live buffer who waits for what. Waits for nothing but that answer, two seconds at most;
`tail --follow` until it is interrupted.
"""

import argparse
import asyncio
import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from buffer.ledger.types import LedgerError
from buffer.store.sqlite import reading
from buffer.wire.connection import Connection, RefusedError
from buffer.wire.curve import KeysError, client_keys_for
from buffer.wire.protocol import Sample, State, Status
from configs import load
from configs.schema import Config

COMMANDS = ("stats", "tail", "show", "export")
ANSWER_S = 2.0
FOLLOW_S = 1.0
"""Between two looks of `tail --follow`."""
ROWS = 256
"""Samples that `export` holds in memory at a time."""

SAMPLES = "SELECT idx, data_of(segment, position, bytes) FROM samples WHERE item = ? ORDER BY idx"
COLUMNS = pa.schema(
    [
        ("item", pa.int64()), ("index", pa.int32()), ("row", pa.int64()), ("epoch", pa.int32()), ("state", pa.string()),
        ("reason", pa.string()), ("dispatched", pa.int64()), ("batch", pa.int64()), ("server", pa.string()),
        ("problem", pa.string()), ("reward", pa.float64()), ("finish", pa.string()), ("answer", pa.string()),
        ("tokens", pa.list_(pa.int32())), ("sampled", pa.list_(pa.uint8())), ("behaviour_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())), ("metrics", pa.string()),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class StoredRun:
    """A run to look at: its config, and its ledger's file (None: in memory)."""

    config: Config
    folder: Path
    file: Path | None

    @classmethod
    def at(cls, words: Sequence[str]) -> "StoredRun":
        """From a run's folder, or config files and overrides."""
        first = Path(words[0])
        words = [str(first / "config.yaml"), *words[1:]] if first.is_dir() else words
        config = load.read(words, "python -m buffer COMMAND")
        folder = first if first.is_dir() else config.run.path
        return cls(config, folder, config.buffer.path and folder / config.buffer.path)

    def reading(self) -> sqlite3.Connection:
        """Raises LedgerError if there is no file."""
        if self.file is None:
            raise LedgerError(
                "buffer.path is null: this run's ledger is in its process only, and `stats` of it live shows all"
            )
        return reading(self.file)


def main(argv: Sequence[str]) -> int:
    """Run one of COMMANDS; returns the exit code."""
    parser = argparse.ArgumentParser("python -m buffer", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, told in (("stats", "counts, ages, leases, lengths, waiters"), ("tail", "the groups that came in last"),
                       ("show", "one item in full"), ("export", "all samples as a parquet file")):  # fmt: skip
        command = commands.add_parser(name, help=told, allow_abbrev=False)
        if name == "tail":
            command.add_argument("-n", type=int, default=10, help="how many groups (10)")
            command.add_argument("-f", "--follow", action="store_true", help="go on with those that come in")
        if name == "show":
            command.add_argument("item", type=int, help="number of the item")
        if name == "export":
            command.add_argument("out", type=Path, help="file to write")
        command.add_argument(
            "run", nargs="+", help="the run's folder, or its config files; --section.key=value as elsewhere"
        )
    wanted, overrides = parser.parse_known_args(argv)
    act: dict[str, Callable[[], Iterable[str]]] = {
        "stats": lambda: stats(run),
        "tail": lambda: tail(run, wanted.n, wanted.follow),
        "show": lambda: show(run, wanted.item),
        "export": lambda: export(run, wanted.out),
    }
    try:
        run = StoredRun.at([*wanted.run, *overrides])
        for line in act[wanted.command]():
            print(line, flush=True)
    except KeyboardInterrupt:
        return 130
    except (LedgerError, KeysError, sqlite3.Error, OSError) as error:
        print(f"python -m buffer {wanted.command}: {error}", file=sys.stderr)
        return 2
    return 0


def stats(run: StoredRun) -> Iterable[str]:
    """The ledger in numbers; of a live run also who waits for what."""
    state = asyncio.run(_ask(run))
    if run.file is not None:
        yield from _filed(run)
    if state is None:
        yield f"live         no: nobody answers at {run.config.buffer.address}"
        return
    yield (
        f"live         yes, at {run.config.buffer.address}; {state.bytes_stored:,} bytes untrained, "
        f"{state.errors} messages refused"
    )
    if run.file is None:
        for name in ("counts", "dropped", "ages"):
            yield _line(name, getattr(state, name))
    for name, it in state.servers.items():
        figures = " ".join(f"{key} {value:g}" for key, value in it["stats"].items())
        held, silent_s = it["leases"], it["silent_s"]
        yield f"server       {name}: version {it['version']}, {held} leases, heard {silent_s} s ago {figures}"
    for waiter in state.waiters:
        yield f"waits        {waiter.who} for {waiter.kind}, {waiter.seconds:.1f} s: {waiter.why}"


def _filed(run: StoredRun) -> Iterable[str]:
    with closing(run.reading()) as db:
        formed, trained = db.execute(
            "SELECT COUNT(*), COALESCE(MAX(version) FILTER (WHERE trained), -1) FROM batches"
        ).fetchone()
        yield f"run          {run.config.run.name}: {formed} batches formed, last trained {trained}"
        yield _line("items", dict(db.execute("SELECT state, COUNT(*) FROM items GROUP BY state")))
        for reason, number in db.execute("SELECT reason, COUNT(*) FROM items WHERE state = 'dropped' GROUP BY reason"):
            yield f"dropped      {number}: {reason}"
        ages = "SELECT batch - version, COUNT(*) FROM items WHERE state IN ('batched', 'trained') GROUP BY 1 ORDER BY 1"
        yield _line("ages", dict(db.execute(ages)))
        held = "SELECT server, COUNT(*), MIN(leased_at) FROM items WHERE state = 'leased' GROUP BY server"
        for server, number, since in db.execute(held):
            yield f"leases       {number} at {server.partition('#')[0]}, the oldest for {time.time() - since:.0f} s"
        for what, which, groups, samples, tokens, sampled, cut in db.execute(
            "SELECT * FROM totals WHERE what <> 'age'"
        ):
            if samples:
                name = f"{what}: {which}" if which else what
                yield (
                    f"lengths      {name}: {groups} groups, {samples} samples, mean {tokens / samples:.1f} tokens, "
                    f"{sampled / samples:.1f} sampled, {100 * cut / samples:.1f} % cut at the limit"
                )


def _line(name: str, numbers: dict[Any, int]) -> str:
    return f"{name:<12} " + (", ".join(f"{key}: {number}" for key, number in numbers.items()) or "none")


async def _ask(run: StoredRun) -> State | None:
    address = run.config.buffer.address
    client = Connection(address, "stats", "observer", keys=client_keys_for(address, run.folder))
    try:
        async with asyncio.timeout(ANSWER_S), client:
            return await client.expect(Status(), State)
    except (TimeoutError, RefusedError):
        return None


def tail(run: StoredRun, number: int, follow: bool) -> Iterable[str]:
    """The groups that came in last, oldest of them first; with `follow` also those that come in, until interrupted."""
    query = """
        SELECT item, state, version, batch, server, tokens, samples, truncated, stored_at,
            (SELECT GROUP_CONCAT(ROUND(reward, 3), ' ') FROM samples s WHERE s.item = i.item)
        FROM items i WHERE stored_at IS NOT NULL AND stored_at >= ? ORDER BY stored_at DESC, item DESC LIMIT ?"""
    since, shown = 0.0, set[int]()
    with closing(run.reading()) as db:
        while True:
            rows = db.execute(query, [since, -1 if since else number]).fetchall()
            rows = [row for row in reversed(rows) if row[0] not in shown]
            yield from (_group(*row) for row in rows)
            if not follow:
                return
            if rows:  # of one commit come all with one time, or none
                since, shown = rows[-1][8], {item for item, *_, at, _ in rows if at == rows[-1][8]} | shown
            time.sleep(FOLLOW_S)  # for people's eyes: SQLite tells other processes of no change


def _group(item: int, state: str, version: int, batch: int, server: str, *facts: Any) -> str:
    tokens, samples, cut, stored_at, rewards = facts
    when = time.strftime("%H:%M:%S", time.localtime(stored_at))
    into = f" in batch {batch}" if batch >= 0 else ""
    return (
        f"{when} item {item} {state}{into}, dispatched at {version} to {server.partition('#')[0]}: "
        f"rewards {rewards or 'removed'}; mean {tokens / max(1, samples):.1f} tokens, {cut} cut"
    )


def show(run: StoredRun, item: int) -> Iterable[str]:
    """One item in full: problem, text, tokens, versions, log-probabilities, reward."""
    with closing(run.reading()) as db:
        db.row_factory = sqlite3.Row
        found = db.execute("SELECT * FROM items WHERE item = ?", [item]).fetchone()
        if found is None:
            (number,) = db.execute("SELECT COUNT(*) FROM items").fetchone()
            raise LedgerError(f"item {item}: not dispatched yet; the run has {number} items so far")
        names = [column[0] for column in db.execute("SELECT * FROM items LIMIT 0").description]
        yield from (f"{name:<12} {found[name]}" for name in names)
        problem = db.execute("SELECT problem FROM problems WHERE row = ?", [found["row"]]).fetchone()
        yield f"problem      {problem[0] if problem else 'not recorded'}"
        for idx, data in db.execute(SAMPLES, [item]).fetchall():
            yield ""
            yield from (
                _sample(idx, data) if data is not None else [f"sample {idx}     removed (buffer.keep: checkpoints)"]
            )


def _sample(index: int, data: bytes) -> Iterable[str]:
    sample = Sample.unpack(data)
    figures = " ".join(f"{name} {value:g}" for name, value in sample.metrics.items())
    yield f"sample {index}     reward {sample.reward:g}, {sample.finish}, {sample.tokens.shape[0]} tokens {figures}"
    yield from (f"    {line}" for line in sample.answer.splitlines())
    yield f"    {'position':>8} {'token':>8} {'version':>8} {'logprob':>10}"
    columns = (sample.tokens, sample.sampled, sample.versions, sample.behaviour_logprobs)
    for position, (token, sampled, version, logprob) in enumerate(zip(*(a.numpy() for a in columns), strict=True)):
        yield f"    {position:>8} {token:>8} " + (f"{version:>8} {logprob:>10.4f}" if sampled else "   given")


def export(run: StoredRun, out: Path) -> Iterable[str]:
    """Write all samples that are there to `out`, one row each (COLUMNS)."""
    query = """
        SELECT s.item, s.idx, i.row, epoch, state, reason, version, batch, server, problem,
            data_of(segment, position, s.bytes)
        FROM samples s JOIN items i ON s.item = i.item LEFT JOIN problems p ON i.row = p.row
        WHERE segment IS NOT NULL ORDER BY s.item, s.idx"""
    number, draft = 0, out.with_name(f".{out.name}.part")
    with closing(run.reading()) as db, pq.ParquetWriter(draft, COLUMNS) as writer:
        rows = db.execute(query)
        while found := rows.fetchmany(ROWS):
            some = [row for row in found if row[-1] is not None]  # else removed meanwhile
            number += len(some)
            writer.write_table(pa.Table.from_pylist([_row(*row) for row in some], COLUMNS))
    draft.replace(out)
    yield f"{out}: {number} samples"


def _row(*fields: Any) -> dict[str, Any]:
    sample = Sample.unpack(fields[-1])
    arrays = {name: getattr(sample, name).numpy() for name in Sample.DTYPES}
    facts = {
        "reward": sample.reward,
        "finish": sample.finish,
        "answer": sample.answer,
        "metrics": json.dumps(sample.metrics),
    }
    return dict(zip(COLUMNS.names, fields[:-1], strict=False)) | facts | arrays
