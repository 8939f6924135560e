"""What does evaluation while it trains cost the learner? Its wait for batches with a test set, against without. CPU.

`python -m benchmarks.evaluation` runs the real processes with the real vLLM, started by hand: a tiny model of fixed
answers (48 tokens), 8 groups of 8 samples a version, one server (`--servers 1,2`: then two). For each number of servers
it makes `--rounds` pairs of runs, one with and one without an evaluation every 10 versions (16 problems, 2 samples
each, 5 % of the run's samples), in turn, because a machine that others use drifts. Counted are `--versions` versions
after a warm-up that ends with the first evaluation. What is judged is the median of the pairs' ratios of a version's
time, the learner's wait included. Servers and learner share the CPU: what an evaluation generates there is taken from
the run, so the wait cannot stay below the share of the work; on GPUs the lulls of a server are free. Where the learner
hardly waits, the ratio of the waits says little, so it is shown only. One server takes less than four minutes on two
cores with nothing else to do.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runs.processes import Died, Processes
from benchmarks.runs.trained import figures_of, trained_run
from benchmarks.weights.table import ResultRow, progress, write

LENGTH, GROUPS, SAMPLES, RUNNING = 48, 8, 8, 256
EVERY, PROBLEMS, ATTEMPTS = 10, 16, 2
TARGET = 1.1
ENGINE = {"kv_cache_memory_bytes": 256 * 2**20, "max_num_seqs": RUNNING}
KEYS = ("waits s/version", "versions/h", "train s/version", "age mean", "age max")


def trained(run: Processes) -> list[dict[str, Any]]:
    """The records of versions."""
    return [record for record in run.records() if "eval/version" not in record]


def evaluated(run: Processes) -> list[int]:
    """The versions that were evaluated."""
    return [int(record["eval/version"]) for record in run.records() if "eval/version" in record]


def measure(args: argparse.Namespace, servers: int, evaluates: bool) -> dict[str, float]:
    """One run: `versions` versions after the warm-up."""
    name = f"evaluation-{servers}-{'with' if evaluates else 'without'}-{int(time.time())}"
    run = trained_run(args.work.resolve(), name, "speck", 0.0, LENGTH, RUNNING, GROUPS, SAMPLES, ENGINE, {})
    words = [f"--batch.max_staleness={args.staleness}", "--learner.threads=1"]
    if evaluates:
        path = args.work.resolve() / "speck.jsonl"
        given = {"path": path, "limit": PROBLEMS, "samples": ATTEMPTS, "k": f"[{ATTEMPTS}]"}
        words += [f"--data.eval.held_out.{key}={value}" for key, value in given.items()] + [f"--eval.every={EVERY}"]
    with run:
        run.start("buffer", "buffer", *words)
        for number in range(servers):
            run.start(f"rollout-{number}", "rollout", "--name", f"rollout-{number}", *words)
        run.start("learner", "learner", *words)
        heard = 0

        def all_serve() -> bool:
            nonlocal heard
            state = run.state()
            heard = sum(server["version"] is not None for server in state.servers.values()) if state else 0
            return heard == servers

        run.wait(f"{servers} servers", all_serve, args.start_s)
        run.wait("the first versions", lambda: len(trained(run)) >= args.warm_up, args.start_s)
        first = len(trained(run))
        if evaluates:
            run.wait("the first evaluation", lambda: bool(evaluated(run)), args.start_s)
            first = len(trained(run))
        run.wait(f"{args.versions} versions", lambda: len(trained(run)) > first + args.versions, args.start_s)
        records = trained(run)[first : first + args.versions + 1]
        last = records[-1]["version"]
        found = figures_of(records)
        found["evaluations"] = float(sum(records[0]["version"] < each <= last for each in evaluated(run)))
    return {key: found[key] for key in (*KEYS, "evaluations", "versions")}


def rows(found: dict[str, list[dict[str, float]]], failed: list[str]) -> list[dict[str, Any]]:
    """Medians of the runs with a test set against those without."""
    lines = [ResultRow("FAILED", 0.0, "", why) for why in failed]
    for servers in sorted({key.split()[0] for key in found}):
        without, with_set = found.get(f"{servers} without", []), found.get(f"{servers} with", [])
        if not without or not with_set:
            continue
        number = min(len(with_set), len(without))
        case = f"{servers} server{'s' if servers != '1' else ''}, {number} pairs of runs"
        for key in KEYS:
            one, other = (median(run[key] for run in runs) for runs in (with_set, without))
            lines.append(ResultRow(key, one, "", "without evaluation", other, case=case))
        pairs = list(zip(with_set, without, strict=False))
        times = [other["versions/h"] / one["versions/h"] for one, other in pairs]
        what = "  time of a version, with / without, median of the pairs"
        lines.append(ResultRow(what, median(times), "", "target", TARGET, case=case))
        waits = [one["waits s/version"] / max(other["waits s/version"], 1e-6) for one, other in pairs]
        lines.append(ResultRow("  wait, with / without, median of the pairs", median(waits), "", case=case))
        made = sum(run["evaluations"] for run in with_set)
        lines.append(ResultRow("evaluations counted", made, "", case=case))
        share = made * PROBLEMS * ATTEMPTS / (sum(run["versions"] for run in with_set) * GROUPS * SAMPLES)
        lines.append(ResultRow("samples of evaluations / of training", share, "", case=case))
    return [line.line() for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default=[1], type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--start-s", type=float, default=400.0, help="longest time of each part")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-evaluation"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "evaluation.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {}
    failed: list[str] = []
    for servers in args.servers:
        for _ in range(args.rounds):
            for evaluates in (True, False):
                key = f"{servers} {'with' if evaluates else 'without'}"
                try:
                    found.setdefault(key, []).append(measure(args, servers, evaluates))
                    progress(f"{key}: {json.dumps(found[key][-1])}")
                except (Died, TimeoutError, OSError, KeyError, IndexError) as error:
                    failed.append(f"{key}: {type(error).__name__}: {error}")
                    progress(failed[-1])
                write(args.out, "evaluation", rows(found, failed), show=False)
    write(args.out, "evaluation", rows(found, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
