"""Shows what a run's buffer holds, live or dead: `python -m buffer tail|show|export|quarantine|problems`."""

import argparse
import json
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.text import Text

from buffer import problem_list, transcript
from buffer.dead_letters import quarantine
from buffer.ledger.types import LedgerError, server_name
from buffer.store.sqlite import reading
from buffer.wire.sample import Sample, num_turns
from configs import load
from configs.entrypoint import DONE, CommandParser, code_of
from configs.plain_text import output, print_visible, visible
from configs.schema import Config
from configs.variables import unwritable
from configs.writing import draft_of, removed_on_failure, writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_LINE = 1 << 20
COMMANDS = {
    "tail": "the groups that came in last",
    "show": "one item: its problem, and its samples as people read them",
    "export": "all samples that are kept, as a parquet file",
    "quarantine": "the groups that could not be trained, and why",
    "problems": "the problems with their solved shares, attempts and states",
}
FOLLOW_S = 1.0
ROWS = 256

SAMPLES = "SELECT idx, data_of(segment, position, bytes, crc32c) FROM samples WHERE item = ? ORDER BY idx"
COLUMNS = pa.schema(
    [
        ("item", pa.int64()), ("index", pa.int32()), ("row", pa.int64()), ("epoch", pa.int32()), ("state", pa.string()),
        ("reason", pa.string()), ("dispatched", pa.int64()), ("batch", pa.int64()), ("server", pa.string()),
        ("problem", pa.string()), ("reward", pa.float64()), ("finish", pa.string()), ("answer", pa.string()),
        ("tokens", pa.list_(pa.int32())), ("sampled", pa.list_(pa.uint8())),
        ("behaviour_logprobs", pa.list_(pa.float32())), ("versions", pa.list_(pa.int32())), ("metrics", pa.string()),
        ("images", pa.list_(pa.struct([("start", pa.int32()), ("digest", pa.string()), ("data", pa.binary())]))),
        ("starts", pa.list_(pa.int32())), ("turn_rewards", pa.list_(pa.float64())),
        ("teacher", pa.string()), ("teacher_logprobs", pa.list_(pa.float32())),
        ("teacher_top_ids", pa.list_(pa.list_(pa.int32()))), ("teacher_top_logprobs", pa.list_(pa.list_(pa.float32()))),
    ]
)  # fmt: skip

DIGITS = 18
"""SQLite's numbers end at 9.2e18."""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("python -m buffer")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("tail", help=COMMANDS["tail"])
    command.add_argument("-n", type=whole_number, default=10, help="how many groups (10)")
    command.add_argument("-f", "--follow", action="store_true", help="go on with those that come in")
    command = commands.add_parser("show", help=COMMANDS["show"])
    command.add_argument("item", type=whole_number, help="number of the item")
    command.add_argument("--sample", type=whole_number, help="only the sample with this number")
    command.add_argument("--full", action="store_true", help="long passages in full")
    command.add_argument("--tokens", action="store_true", help="each token with its version and log-probability")
    command = commands.add_parser("export", help=COMMANDS["export"])
    command.add_argument("out", type=Path, help="file to write")
    commands.add_parser("quarantine", help=COMMANDS["quarantine"])
    command = commands.add_parser("problems", help=COMMANDS["problems"])
    command.add_argument("--state", choices=problem_list.STATES, help="only those in this state")
    for command in commands.choices.values():
        command.add_argument(
            "run", nargs="+", help="the run's folder, or its config files; --section.key=value as elsewhere"
        )
    given, overrides = parser.parse_known_args(argv)
    console = Console(file=output(), highlight=False, soft_wrap=True)  # styles only on a terminal, without NO_COLOR
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `tail RUN | head` ends quietly
    act: dict[str, Callable[[sqlite3.Connection, Config], Iterable[str | Text]]] = {
        "tail": lambda db, config: tail(db, given.n, given.follow),
        "show": lambda db, config: show(
            db, given.item, tokenizer_of(config.model.path), given.sample, given.full, given.tokens
        ),
        "export": lambda db, config: export(db, given.out),
        "quarantine": lambda db, config: quarantine(db, tokenizer_of(config.model.path)),
        "problems": lambda db, config: problem_list.problems(db, given.state),
    }
    try:
        config, file = found([*given.run, *overrides])
        with closing(reading(file)) as db:
            for line in act[given.command](db, config):
                if isinstance(line, Text):
                    console.print(line)
                else:
                    print_visible(line, most=LONGEST_LINE)
    except KeyboardInterrupt:
        return 130
    except (LedgerError, sqlite3.Error, OSError) as error:
        print_visible(f"python -m buffer {given.command}: {error}", sys.stderr)
        return code_of(error)
    return DONE


