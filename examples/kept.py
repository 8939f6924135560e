"""How the scripts of the examples run, and the files that they keep because the same arguments made them before."""

import argparse
import json
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from configs.entrypoint import DONE, run_and_exit
from configs.plain_text import print_visible
from configs.writing import writing


def is_kept(record: Path, asked: dict[str, Any], *files: Path) -> bool:
    """Whether all `files` are there and `record`, a JSON file, says that they were made with the arguments `asked`."""
    return all(file.exists() for file in (record, *files)) and json.loads(record.read_text()) == asked


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
