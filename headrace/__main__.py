"""`headrace COMMAND ...`: every command of Headrace, from any folder, also one with packages `configs`, `actors` or
`buffer` of its own.

The installed script starts this file again with `python -P`. It runs by path, so it imports only the standard library.
"""

import difflib
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

ENTRY = Path(__file__).absolute()
PACKAGES = {
    "actors": "start, keep and watch runs: the commands above",
    "buffer": "the buffer of a run: buffer RUN.yaml",
    "configs": "explain a run and check its run file: configs RUN.yaml; configs --keys lists every key",
    "learner": "the learner of a run: learner RUN.yaml",
    "rollout": "a rollout server of a run: rollout RUN.yaml --name rollout-0",
}
COMMANDS = {
    "launch": ("actors", "start all processes of a run, keep them, and report at its end"),
    "watch": ("actors", "a live page of a run in the browser, or the same on the terminal"),
    "status": ("actors", "who waits for whom in a run, and for how long"),
    "scale": ("actors", "more or fewer rollout servers while a run goes on"),
    "report": ("actors", "rewards, samples and settings of a run, as text and as a page"),
    "certify": ("actors", "prove on this machine that a model is trained exactly"),
    "doctor": ("actors", "check this machine's installation, and a run file on it"),
    "evaluate": ("rollout", "evaluate checkpoints on test sets"),
    "tail": ("buffer", "the groups that came in last"),
    "show": ("buffer", "one item: its problem, and its samples as people read them"),
    "export": ("buffer", "all samples as a parquet file"),
    "problems": ("buffer", "the problems that were drawn, and how often each was solved"),
    "quarantine": ("buffer", "the groups that could not be trained, and why"),
    "scrub": ("buffer", "read all that a run keeps, and compare it with its checksums"),
    "merge": ("learner", "whole weights of a checkpoint with an adapter"),
    "sft": ("learner", "supervised fine-tuning on demonstrations, without servers"),
}
"""The package of each. Packages are commands too."""


def main() -> NoReturn:
    """Python must not search the current folder."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", str(ENTRY), *sys.argv[1:]])


def module_of(argv: Sequence[str]) -> tuple[str, list[str]] | None:
    name = argv[0]
    if name in COMMANDS:
        return COMMANDS[name][0], list(argv)
    known = name in PACKAGES or ("." in name and name.partition(".")[0] in PACKAGES)
    return (name, list(argv[1:])) if known else None


def usage() -> str:
    lines = {name: what for name, (_, what) in COMMANDS.items()} | PACKAGES
    return "\n".join(["usage: headrace COMMAND ...", *(f"  {name:<10} {what}" for name, what in lines.items())])


def run(argv: Sequence[str]) -> int:
    """Return the exit code, unless the command ends the process."""
    if not argv or argv[0] in ("-h", "--help"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `headrace --help | head` ends quietly
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"headrace {version('headrace')}")
        return 0
    if (found := module_of(argv)) is None:
        close = difflib.get_close_matches(argv[0], [*COMMANDS, *PACKAGES], 1)
        remedy = f"did you mean {close[0]}?" if close else "`headrace --help` lists them"
        print(f"headrace: {argv[0]!r}: no such command; {remedy}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ENTRY.parents[1]))
    for package in PACKAGES:
        import_module(package)
    del sys.path[0]
    module, sys.argv[1:] = found
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    if not sys.flags.safe_path:
        main()
    sys.exit(run(sys.argv[1:]))
