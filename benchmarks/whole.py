"""Is a large shape trained whole on one host? Its speed, and the memory of each of its ranks beside the estimate.

`python -m benchmarks.whole --shape Qwen2.5-14B --ranks 3` starts the real processes: buffer, one server on GPU 0 and a
learner of so many ranks on the next GPUs, with random weights and a run file that leaves speed to `auto`. Each rank
publishes its own rows. It waits for `--warm-up` versions, then measures `--versions` more. The limit of a memory figure
is the learner's own estimate. Prints one table; writes JSON. `--shape speck` is the small form for CPU.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.runs.processes import FIRST_GPU, Processes
from benchmarks.runs.trained import figures_of, trained_run, versions_of
from benchmarks.weights.family_shapes import FAMILIES
from benchmarks.weights.shapes import EXPERTS, SHAPES
from benchmarks.weights.table import ResultRow, progress, write

ESTIMATE = re.compile(r"tokens per microbatch: a rank takes ([0-9.]+) GiB")
"""The first figure of the learner's estimate in its log, which is the whole."""
RECORDED = {
    "mfu": ("MFU", ""),
    "weights/probe": ("probe: server against learner", "nat"),
    "weights/lag_s": ("published to swapped", "s"),
    "weights/gb_per_s": ("broadcast", "GB/s"),
    "weights/bytes": ("weights that are sent", "bytes"),
    "time/publish_s": ("publish, as the learner waits for it", "s"),
    "time/backward_s": ("forward and backward passes", "s"),
    "time/update_s": ("the optimizer's step", "s"),
    "moe/load_max_over_mean": ("busiest expert over the mean", ""),
    "mfu/version": ("MFU of the whole version, waiting included", ""),
    "mismatch/k3_fresh": ("k3 of tokens of the newest policy", "nat"),
}
"""Keys of the learner's records whose medians are shown."""


def whole_run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the shape; the rows of its table."""
    began, work = time.monotonic(), args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    learner = {"ranks": args.ranks, **args.learner}
    weights = {"publish": args.publish, "probe_tolerance": 0.5} if args.ranks > 1 else {"probe_tolerance": 0.5}
    name = f"whole-{int(time.time())}"
    run = trained_run(work, name, args.shape, 0.0, args.length, args.running, args.groups, args.samples, args.engine,
                      learner, weights=weights, fast=False)  # fmt: skip
    written = time.monotonic() - began
    with run:
        start(run, args.ranks)
        started = time.monotonic()
        run.wait("the first version", lambda: versions_of(run) >= 1, args.start_s)
        first = time.monotonic() - started
        wanted = args.warm_up + args.versions
        run.wait(f"{wanted} versions", lambda: versions_of(run) >= wanted, args.start_s)
        held = memory_of_gpus(args.ranks)
    log = (run.folder / "learner.log").read_text(errors="replace")
    for line in log.splitlines():
        if any(part in line for part in ("auto takes", "tokens per microbatch", "in host memory")):
            progress(line)
    return [
        *table(args, run.records()[: args.warm_up + args.versions], log),
        *(ResultRow(f"{who}'s GPU, all that the driver counts", gib, "GiB").line() for who, gib in held.items()),
        ResultRow("the weights were written to disk", written, "s").line(),
        ResultRow("first version after the start", first, "s").line(),
    ]


def start(run: Processes, ranks: int) -> None:
    """Start buffer, server and learner; the server has the first GPU, each rank one of the next. One rank shares the
    only GPU of a machine with the server."""
    run.start("buffer", "buffer")
    run.start("rollout", "rollout")
    gpus = [FIRST_GPU + 1 + rank for rank in range(ranks)]
    alone = gpus[-1] < torch.cuda.device_count()
    run.start("learner", "learner", **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if alone else {}))


def memory_of_gpus(ranks: int) -> dict[str, float]:
    """GiB in use on the GPU of the server and of each rank, as the driver sees them; empty without GPUs."""
    names = ["the server", *(f"rank {rank}" for rank in range(ranks))]
    if torch.cuda.device_count() < FIRST_GPU + len(names):
        return {}
    sizes = (torch.cuda.mem_get_info(FIRST_GPU + at) for at in range(len(names)))
    return {name: (total - free) / 2**30 for name, (free, total) in zip(names, sizes, strict=True)}


def table(args: argparse.Namespace, records: list[dict[str, Any]], log: str) -> list[dict[str, Any]]:
    """Figures of the versions after the warm-up, and the peak of rank 0's memory so far beside its estimate."""
    measured = records[args.warm_up - 1 :]
    figures = figures_of(measured)
    rows = [ResultRow("versions", figures["versions"], "")]
    rows += [ResultRow(key, figures[key], "1/s") for key in ("sampled tokens/s", "tokens/s with prompts")]
    rows += [ResultRow(key, figures[key], "s") for key in ("waits s/version", "train s/version")]
    for key, (what, unit) in RECORDED.items():
        values = [record[key] for record in measured[1:] if key in record]
        if values:
            rows.append(ResultRow(f"{what}, median", median(values), unit))
    if "memory/gpu_gib" in records[-1]:
        found = ESTIMATE.search(log)
        estimate = float(found[1]) if found else None
        against = "estimate" if found else ""
        rows.append(ResultRow("memory of rank 0's GPU, peak", records[-1]["memory/gpu_gib"], "GiB", against, estimate))
    case = f"{args.shape}, {args.ranks} learner ranks, 1 server"
    return [ResultRow(**(vars(row) | {"case": case})).line() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, *EXPERTS, *FAMILIES], default="Qwen2.5-14B")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--publish", choices=["rows", "gather"], default="rows")
    parser.add_argument("--length", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--running", type=int, default=256, help="sequences that the server runs")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--versions", type=int, default=7)
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON of engine arguments")
    parser.add_argument("--learner", type=json.loads, default={}, help="JSON of keys of `learner`")
    parser.add_argument("--start-s", type=float, default=400.0, help="longest time of each part of the run")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-whole"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "whole.json")
    args = parser.parse_args()
    gpus = torch.cuda.device_count() - FIRST_GPU
    if args.ranks > 1 and 0 < gpus <= args.ranks:
        parser.error(f"--ranks {args.ranks}: a GPU for each and one for the server are wanted, and {gpus} are there")
    write(args.out, "whole", whole_run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
