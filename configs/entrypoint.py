"""The outermost frame that all processes share: log format, command-line flags, signals, exit codes.

Used by `python -m actors`, `buffer`, `configs`, `learner` and `rollout`. Exit codes: 0 done or drained, 1 failed (the
log says why), 2 input refused before anything was started, 3 the data ended before `run.versions`, 4 the learner of a
run that was given up (`launch`: 1), 128 + N ended at once by the second signal, number N.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

DONE, FAILED, BAD_INPUT, DATA_ENDED, GIVEN_UP = 0, 1, 2, 3, 4
ENDINGS = {"versions": DONE, "data": DATA_ENDED, "failed": GIVEN_UP}
"""Exit code of the learner by how its run ended: with any of these it is not started again."""
STOPPING = (signal.SIGINT, signal.SIGTERM)


def configure_logging(tag: str = "") -> None:
    """One line per record on stderr: time, level, logger and `tag`, such as `[3]` for rank 3. INFO and above."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)  # torch's checkpoint logger lets DEBUG through, whatever the root logger says
    line = f"%(asctime)s %(levelname)s %(name)s{tag}: %(message)s"
    logging.basicConfig(format=line, level=logging.INFO, handlers=[handler])


def split_flags(argv: Sequence[str], prog: str, **flags: dict[str, Any]) -> tuple[argparse.Namespace, list[str]]:
    """The values of the command's own `flags`, and the rest of the command line: run files and their overrides.

    Example: `split_flags(argv, prog, models={"nargs": "+", "type": Path, "default": []})` takes `--models A B`; the
    keywords are those of `ArgumentParser.add_argument`. A flag without its value ends the process with exit code 2.
    """
    parser = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False)
    own = {f"--{name.replace('_', '-')}": options for name, options in flags.items()}
    for flag, options in own.items():
        parser.add_argument(flag, **options)
    # argparse takes an unknown --key=value for a value if there is a space in it: spaces are NUL meanwhile
    foreign = {word: word.replace(" ", "\0") for word in argv if word[:2] == "--" and word.partition("=")[0] not in own}
    values, rest = parser.parse_known_args([foreign.get(word, word) for word in argv])
    return values, [word.replace("\0", " ") for word in rest]


class StopSignals:
    """SIGINT and SIGTERM inside a `with`: the first calls `drain(number)`, each later one `force(number)`.

    Handlers run in the event loop if one is running, else in the main thread between two bytecodes, where they must not
    print. `force` ends the process at once unless another one is given.
    """

    def __init__(self, drain: Callable[[int], object], force: Callable[[int], object] | None = None) -> None:
        self.drain, self.force = drain, force or end_at_once
        self.count = 0
        """Signals received."""

    def __enter__(self) -> "StopSignals":
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        if self._loop:
            for number in STOPPING:
                self._loop.add_signal_handler(number, self._on_signal, number)
        else:
            self._before = {number: signal.signal(number, self._on_signal) for number in STOPPING}
        return self

    def __exit__(self, *error: object) -> None:
        for number in STOPPING:
            if self._loop:
                self._loop.remove_signal_handler(number)
            else:
                signal.signal(number, self._before[number])

    def _on_signal(self, number: int, frame: object = None) -> None:
        self.count += 1
        (self.drain if self.count == 1 else self.force)(number)


def end_at_once(number: int) -> NoReturn:
    """End the process without cleaning up: threads, collectives and engines may never end by themselves."""
    os._exit(128 + number)


def run_and_exit(main: Callable[[Sequence[str]], int], log: logging.Logger) -> NoReturn:
    """Call `main(sys.argv[1:])` and end the process with its exit code, whatever threads still run.

    The outermost boundary of a process: an exception of `main` is logged with its traceback and becomes exit code 1.
    """
    try:
        code = main(sys.argv[1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else FAILED if error.code else DONE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception:
        log.critical("failed", exc_info=True)
        code = FAILED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
