"""What do rollouts in FP8 gain, and how far are their log-probabilities from the learner's? GPUs.

`python -m benchmarks.fp8 --model FOLDER`: two short runs of a real model in step with its server (`max_staleness: 0`),
started by hand: buffer, server and learner, first with bfloat16 weights in the server, then with each policy rounded to
FP8 as it is loaded (`rollout.engine.quantization: fp8`). The learner's weights hardly move. The mismatch is the
learner's own metric: k1, k3 and m2 between its log-probabilities and those recorded at sampling, on tokens of the
current policy. Needs two GPUs; on one, server and learner share it, and tokens/s are a bound. Prints one table; writes
JSON.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.runs.processes import Died, Processes, Watch, engine_keys, run_file, sequences
from benchmarks.runs.trained import figures_of, versions_of
from benchmarks.weights.table import ResultRow, progress, write

MISMATCH = ("mismatch/k1_fresh", "mismatch/k3_fresh", "mismatch/m2_fresh")
SHOWN = ("tokens_per_s", "running", "gpu rollout", "weights/probe", "weights/load_s", "versions")
SAMPLES, GROUPS, WARM_UP = 16, 32, 2


def quantised_run(args: argparse.Namespace, quantization: str | None) -> dict[str, float]:
    """One run; its figures after the warm-up."""
    name = f"{quantization or 'bfloat16'}-{int(time.time())}"
    shared = torch.cuda.device_count() == 1
    engine = engine_keys(args.length, {"quantization": quantization} if quantization else {}, shared)
    draw, problems = random.Random(0), args.work / "sums.jsonl"
    sums = (f"{draw.randrange(100)} + {draw.randrange(100)} is" for _ in range(1000))
    problems.write_text("".join(json.dumps({"problem": row, "answer": ""}) + "\n" for row in sums))
    file = run_file(
        args.work, name, "speck",
        model={"path": str(args.model)},
        data={"train": str(problems)},
        sampling={"max_tokens": args.length},
        batch={"groups": GROUPS, "samples": SAMPLES, "max_staleness": 0},
        rollout={**sequences(GROUPS * SAMPLES, SAMPLES), "engine": engine, "heartbeat_s": 1.0},
        learner={"tokens_per_microbatch": 16384},
        weights={"probe_every": 1, "probe_tolerance": 1.0},
    )  # fmt: skip
    with Processes(file, {"rollout": 0, "learner": 0 if shared else 1}) as run:
        for part in ("buffer", "rollout", "learner"):
            run.start(part, part)
        run.wait("warm-up", lambda: versions_of(run) >= WARM_UP, args.start_s)
        with Watch(run) as watch:
            run.wait("the versions", lambda: versions_of(run) >= WARM_UP + args.versions, args.start_s)
        records = run.records()[WARM_UP - 1 :]
    known = {key: mean(record[key] for record in records if key in record) for key in (*MISMATCH, *SHOWN[3:5])}
    return figures_of(records) | watch.figures() | known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a real model, such as SmolLM2-135M")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--start-s", type=float, default=240.0, help="longest time of each part")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-fp8"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fp8.json")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for quantization in (None, "fp8"):
        try:
            found[quantization or "bfloat16"] = quantised_run(args, quantization)
        except (Died, TimeoutError, KeyError) as error:
            rows.append(ResultRow(f"FAILED: {quantization}", 0.0, "", f"{type(error).__name__}: {error}").line())
            progress(f"{quantization} failed: {error}")
    plain = found.get("bfloat16", {})
    for name, figures in found.items():
        for key in (*MISMATCH, *SHOWN):
            if key in figures:
                against = ("bfloat16", plain.get(key)) if name != "bfloat16" else ("", None)
                rows.append(ResultRow(key, figures[key], "", *against, case=name).line())
    write(args.out, "fp8", rows)
    return 1 if len(found) < 2 else 0


if __name__ == "__main__":
    sys.exit(main())