def whole_number(text: str) -> int:
    """Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at most {DIGITS} digits")
    return int(text)


def found(words: Sequence[str]) -> tuple[Config, Path]:
    """Read the run file. Raises LedgerError if the ledger is in no file."""
    first = Path(words[0])
    argv = [str(first / "config.yaml"), *words[1:]] if first.is_dir() else words
    config = load.read(argv, "python -m buffer COMMAND", lenient=True)
    if config.buffer.path is None:
        raise LedgerError(
            "buffer.path is null: this run's ledger is in its process only; see `python -m actors status` while it runs"
        )
    return config, (first if first.is_dir() else config.run.path) / config.buffer.path


@cache
def tokenizer_of(model: str) -> "Tokenizer | None":
    from huggingface_hub import try_to_load_from_cache  # these import no torch, transformers does
    from huggingface_hub.errors import HFValidationError
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    with suppress(HFValidationError):  # no name on the hub
        cached = None if file.parent.is_dir() else try_to_load_from_cache(model, file.name)
        file = Path(cached) if isinstance(cached, str) else file
    if not file.exists():
        where = "" if file.is_absolute() else f" (from {Path.cwd()})"
        print_visible(
            f"no text of the tokens: {file}: no such file{where}; name its folder by --model.path", sys.stderr
        )
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises just this
        print_visible(f"no text of the tokens: {file}: {error}", sys.stderr)
        return None


def tail(db: sqlite3.Connection, number: int, follow: bool) -> Iterable[str]:
    """The oldest group first; with `follow` until interrupted."""
    query = """
        SELECT item, state, version, batch, server, tokens, samples, truncated, stored_at,
            (SELECT GROUP_CONCAT(ROUND(reward, 3), ' ') FROM samples s WHERE s.item = i.item)
        FROM items i WHERE stored_at IS NOT NULL AND stored_at >= ? ORDER BY stored_at DESC, item DESC LIMIT ?"""
    since, shown = 0.0, set[int]()
    while True:
        rows = db.execute(query, [since, -1 if since else number]).fetchall()
        rows = [row for row in reversed(rows) if row[0] not in shown]
        yield from (_group(*row) for row in rows)
        if not follow:
            return
        if rows:  # the groups of one commit have the same time
            since, shown = rows[-1][8], {item for item, *_, at, _ in rows if at == rows[-1][8]} | shown
        time.sleep(FOLLOW_S)  # SQLite does not notify other processes of a change


def _group(item: int, state: str, version: int, batch: int, server: str, *figures: Any) -> str:
    tokens, samples, cut, stored_at, rewards = figures
    when = time.strftime("%H:%M:%S", time.localtime(stored_at))
    into = f" in batch {batch}" if batch >= 0 else ""
    return (
        f"{when} item {item} {state}{into}, dispatched at {version} to {server_name(server)}: "
        f"rewards {rewards or 'removed'}; mean {tokens / max(1, samples):.1f} tokens, {cut} cut"
    )


def show(
    db: sqlite3.Connection,
    item: int,
    tokenizer: "Tokenizer | None" = None,
    only: int | None = None,
    full: bool = False,
    tokens: bool = False,
) -> Iterable[str | Text]:
    """`only`: one sample of the item."""
    rows = db.execute("SELECT * FROM items WHERE item = ?", [item])
    names = [column[0] for column in rows.description]
    found = rows.fetchone()
    if found is None:
        (number,) = db.execute("SELECT COUNT(*) FROM items").fetchone()
        raise LedgerError(f"item {item}: not dispatched yet; the run has {number} items so far")
    yield from (f"{name:<12} {value}" for name, value in zip(names, found, strict=True))
    problem = db.execute("SELECT problem FROM problems WHERE row = ?", [found[names.index("row")]]).fetchone()
    yield f"problem      {problem[0] if problem else 'not recorded'}"
    samples = dict(db.execute(SAMPLES, [item]).fetchall())
    if only is not None and only not in samples:
        raise LedgerError(f"--sample {only}: item {item} has the samples {', '.join(map(str, samples)) or 'of none'}")
    if not samples and found[names.index("state")] == "trained":
        yield "samples      removed with an older checkpoint; buffer.keep: all keeps those of later items"
    for idx in samples if only is None else [only]:
        yield ""
        data = samples[idx]
        if not data:
            why = (
                "removed (buffer.keep: checkpoints)"
                if data is None
                else "damaged on disk; see `python -m buffer scrub`"
            )
            yield f"sample {idx}     {why}"
            continue
        yield from _sample(idx, Sample.unpack(data), tokenizer, full, tokens)


def _sample(
    index: int, sample: Sample, tokenizer: "Tokenizer | None", full: bool, tokens: bool
) -> Iterable[str | Text]:
    turns, segments, size = num_turns(sample.sampled.numpy()), len(sample.starts), sample.tokens.shape[0]
    counted = f"{size} tokens in {turns} turn{'s' * (turns > 1)}"
    counted += f" and {segments} segments" if segments > 1 else ""
    figures = [f"{name} {value:g}" for name, value in sample.metrics.items()]
    known = ", ".join([f"reward {sample.reward:g}", sample.finish, counted, *figures])
    yield Text(f"sample {index}     {visible(known)}", "bold")
    for image, number in zip(sample.images, sample.row_images, strict=True):
        what = f"{len(image.data):,} bytes of its task" if number is None else f"image {number} of its row"
        yield f"    at token {image.start}: {what}, pixels {image.digest[:12]}"
    yield from transcript.lines(transcript.chapters(sample, tokenizer), full)
    if tokenizer is None:
        yield from (f"    {line}" for line in visible(sample.answer).splitlines())
    if tokens:
        yield from _table(sample, tokenizer)


def _table(sample: Sample, tokenizer: "Tokenizer | None") -> Iterable[str]:
    taught = sample.teacher_logprobs
    heads = ["position", "token", "version", "   logprob"] + ["   teacher"] * (taught is not None)
    yield "    " + " ".join(f"{head:>8}" for head in heads) + ("  text" if tokenizer else "")
    columns = (sample.tokens, sample.sampled, sample.versions, sample.behaviour_logprobs, taught or sample.sampled)
    for position, (token, sampled, version, logprob, score) in enumerate(
        zip(*(a.numpy() for a in columns), strict=True)
    ):
        own = "" if taught is None else f" {score:>10.4f}" if sampled else f" {'':>10}"
        figures = (f"{version:>8} {logprob:>10.4f}" if sampled else f"{'given':>8} {'':>10}") + own
        known = [token] if token >= 0 else []  # a group in quarantine may have others
        text = json.dumps(tokenizer.decode(known, skip_special_tokens=False), ensure_ascii=False) if tokenizer else ""
        yield f"    {position:>8} {token:>8} {figures}  {visible(text)}".rstrip()


def export(db: sqlite3.Connection, out: Path) -> Iterable[str]:
    """Write one row (COLUMNS) for each sample."""
    query = """
        SELECT s.item, s.idx, i.row, epoch, state, reason, version, batch, server, problem,
            data_of(segment, position, s.bytes, s.crc32c)
        FROM samples s JOIN items i ON s.item = i.item LEFT JOIN problems p ON i.row = p.row
        ORDER BY s.item, s.idx"""
    if why := unwritable(out):
        raise LedgerError(f"{out}: {why}")
    number, damaged, draft = 0, 0, draft_of(out)
    with writing(out), removed_on_failure(draft):
        with pq.ParquetWriter(draft, COLUMNS) as writer:
            rows = db.execute(query)
            while found := rows.fetchmany(ROWS):
                some = [row for row in found if row[-1]]  # else removed meanwhile, or damaged
                number += len(some)
                damaged += sum(row[-1] == b"" for row in found)
                writer.write_table(pa.Table.from_pylist([_row(*row) for row in some], COLUMNS))
        draft.replace(out)
    (generated,) = db.execute("SELECT COALESCE(SUM(samples), 0) FROM items").fetchone()
    left_out = f"; {damaged} are damaged and left out, see `python -m buffer scrub`" if damaged else ""
    if (removed := generated - number - damaged) > 0:
        left_out += f"; {removed} others were removed with older checkpoints, which buffer.keep: all would keep"
    yield f"{out}: {number} samples{left_out}"


def _row(*fields: Any) -> dict[str, Any]:
    sample = Sample.unpack(fields[-1])
    scalars = {"reward": sample.reward, "finish": sample.finish, "answer": sample.answer}
    arrays = {name: getattr(sample, name).numpy() for name in Sample.DTYPES}
    further: dict[str, Any] = {
        "metrics": json.dumps(sample.metrics),
        "images": [image.model_dump() for image in sample.images],
    }
    further |= {"starts": sample.starts, "turn_rewards": sample.turn_rewards}
    if sample.teacher_logprobs is not None:
        further |= {"teacher": sample.teacher_name, "teacher_logprobs": sample.teacher_logprobs.numpy()}
    if top := sample.teacher_top:
        further |= {"teacher_top_ids": list(top.ids.numpy()), "teacher_top_logprobs": list(top.logprobs.numpy())}
    return dict(zip(COLUMNS.names, fields[:-1], strict=False)) | scalars | arrays | further
