"""`python -m actors launch|status|report|doctor ...`: start a whole run, ask how it is, sum it up, check the machine.

The launcher runs under a guard (`actors/supervise/guard.py`) and this process only passes signals on to it: so neither Ray nor
any process of the run is left when either of them dies. Waits for the subcommand.
"""

import contextlib
import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from actors.supervise.guard import Guarded

COMMANDS = {
    "launch": "start all processes of a run, keep them, and report at its end",
    "status": "who waits for whom in a run, and for how long",
    "report": "curves, samples and settings of a run, as text, PNG and HTML",
    "doctor": "check this machine's installation",
}
MODULES = {
    "launch": "actors.supervise.launch",
    "status": "actors.watch.status",
    "report": "actors.report.summary",
    "doctor": "actors.doctor.findings",
}
INNER = "--under-guard"
"""Said by `guarded` to the launcher proper."""


def main(argv: Sequence[str]) -> int:
    """Run a subcommand; its exit code."""
    if not argv or argv[0] not in COMMANDS:
        asked = bool(argv) and argv[0] in ("-h", "--help")
        print(usage(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    name, *rest = argv
    if name == "launch" and rest[:1] != [INNER]:
        return guarded([sys.executable, "-m", "actors", "launch", INNER, *rest])
    module = importlib.import_module(MODULES[name])  # only the one: launching needs no matplotlib, status no Ray
    code: int = module.main([word for word in rest if word != INNER])
    return code


def usage() -> str:
    """All subcommands."""
    lines = [f"  {name:<8} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m actors COMMAND ...", *lines, "`python -m actors launch --help` lists every key"]
    )


def guarded(argv: Sequence[str]) -> int:
    """Run `argv` under a guard and pass SIGINT and SIGTERM on to it; its exit code."""
    command: Guarded | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if command is not None:
            command.signal(number)
        else:
            early.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    command = Guarded("launcher", argv)
    for missed in early:
        command.signal(missed)
    return command.wait()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
