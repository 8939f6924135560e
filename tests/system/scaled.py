"""`python -m tests.system.scaled FOLDER`: launches a run of the chaos test's processes, as `actors launch` does.

Guard, Ray, keepers, supervisor, fleet and the buffer are the real ones; servers and learner run their real loops around
stand-ins (`chaos_rollout.py`, `chaos_learner.py`). Ends with the run, or drains at a signal.
"""

import sys
from pathlib import Path

from actors.__main__ import guarded
from actors.process import Process, Restarts, Role
from actors.supervise import accept
from actors.supervise.launch import REPORT_S, keep
from actors.watch.display import Display
from tests.harness.toy import ROOT
from tests.system.chaos_run import Run

QUICK = Restarts(first_s=0.2, most_s=1.0)


def process(run: Run, name: str, role: Role, *words: str) -> Process:
    argv = (sys.executable, "-m", *words)
    drain_s = run.config().rollout.drain_s + REPORT_S
    return Process(name, role, argv, run.log(name), str(ROOT), drain_s=drain_s, restarts=QUICK)


def server(run: Run, number: int) -> Process:
    name = f"rollout-{number}"
    return process(run, name, "rollout", "tests.system.chaos_rollout", str(run.folder), name)


def main(run: Run) -> int:
    """The exit code of `launch`."""
    config = run.config()
    started, wanted = accept.servers(config)
    processes = [
        process(run, "buffer", "buffer", "buffer", str(run.file)),
        process(run, "learner", "learner", "tests.system.chaos_learner", str(run.folder)),
        *(server(run, number) for number in range(started)),
    ]
    return keep(processes, Display(config), server=lambda number: server(run, number), servers=wanted)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    inner = [sys.executable, "-m", "tests.system.scaled", str(folder), "inner"]
    sys.exit(main(Run(folder)) if sys.argv[2:] else guarded(inner))
