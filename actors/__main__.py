"""`python -m actors launch|watch|status|scale|report|doctor|certify ...`: everything around a run.

The launcher runs under a guard, and this process only forwards signals: no process of the run outlives either.
"""

import difflib
import errno
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from actors.supervise.guard import Guarded
from configs.entrypoint import ABOVE, BAD_INPUT, DONE, FORCING, StopSignals, run_and_exit, split_flags
from configs.own_packages import command
from configs.plain_text import print_visible

COMMANDS = {
    "launch": ("actors.supervise.launch", "start all processes of a run, keep them, and report at its end"),
    "watch": ("actors.live.serve", "a live page of a run in the browser, or the same on the terminal"),
    "status": ("actors.watch.status", "who waits for whom in a run, and for how long; what became of its problems"),
    "scale": ("actors.scaling.command", "more or fewer rollout servers while a run goes on"),
    "report": ("actors.report.summary", "rewards, samples and settings of a run, as text and as a page"),
    "doctor": ("actors.doctor.findings", "check this machine's installation"),
    "certify": ("actors.certify.command", "prove that a model is trained and served exactly"),
}
"""A module is imported when called: launching needs no page, status no keepers."""
PRINTING = ("status", "report", "doctor")
"""Others write to sockets: they must outlive a peer that leaves."""


def main(argv: Sequence[str]) -> int:
    """Run a subcommand; its exit code."""
    if argv and argv[0] not in (*COMMANDS, "-h", "--help"):
        close = difflib.get_close_matches(argv[0], COMMANDS, 1)
        remedy = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        print_visible(f"python -m actors: {argv[0]}: no such command; {remedy}", sys.stderr)
        return BAD_INPUT
    if not argv or argv[0] not in COMMANDS:
        is_help = bool(argv)
        commands = [f"  {name:<8} {what}" for name, (_, what) in COMMANDS.items()]
        usage = [
            "usage: python -m actors COMMAND ...",
            *commands,
            "`python -m configs --keys` lists every key of a run file",
        ]
        print_visible("\n".join(usage), sys.stdout if is_help else sys.stderr)
        return DONE if is_help else BAD_INPUT
    name = argv[0]
    flags, rest = split_flags(argv[1:], "python -m actors", under_guard={"action": "store_true"})
    if name == "launch" and not flags.under_guard:
        return guarded(command("actors", "launch", "--under-guard", *rest))
    if name in PRINTING or {"-h", "--help"} & {*rest}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `status RUN | head` ends quietly
    try:
        code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    except BrokenPipeError:  # of the terminal: sockets handle their own
        return 128 + signal.SIGPIPE
    except OSError as error:  # PermissionError, or WriteError for the same reason
        if name not in PRINTING or error.filename is None or error.errno not in (errno.EACCES, errno.EPERM):
            raise
        remedy = "run this as the user who started the run, or change the file's mode"
        print_visible(f"python -m actors {name}: {error.filename}: {error.strerror}; {remedy}", sys.stderr)
        return BAD_INPUT
    return code


def guarded(argv: Sequence[str]) -> int:
    """Run `argv` under a guard; the exit code.

    Forwards the first SIGINT or SIGTERM, and FORCING for each later one. SIGHUP is one SIGTERM, however often it comes.
    """
    launcher = Guarded("launcher", argv, env=os.environ | {ABOVE: str(os.getpid())})
    hung_up = threading.Event()
    with StopSignals(drain=launcher.signal, force=lambda number: launcher.signal(FORCING)) as signals:

        def hang_up(number: int, frame: object) -> None:
            if not (signals.count or hung_up.is_set()):
                hung_up.set()
                launcher.signal(signal.SIGTERM)

        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, hang_up)
        code = launcher.wait()
    return 128 + signal.SIGHUP if hung_up.is_set() and code == 128 + signal.SIGTERM else code


if __name__ == "__main__":
    run_and_exit(main, logging.getLogger("actors"))
