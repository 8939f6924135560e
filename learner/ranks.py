"""The learner's ranks on this machine: starts `python -m learner` for each, passes signals on, ends all if one fails.

torch elastic supervises the processes and restarts none: a restart is the decision of the keeper (or yours) and begins
from the last checkpoint. Waits for the ranks. Run by `__main__.py` if `learner.ranks` is above 1 and torchrun has not
started the ranks.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from configs.entrypoint import DONE, ENDINGS, StopSignals

HOST = "127.0.0.1"


def start(argv: Sequence[str], ranks: int) -> int:
    """Run `ranks` ranks to their end; returns the exit code of the first that failed, else 0."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks meet in this store: nobody can take the port before they bind
    }
    context = start_processes(
        "learner",
        sys.executable,
        args={rank: ("-m", "learner", *argv) for rank in range(ranks)},
        envs={rank: shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
        logs_specs=DefaultLogsSpecs(),
    )

    def pass_on(number: int) -> None:
        for process in context.pids().values():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    # elastic's own handlers would give the ranks 30 s, however long a version takes
    with StopSignals(drain=pass_on, force=pass_on):
        result = context.wait(period=0.2)
    assert result is not None, "waited without timeout"
    if not result.failures:
        return DONE
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    if first.exitcode in ENDINGS.values():  # rank 0 has said why the run ended
        return first.exitcode
    ended = f"rank {first.local_rank} failed first (exit code {first.exitcode}); all ranks have ended"
    print(f"learner: {ended}", file=sys.stderr)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
