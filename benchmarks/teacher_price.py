"""What does a teacher cost? Trained tokens/s of a run with a teacher, compared with the same run without.

`python -m benchmarks.teacher_price` starts the real processes, one case after the other: `none` has no teacher,
`beside` has one on a third GPU, `shared` one on the server's own GPU. Server and teacher have the same shape and random
weights, and all servers the same share of memory. `--top-k 16` takes the form with the teacher's most probable tokens.
With four GPUs, `FIRST_GPU=2` lets `none` run at the same time as `shared`, with a folder `--work` of its own. Prints
one table, in which each case with a teacher stands against `none` of its shape, and writes JSON. Figures of another
command stay in the file if they are of the same day, hardware and versions. `--shape speck` is the small form for CPU.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from benchmarks.runs.ports import free_port
from benchmarks.runs.processes import FIRST_GPU, Died, Processes
from benchmarks.runs.trained import figures_of, trained_run, versions_of
from benchmarks.weights.table import ResultRow, earlier, progress, write

TEACHER_GPU = {"none": None, "beside": 2, "shared": 0}
"""By case: the number of the teacher's GPU after FIRST_GPU."""
LENGTHS = {"Qwen2.5-1.5B": (512, 16, 16), "SmolLM2-135M": (256, 16, 8), "speck": (48, 4, 4)}
"""By shape: tokens of an answer, groups and samples of a version."""
SHARE = {"gpu_memory_utilization": 0.4}
TOKENS, LIMIT = "trained tokens/s", 0.95
"""A teacher beside the server is to leave this share of the tokens/s of the run without it."""
SHOWN = {"servers/teacher_tokens_per_s": ("tokens/s that the teacher reads", "1/s"),
         "servers/teacher_s": ("longest wait of a sample for its teacher", "s"),
         "teacher/share": ("share of tokens with a teacher", "")}  # fmt: skip
"""Keys of the learner's records whose medians are shown."""


def run_of(args: argparse.Namespace, case: str) -> Processes:
    """The processes of a case, not started yet."""
    length, groups, samples = LENGTHS[args.shape]
    on_gpu = torch.cuda.is_available()
    engine = {**(SHARE if on_gpu else {}), **args.engine}
    run = trained_run(args.work.resolve(), f"{case}-{int(time.time())}", args.shape, 0.0, length, groups * samples * 2,
                      groups, samples, engine, args.learner, fast=False)  # fmt: skip
    if TEACHER_GPU[case] is None:
        return run
    config = yaml.safe_load(run.file.read_text(encoding="utf-8"))
    teacher = {**config["rollout"]["engine"], "max_model_len": config["rollout"]["engine"]["max_model_len"] + 1}
    given = {"servers": args.servers, "port": free_port(), "engine": teacher}
    config["teacher"] = {"model": config["model"]["path"], **given}
    if args.top_k:
        config["teacher"]["top_k"] = args.top_k
    run.file.write_text(yaml.safe_dump(config, sort_keys=False))
    return Processes(run.file, run.gpus)


def measured(args: argparse.Namespace, case: str) -> list[ResultRow]:
    """Run a case: its figures after the warm-up."""
    with run_of(args, case) as run:
        gpu = TEACHER_GPU[case]
        if gpu is not None:
            seen = {"CUDA_VISIBLE_DEVICES": str(FIRST_GPU + gpu)} if torch.cuda.is_available() else {}
            for number in range(args.servers):
                run.start(f"teacher-{number}", "rollout teacher", "--name", f"teacher-{number}", **seen)
        for name in ("buffer", "rollout", "learner"):
            run.start(name, name)
        run.wait(f"{args.warm_up} versions", lambda: versions_of(run) >= args.warm_up, args.start_s)
        wanted = args.warm_up + args.versions
        run.wait(f"{wanted} versions", lambda: versions_of(run) >= wanted, args.start_s)
        records = run.records()[args.warm_up - 1 : wanted]
    figures = figures_of(records)
    given = {"top_k": args.top_k, "servers": args.servers - 1 and args.servers} if gpu is not None else {}
    name = ", ".join([case, args.shape, *(f"{key} {value}" for key, value in given.items() if value)])
    rows = [ResultRow(TOKENS, figures["sampled tokens/s"], "1/s", case=name)]
    rows += [ResultRow("the learner's wait in a version", figures["waits s/version"], "s", case=name)]
    for key, (what, unit) in SHOWN.items():
        values = [record[key] for record in records[1:] if key in record]
        if values:
            rows.append(ResultRow(what, median(values), unit, case=name))
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each case's tokens/s with those of `none` of its shape beside it."""
    speeds = {row["case"]: row for row in rows if row["what"] == TOKENS}
    for name, row in speeds.items():
        alone = speeds.get(f"none, {name.split(', ')[1]}")
        if alone and row is not alone:
            ratio = round(row["value"] / alone["value"], 3)
            row |= {"against": "without a teacher", "against_value": alone["value"], "ratio": ratio}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LENGTHS, default="Qwen2.5-1.5B")
    parser.add_argument("--cases", default=",".join(TEACHER_GPU), help="some of none, beside, shared")
    parser.add_argument("--top-k", type=int, default=0, help="0: the teacher scores sampled tokens")
    parser.add_argument("--servers", type=int, default=1, help="of the teacher, all on its GPU")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON of engine arguments of server and teacher")
    parser.add_argument("--learner", type=json.loads, default={}, help="JSON of keys of `learner`")
    parser.add_argument("--start-s", type=float, default=300.0, help="longest time of each part of a case")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-teacher-price"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "teacher_price.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    failed = measured_now = False
    for case in args.cases.split(","):
        try:
            found = [row.line() for row in measured(args, case)]
        except (Died, TimeoutError) as error:
            progress(f"{case}: {error}")
            failed = True
            continue
        kept = [row for row in earlier(args.out) if row["case"] != found[0]["case"]]  # of a command beside this one too
        write(args.out, "teacher_price", compared(kept + found), show=False)
        measured_now = True
    if measured_now:  # else a table of another day would be lost
        write(args.out, "teacher_price", earlier(args.out))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
