"""`python -m tests.system.scaled FOLDER`: launches a run of the chaos test's processes, as `actors launch` does.

Guard, keepers, supervisor, fleet and the buffer are the real ones; servers and learner run their real loops around
stand-ins (`chaos_rollout.py`, `chaos_learner.py`, on several nodes `scaled_learner.py`). On a cluster the learner's
ranks and each server take a GPU of its nodes. No process NAME starts while `Run.gate(NAME)` exists. Ends with the run,
or drains at a signal.
"""

import sys
from functools import partial
from pathlib import Path

from actors.__main__ import guarded
from actors.process import Process, Restarts, Role
from actors.supervise import accept
from actors.supervise.launch import REPORT_S, keep, prepare
from actors.watch.display import Display
from configs.inner_command import inner_words
from tests.harness.toy import ROOT
from tests.system.chaos_run import Run

QUICK = Restarts(first_s=0.2, most_s=1.0)


GATE = 'while [ -e "$0" ]; do sleep 0.1; done; exec "$@"'


def process(run: Run, name: str, role: Role, *words: str, gpus: int = 0, nodes: int = 1) -> Process:
    config = run.config()
    argv = ("/bin/sh", "-c", GATE, str(run.gate(name)), sys.executable, "-m", *words)
    gpus, drain_s = gpus if config.cluster.address else 0, config.rollout.drain_s + REPORT_S
    return Process(name, role, argv, run.log(name), str(ROOT), {}, gpus, nodes, drain_s, QUICK)


def server(run: Run, number: int) -> Process:
    name = f"rollout-{number}"
    return process(run, name, "rollout", "tests.system.chaos_rollout", str(run.folder), name, gpus=1)


def main(run: Run) -> int:
    """The exit code of `launch`."""
    config = run.config()
    started, wanted = accept.servers(config)
    ranks, nodes = config.learner.ranks, config.learner.nodes
    learner = f"tests.system.{'scaled' if nodes > 1 else 'chaos'}_learner"
    processes = [
        process(run, "buffer", "buffer", "buffer", str(run.file)),
        process(run, "learner", "learner", learner, str(run.folder), gpus=ranks, nodes=nodes),
        *(server(run, number) for number in range(started)),
    ]
    return keep(processes, Display(config), partial(prepare, config), partial(server, run), wanted)


if __name__ == "__main__":
    inner_words("RUN", optional=("inner",))
    folder = Path(sys.argv[1])
    inner = [sys.executable, "-m", "tests.system.scaled", str(folder), "inner"]
    sys.exit(main(Run(folder)) if sys.argv[2:] else guarded(inner))
