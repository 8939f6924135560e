"""The outermost frame of all processes: log format, flags, signals, children, exit codes.

Exit codes: 0 done or drained, 1 failed, also for a full disk, 2 input refused before anything was started, 3 the data
ended before `run.versions`, 4 the learner of a run that was given up, whose last checkpoint could not be written, or
whose steps changed nothing any more (`launch`: 1), 128 + N ended at once by the second signal, number N.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from multiprocessing import resource_tracker, spawn
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from configs import variables
from configs.log_floods import FloodFilter
from configs.own_packages import PIN
from configs.parent_death import end_with_parent
from configs.plain_text import PlainFormatter, lost_output, print_visible
from configs.writing import FULL, WriteError, full_disk

T = TypeVar("T")
DONE, FAILED, BAD_INPUT, DATA_ENDED, GIVEN_UP = 0, 1, 2, 3, 4
ENDINGS = {"versions": DONE, "data": DATA_ENDED, "failed": GIVEN_UP}
"""With these endings the learner is not started again."""
PROCESS_NAME = re.compile(r"[A-Za-z0-9._-]+")
STOPPING = (signal.SIGINT, signal.SIGTERM)
PARENT = "HEADRACE_PARENT"
"""Id of the process that started this one and that it must not survive."""
PROGRESS = "HEADRACE_PROGRESS"
"""A kept process makes this file at its first progress."""
NOTICE = "HEADRACE_NOTICE"
"""In this file its keeper says how many seconds a drain may take."""
ABOVE = "HEADRACE_ABOVE"
"""Set if a process above sends the signals, and forces with FORCING: a launcher's front process, a kept process's
keeper, the learner above a rank."""
FORCING = signal.SIGQUIT
TIE = f"{PIN}; from {__name__} import die_with_parent, tie_children; die_with_parent(); tie_children()"


def configure_logging(tag: str = "") -> None:
    """Log to stderr from INFO on; `tag` is such as `[3]`."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)  # torch's checkpoint logger lets DEBUG through, whatever the root logger says
    handler.setFormatter(PlainFormatter(f"%(asctime)s %(levelname)s %(name)s{tag}: %(message)s"))
    # huggingface_hub names a logger by its file and writes there where it has saved something
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or "/" not in record.name)
    handler.addFilter(FloodFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class CommandParser(argparse.ArgumentParser):
    """A parser without abbreviated flags."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        print_visible(f"{self.prog}: {message}; `{self.prog} --help` says more", sys.stderr)
        sys.exit(BAD_INPUT)

    def print_help(self, file: Any = None) -> None:
        print_visible(self.format_help(), file, end="")


def code_of(error: BaseException | None) -> int:
    """The exit code of a command that `error` ended: BAD_INPUT, or FAILED for a full disk, also as the reason of
    another error. The same input may pass once there is room."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return FAILED
        error = error.__cause__ or error.__context__
    return BAD_INPUT


def process_name(text: str) -> str:
    """Check `--name`, which stands in names of files."""
    if not PROCESS_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not letters, digits, '.', '_' and '-'")
    return text


def quiet_hub() -> None:
    """This command's own line has the last thing that the hub's client logs."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # read when the client is imported
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def split_flags(argv: Sequence[str], prog: str, **flags: dict[str, Any]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command's own `flags` from the rest: `models={"nargs": "+"}` takes `--models A B`."""
    parser = CommandParser(prog, add_help=False)
    own = {f"--{name.replace('_', '-')}": options for name, options in flags.items()}
    for flag, options in own.items():
        parser.add_argument(flag, **options)
    # argparse takes an unknown --key=value with a space for a value: spaces are NUL meanwhile
    foreign = {word: word.replace(" ", "\0") for word in argv if word[:2] == "--" and word.partition("=")[0] not in own}
    values, rest = parser.parse_known_args([foreign.get(word, word) for word in argv])
    return values, [word.replace("\0", " ") for word in rest]


class StopSignals:
    """The first SIGINT or SIGTERM inside a `with` calls `drain(number)`, each later one `force(number)`.

    Handlers run in the event loop if one is running, else between two bytecodes, where they must not print. A
    scheduler's SIGTERM reaches a process below another one twice, directly and forwarded: both count as one. With
    `last` the process waits for its keeper's notice, because others need it to the end.
    """

    def __init__(
        self,
        drain: Callable[[int], object],
        force: Callable[[int], object] | None = None,
        last: bool = False,
        given: Mapping[str, str] = os.environ,
    ) -> None:
        self.drain, self.force = drain, force or end_at_once
        self.has_above = bool(given.keys() & {ABOVE, variables.TORCHRUN})
        self._notice = Path(given[NOTICE]) if last and NOTICE in given else None
        self._numbers = (*STOPPING, FORCING) if self.has_above else STOPPING
        self.count = 0

    def __enter__(self) -> "StopSignals":
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        if self._loop:
            for number in self._numbers:
                self._loop.add_signal_handler(number, self._on_signal, number)
        else:
            self._before = {number: signal.signal(number, self._on_signal) for number in self._numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._numbers:
            if self._loop:
                self._loop.remove_signal_handler(number)
            else:
                signal.signal(number, self._before[number])

    def _on_signal(self, number: int, frame: object = None) -> None:
        if number == FORCING:
            self.count = max(self.count, 1)
        elif (self.has_above and self.count) or (self._notice and not self._notice.exists()):
            return
        self.count += 1
        (self.drain if self.count == 1 else self.force)(number)


@contextlib.contextmanager
def blocked(*numbers: int) -> Iterator[None]:
    """Block signals in this thread, and for life in each process that it starts inside."""
    resource_tracker.ensure_running()  # multiprocessing would start it later, and then unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def unless(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Await `work`; None once `stop` is set, which cancels it."""
    task, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when="FIRST_COMPLETED")
        return task.result() if task.done() else None
    finally:
        stopping.cancel()
        task.cancel()
        await asyncio.wait({task, stopping})


def end_at_once(number: int) -> NoReturn:
    """End without waiting: threads, collectives and engines may never end by themselves."""
    os._exit(128 + number)


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends, if its process has set
    PARENT."""
    parent, os.environ[PARENT] = os.environ.get(PARENT), str(os.getpid())
    if parent is None or sys.platform != "linux":
        return
    end_with_parent()
    if (now := os.getppid()) != int(parent):  # it ended before, or never was our parent
        words = f"{PARENT}: {parent} has ended or is not the parent of {os.getpid()}, {now} is; unset it\n"
        os.write(2, words.encode())
        os._exit(FAILED)


def tie_children() -> None:
    """Have each process that multiprocessing starts below this one, vLLM's too, die with its parent.

    A spawned process gets the call in its command line: when it imports Headrace, its parent may be long dead.
    """
    os.environ[PARENT] = str(os.getpid())
    os.register_at_fork(after_in_child=die_with_parent)
    untied = spawn.get_command_line

    def tied(**options: Any) -> list[str]:
        line = untied(**options)
        code = line.index("-c") + 1
        line[code] = f"{TIE}; {line[code]}"
        return line

    spawn.get_command_line = tied


def tied_line(code: str) -> list[str]:
    """A command line whose process runs `code` and dies with this one."""
    flags = _args_from_interpreter_flags()
    return [sys.executable, *flags, "-c", f"{TIE}; {code}", "--multiprocessing-fork"]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Turn the garbage collector off: it would walk what was imported before, a quarter of the time of vLLM's
    imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def made_progress() -> None:
    """The keeper then counts the next failure as a first one."""
    if file := os.environ.get(PROGRESS):
        with contextlib.suppress(OSError):
            Path(file).touch()


def notice_s() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        return float(Path(os.environ.get(NOTICE, "")).read_text(encoding="utf-8"))
    return None


def _log_thread(log: logging.Logger, failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        log.error("thread %s failed", failed.thread and failed.thread.name, exc_info=failed.exc_value)


def run_and_exit(main: Callable[[Sequence[str]], int], log: logging.Logger, is_rank: bool = False) -> NoReturn:
    """End with the exit code of `main(sys.argv[1:])`, whatever threads still run."""
    variables.prepare(is_rank)
    threading.excepthook = partial(_log_thread, log)
    try:
        code = main(sys.argv[1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else FAILED if error.code else DONE
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        if failed := error if isinstance(error, WriteError) else full_disk(error):
            print_visible(f"{log.name}: {failed}", sys.stderr)
        else:
            log.critical("failed", exc_info=True)
        code = FAILED
    lost = lost_output()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # nobody reads it any more
            pass
        except OSError as error:  # its disk is full
            lost = lost or error
    if lost:
        code = code or FAILED
        with contextlib.suppress(OSError):
            os.write(2, f"the output is incomplete: {lost.strerror}\n".encode())
    os._exit(code)
