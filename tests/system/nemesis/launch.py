"""`python -m tests.system.nemesis.launch OUTER`: launches a run under the nemesis as `python -m actors launch` does.

Guard, checks of the run's folder, keepers, supervisor, fleet and the buffer are the real ones. The first launch reads
`run.yaml`; once the run's folder has its `config.yaml`, a launch goes on with that.
"""

import os
import sys
from functools import partial
from pathlib import Path

from actors.__main__ import guarded
from actors.process import Process, Restarts, Role
from actors.supervise import accept
from actors.supervise.launch import keep, prepare
from actors.watch.display import Display
from buffer.ledger.types import LedgerError
from configs.entrypoint import BAD_INPUT
from configs.inner_command import inner_words
from configs.load import ConfigError, load
from tests.harness.toy import ROOT
from tests.system.chaos_faults import clocked
from tests.system.nemesis.run import SERVERS, NemesisRun

QUICK = Restarts(first_s=0.2, most_s=1.0, failures=8)


def process(run: NemesisRun, name: str, role: Role, *words: str) -> Process:
    """A process with a wall clock of its own."""
    env = clocked({"OMP_NUM_THREADS": "1"} | pythonpath(), run.clock(name))
    argv = (sys.executable, "-m", *words)
    return Process(name, role, argv, run.log(name), str(ROOT), env, drain_s=5.0, restarts=QUICK)


def pythonpath() -> dict[str, str]:
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}


def server(run: NemesisRun, number: int) -> Process:
    name = f"rollout-{number}"
    return process(run, name, "rollout", "tests.system.nemesis.server", str(run.outer), name)


def main(run: NemesisRun) -> int:
    """The exit code of the launch: 2 if the run's folder is refused."""
    try:
        config = load([str(run.file if run.file.exists() else run.first_file)])
        held = accept.hold(config)
        news, finished = accept.judge(config)
        assert finished is None, finished
        if held is None:
            run.path.mkdir()
            accept.hold(config)
    except (ConfigError, LedgerError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    processes = [
        process(run, "buffer", "buffer", "buffer", str(run.file)),
        process(run, "learner", "learner", "tests.system.nemesis.learner", str(run.outer)),
        *(server(run, number) for number in range(len(SERVERS))),
    ]
    display = Display(config)
    for line in news:
        display.say(line)
    return keep(processes, display, partial(prepare, config), partial(server, run), len(SERVERS))


if __name__ == "__main__":
    inner_words("OUTER", optional=("inner",))
    outer = Path(sys.argv[1])
    inner = [sys.executable, "-m", "tests.system.nemesis.launch", str(outer), "inner"]
    sys.exit(main(NemesisRun(outer)) if sys.argv[2:] else guarded(inner))
