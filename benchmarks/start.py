"""Where the seconds of a start go: from the launch to the first version, and from a server's restart to its tokens.

`python -m benchmarks.start` needs two GPUs, one serves and one learns; the model has the shape of Qwen2.5-1.5B and
random weights. The run file says nothing about speed. Buffer, server and learner start at the same moment, three times:
`cold` finds empty compile caches, `warm` those of the run before, or of the command before if it names `warm` alone;
`restart` is a server of the warm run that is killed and started again while the learner goes on. Each row is a landmark
in the log of a process: seconds after its start. Prints one table and writes JSON.
"""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.runs.processes import Processes
from benchmarks.runs.trained import trained_run, versions_of
from benchmarks.weights.table import ResultRow, progress, write

STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")
LANDMARKS = {
    "learner": {
        "imports done, run file read": "",
        "the model is certified": "comparisons of",
        "weights are loaded": "parameters on",
        "connected to the buffer": "waiting for the buffer",
        "compiled, memory tried": "full microbatches",
    },
    "rollout": {
        "imports done, rows read": "waits for the buffer",
        "vLLM starts": "starts vLLM",
        "vLLM runs": "weights: the learner is at",
        "samples with a first policy": "generating with version",
    },
}
CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
WANTED = {"warm": 60.0, "restart": 40.0}


def landmarks(log: str, began: float, of: dict[str, str]) -> Iterator[tuple[str, float]]:
    """Yield each landmark that the log has, with its seconds after `began` (seconds since the epoch)."""
    for what, pattern in of.items():
        for line in log.splitlines():
            stamp = STAMP.match(line)
            if stamp and re.search(pattern, line):
                at = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(stamp[2]) / 1000
                if at >= began:
                    yield what, at - began
                    break


def rows_of(case: str, name: str, run: Processes, began: float) -> list[ResultRow]:
    log = (run.folder / f"{name}.log").read_text(errors="replace")
    return [ResultRow(f"{name}: {what}", at, "s", case=case) for what, at in landmarks(log, began, LANDMARKS[name])]


def started(case: str, args: argparse.Namespace) -> Iterator[ResultRow]:
    """Start a run and wait for its first version; after `warm`, restart its server."""
    run = trained_run(
        args.work.resolve(), f"{case}-{int(time.time())}", args.shape, 0.0, 512, 512, 16, 16, {}, {}, fast=False
    )
    with run:
        began = time.time()
        for process in ("buffer", "rollout", "learner"):
            run.start(process, process)
        run.wait("the first version", lambda: versions_of(run) >= 1, args.limit_s)
        first = time.time() - began
        for name in LANDMARKS:
            yield from rows_of(case, name, run, began)
        yield ResultRow("first version", first, "s", "wanted", WANTED.get(case), case)
        if case == "warm":
            yield from restarted(run, args)
        for name in LANDMARKS:
            shutil.copy(run.folder / f"{name}.log", args.work / f"{case}-{name}.log")


def restarted(run: Processes, args: argparse.Namespace) -> Iterator[ResultRow]:
    """Kill the server and start it again: seconds until it samples."""
    run.stop("rollout", 0.0)
    log, began = run.folder / "rollout.log", time.time()
    run.start("rollout", "rollout")

    def samples() -> bool:
        found = dict(landmarks(log.read_text(errors="replace"), began, LANDMARKS["rollout"]))
        return "samples with a first policy" in found

    run.wait("the restarted server", samples, args.limit_s)
    yield from rows_of("restart", "rollout", run, began)
    yield ResultRow("the server samples again", time.time() - began, "s", "wanted", WANTED["restart"], "restart")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen2.5-1.5B")
    parser.add_argument("--cases", default="cold,warm")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-start"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "start.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name, folder in CACHES.items():
        os.environ[name] = str(args.work.resolve() / "caches" / folder)
    if "cold" in args.cases.split(","):
        shutil.rmtree(args.work / "caches", ignore_errors=True)
    rows: list[dict[str, Any]] = []
    for case in args.cases.split(","):
        try:
            rows += [row.line() for row in started(case, args)]
        except (RuntimeError, TimeoutError) as error:
            progress(f"{case}: {error}")
            rows.append(ResultRow("FAILED", 0.0, "", str(error), case=case).line())
        write(args.out, "start", rows, show=False)
    write(args.out, "start", rows)
    return int(any(row["what"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
