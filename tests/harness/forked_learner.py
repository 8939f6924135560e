"""`python -m learner` in a process that is forked with everything imported, so that it starts in milliseconds.

From its command line to its exit code it behaves like a learner's process. The long tests start real processes with
`python -m learner` and `learner.ranks`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from configs.entrypoint import run_and_exit
from learner import __main__ as learner
from learner.ranks import THERE_IS_A_STORE
from tests.harness.world import FORKS


class ForkedLearner:
    """A process that runs `learner.__main__.main`; `environment` is added to this process's."""

    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self.process: Any = FORKS.Process(target=run, args=([*argv], dict(environment), log))
        self.process.start()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ended(self) -> tuple[int, str]:
        """Wait for its end; returns its exit code and stderr."""
        self.process.join(240)
        assert self.process.exitcode is not None, f"does not end: {self.log.read_text()}"
        return self.process.exitcode, self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def ranks_meeting_in(store: TCPStore, ranks: int) -> list[dict[str, str]]:
    """The environment of each rank, as `learner.ranks` or torchrun sets it."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(store.port), THERE_IS_A_STORE: "True"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run(argv: list[str], environment: dict[str, str], log: Path) -> None:
    """The forked process. Its stderr goes to the file `log`."""
    os.environ.update(environment)
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = ["learner", *argv]
    run_and_exit(learner.main, learner.log, is_rank=True)
