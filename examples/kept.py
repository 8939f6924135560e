"""How the scripts of the examples run, and the files that they keep because the same arguments made them before."""

import argparse
import json
import logging
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from configs.entrypoint import DONE, run_and_exit
from configs.plain_text import print_visible
from configs.writing import draft_of, removed_on_failure, write_text, writing


def is_kept(record: Path, asked: dict[str, Any], *files: Path) -> bool:
    """Whether all `files` are there and `record`, a JSON file, says that they were made with the arguments `asked`."""
    return all(file.exists() for file in (record, *files)) and json.loads(record.read_text()) == asked


def record_made(record: Path, asked: dict[str, Any]) -> None:
    """Note the arguments `asked`, once all files are there. Raises WriteError."""
    write_text(record, json.dumps(asked) + "\n")


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write `rows` as parquet, whole or not at all. Raises WriteError."""
    draft = draft_of(file)
    with writing(file), removed_on_failure(draft):
        pq.write_table(pa.Table.from_pylist([*rows]), draft)
        draft.replace(file)


def copy_whole(old: str, new: str) -> None:
    """Copy a file, whole or not at all: for `shutil.copytree`, which gathers OSErrors by their text."""
    draft = draft_of(Path(new))
    with removed_on_failure(draft):
        shutil.copy2(old, draft)
        draft.replace(new)


def run_script(
    parse: Callable[[Sequence[str]], argparse.Namespace], write: Callable[[argparse.Namespace], str]
) -> NoReturn:
    """Run `write(parse(words))` as this process and print the line that it returns. `--out` names what it writes.

    Ctrl-C ends the process at once, without a traceback: files that are kept are written last. A place that cannot be
    written, or is full, ends it with one line and exit code 1.
    """

    def main(words: Sequence[str]) -> int:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        args = parse(words)
        with writing(args.out):
            line = write(args)
        print_visible(line)
        return DONE

    run_and_exit(main, logging.getLogger("examples"))
