"""Compares the speed of a run file without keys for speed with that of one with hand-tuned keys.

`python -m benchmarks.defaults` needs GPUs: whole runs with random weights. One GPU serves and one learns (two learn in
`--case 7B`). One run file has no key for speed (`silent`), one has the best hand-tuned keys (`tuned`); `--against
before` compares with the earlier defaults, `--against alone` with nothing. Both run at the same time if the host has
GPUs for both, and change places in the next turn. Prints one table and writes JSON; figures of other cases stay in the
file if they are of the same day, hardware and versions. Whether what `auto` takes fits is `python -m
benchmarks.memory --list shapes`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.runs.processes import FIRST_GPU
from benchmarks.runs.trained import FAST, figures_of, trained_run, versions_of
from benchmarks.weights.table import ResultRow, earlier, progress, write

ROOT = Path(__file__).parents[1]


class SpeedCase(NamedTuple):
    """A shape, ranks of its learner, tokens of an answer, groups and samples of a version, keys of `model`, and tokens
    of a tuned microbatch: as many as fit an H200."""

    shape: str
    learners: int = 1
    length: int = 512
    groups: int = 16
    samples: int = 16
    model: dict[str, Any] = {}  # noqa: RUF012
    microbatch: int = 16384


CASES = {
    "1.5B": SpeedCase("Qwen2.5-1.5B"),
    "7B": SpeedCase("Qwen2.5-7B", learners=2, microbatch=10240),
    "7B-adapter": SpeedCase("Qwen2.5-7B", model={"lora": {"rank": 32}}),
    "VL-3B": SpeedCase("Qwen2.5-VL-3B", length=256, groups=32, samples=8, microbatch=8192),
}
BEFORE = {
    "compile": False,
    "activation_checkpointing": "block",
    "tokens_per_microbatch": 8192,
    "head_chunk_tokens": 1024,
}
KEYS: dict[str, dict[str, Any]] = {"silent": {}, "tuned": FAST, "before": BEFORE}
ALONE = "alone"
SHOWN = ("sampled tokens/s", "mfu", "first version s", "learner works", "waits s/version")
LIMIT, MFU = 0.97, 0.55


def whole_run(args: argparse.Namespace, keys: str) -> dict[str, float]:
    """One run on the GPUs from FIRST_GPU on, the first of which serves: figures of its versions after `--warm-up`."""
    case, name, began = CASES[args.case], f"{args.case}-{keys}-{FIRST_GPU}", time.monotonic()
    work = args.work.resolve() / name
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "models").exists():
        (work / "models").symlink_to(args.work.resolve() / "models")
    learner = {"ranks": case.learners, **KEYS[keys]}
    if keys == "tuned":
        learner["tokens_per_microbatch"] = case.microbatch
    run = trained_run(work, f"{name}-{int(time.time())}", case.shape, 0.0, case.length, 512, case.groups, case.samples,
                      {}, learner, case.model, {"probe_tolerance": 0.5}, fast=False)  # fmt: skip
    learners = ",".join(str(FIRST_GPU + 1 + rank) for rank in range(case.learners))
    with run:
        run.start("buffer", "buffer")
        run.start("rollout", "rollout")
        run.start("learner", "learner", CUDA_VISIBLE_DEVICES=learners)
        run.wait("the first version", lambda: versions_of(run) >= 1, args.start_s)
        first = time.monotonic() - began
        run.wait("warm-up", lambda: versions_of(run) >= args.warm_up, args.start_s)
        wanted = args.warm_up + args.versions
        run.wait(f"{args.versions} versions", lambda: versions_of(run) >= wanted, args.start_s)
        records = run.records()[args.warm_up - 1 : wanted]
        log = (run.folder / "learner.log").read_text(errors="replace")
    for line in log.splitlines():
        if "auto takes" in line or "tokens per microbatch" in line or "is kept" in line:
            progress(f"{name}: {line}")
    mfu = [record["mfu"] for record in records[1:] if "mfu" in record]
    return figures_of(records) | {"first version s": first, **({"mfu": median(mfu)} if mfu else {})}


def both(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `silent` and the other run file, at the same time if there are GPUs for both, then swap their GPUs."""
    pair = ("silent",) if args.against == ALONE else ("silent", args.against)
    needs = 1 + CASES[args.case].learners
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in pair}
    gpus = torch.cuda.device_count()
    weights = [CASES[args.case].shape, str(args.work.resolve() / "models"), "0.0"]
    subprocess.run([sys.executable, "-m", "benchmarks.runs.models", *weights], check=True, stdout=subprocess.DEVNULL)
    for turn in range(args.turns):
        order = pair[:: 1 if turn % 2 == 0 else -1]
        places = [(keys, FIRST_GPU + place * needs) for place, keys in enumerate(order)]
        at_once = [places] if gpus >= FIRST_GPU + 2 * needs else [[(keys, FIRST_GPU)] for keys in order]
        for together in at_once:
            started = [(keys, start(["--one", keys], first, args)) for keys, first in together]
            for keys, process in started:
                found[keys].append(answer(process))
    if args.against == ALONE:
        return [row.line() for turn, run in enumerate(found["silent"]) for row in alone(run, args.case, turn)]
    rows = []
    for turn, (ours, other) in enumerate(zip(found["silent"], found[args.against], strict=True)):
        case = f"{args.case}, turn {turn + 1}"
        failed = [
            f"{keys}: {run['error']}" for keys, run in (("silent", ours), (args.against, other)) if "error" in run
        ]
        if failed:
            rows.append(ResultRow("FAILED", 0.0, "", "; ".join(failed), case=case))
            continue
        for key in SHOWN:
            if key in ours:
                rows.append(ResultRow(key, ours[key], "", args.against, other[key], case))
        ratio = ours["sampled tokens/s"] / other["sampled tokens/s"]
        rows.append(ResultRow("ratio of trained tokens/s", ratio, "", "limit", LIMIT, case))
    return [row.line() for row in rows]


