"""The learner's ranks on this machine: starts `python -m learner` for each, passes signals on, ends all if one fails.

torch elastic keeps the processes; it restarts none, for a restart is the keeper's (or your) decision and begins from
the last checkpoint. Waits for the ranks. Run by `learner/__main__.py` when `learner.ranks` is above 1 and no torchrun
has done the same.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

HOST = "127.0.0.1"
PARENT = "HEADRACE_PARENT"
"""In a rank's environment: the process whose death it must not survive."""
PR_SET_PDEATHSIG = 1


def start(argv: Sequence[str], ranks: int) -> int:
    """Run `ranks` ranks to their end; the exit code of the first that failed, else 0."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks meet in our store: no port to be lost between two binds
        PARENT: str(os.getpid()),
    }
    context = start_processes(
        "learner",
        sys.executable,
        args={rank: ("-m", "learner", *argv) for rank in range(ranks)},
        envs={rank: shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
        logs_specs=DefaultLogsSpecs(),
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in context.pids().values():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)  # over elastic's own, which gives the ranks 30 s however long a version takes
    result = context.wait(period=0.2)
    assert result is not None, "waited without limit"
    if not result.failures:
        return 0
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    print(
        f"learner: rank {first.local_rank} failed first (exit code {first.exitcode}); all ranks have ended",
        file=sys.stderr,
    )
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


def die_with_parent() -> None:
    """Have the kernel kill this rank when the process that started it dies, by whatever cause."""
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        os._exit(1)