def alone(run: dict[str, Any], name: str, turn: int) -> list[ResultRow]:
    """The rows of a run without another one."""
    case = f"{name}, {ALONE}, turn {turn + 1}"
    if "error" in run:
        return [ResultRow("FAILED", 0.0, "", run["error"], case=case)]
    rows = [ResultRow(key, run[key], "", case=case) for key in SHOWN if key in run and key != "mfu"]
    return [*rows, ResultRow("mfu", run["mfu"], "", "limit", MFU, case)] if "mfu" in run else rows


def start(words: list[str], first: int, args: argparse.Namespace) -> "subprocess.Popen[str]":
    """Start this benchmark as a process that measures one case on the GPUs from `first` on."""
    flags = [f"--case={args.case}", f"--versions={args.versions}", f"--warm-up={args.warm_up}", f"--work={args.work}"]
    command = [sys.executable, "-m", "benchmarks.defaults", *words, *flags, f"--start-s={args.start_s}"]
    environment = os.environ | {"FIRST_GPU": str(first), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the last line of the process; `error` if there is none."""
    out, _ = process.communicate()
    lines = out.splitlines()
    if process.returncode or not lines:
        return {"error": f"exit code {process.returncode}: {lines[-1] if lines else 'it printed nothing'}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="tuned", choices=[*(keys for keys in KEYS if keys != "silent"), ALONE])
    parser.add_argument("--turns", type=int, default=2, help="how often the two run; they swap GPUs each time")
    parser.add_argument("--case", choices=CASES, default="1.5B")
    parser.add_argument("--versions", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--start-s", type=float, default=300.0, help="longest time of each part of a run")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-defaults"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "defaults.json")
    parser.add_argument("--one", choices=KEYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(whole_run(args, args.one)))
        return 0
    if not torch.cuda.is_available():
        parser.error("no GPU is found; on a CPU `auto` has no choice")
    rows = both(args)
    names = {row["case"] for row in rows}
    others = [row for row in earlier(args.out) if row.get("case", "") not in names]
    write(args.out, "defaults", [*others, *rows])
    return int(any(row["what"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
