"""What does `learner.matmul: fp8` gain, and what does it round? GPUs that compute in FP8.

`python -m benchmarks.fp8_learner --parts speed` : whole steps of the learner at the shapes 1.5B (one GPU) and 7B (two)
with random weights; one policy multiplies in bfloat16 and in FP8 in turns, step by step (`benchmarks/learner/
matmuls.py`). Tokens/s, MFU against the peak of bfloat16, memory, and where a step's time goes.
`--parts rounding [--model FOLDER]`: relative error of the gradient, and distance of log-probabilities, against float32:
two layers of 7B with random weights, and the real model in FOLDER on text of these pages.
`--parts curve FILE FILE`: the curves that two runs of `benchmarks.learns` left (`learns.countdown-4.raw.json`), the
first in bfloat16 and the second in FP8.

Prints one table; each part adds its rows to the JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.learner.__main__ import together
from benchmarks.learner.cases import Case
from benchmarks.learner.matmuls import GROUPS, KINDS
from benchmarks.weights.table import ResultRow, write

SPEED = {
    "1.5B": Case("matmuls", "1.5b", samples=256, steps=4),
    "7B": Case("matmuls", "7b", 2, samples=128, steps=4),
}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
CURVE = "eval/held_out/mean@4"
WARM_UP = 10
"""Versions of a curve before its means."""


def speed_rows(name: str, found: dict[str, Any]) -> list[ResultRow]:
    """A case of SPEED: FP8 beside bfloat16."""
    plain, fp8 = (found["kinds"][kind] for kind in KINDS)
    rates = [[step["tokens"] / step["seconds"] for step in kind["rows"][2:]] for kind in (plain, fp8)]
    gains = [fast / slow for slow, fast in zip(*rates, strict=True)]
    rows = [
        ResultRow("tokens/s", fp8["tokens_per_s"], "", "bfloat16", plain["tokens_per_s"], name),
        ResultRow("times as fast, median of pairs", median(gains), "", "smallest", min(gains), name),
        ResultRow("MFU by bfloat16's peak", *mfu(fp8, plain), name),
        ResultRow("peak memory", fp8["gib"], "GiB", "bfloat16", plain["gib"], name),
        ResultRow("peak memory", fp8["gib"], "GiB", "estimate", fp8["estimate_gib"], name),
        ResultRow("log-probability, mean distance", found["apart"], "nat", "", None, name),
    ]
    if "profile" in fp8:
        for group in [*(group for group, _ in GROUPS), "rest"]:
            times = [kind["profile"]["groups"].get(group, 0.0) for kind in (fp8, plain)]
            rows.append(ResultRow(f"GPU time: {group}", times[0], "s", "bfloat16", times[1], name))
    return rows


def mfu(fp8: dict[str, Any], plain: dict[str, Any]) -> tuple[float, str, str, float]:
    return fp8["flops_per_s"] / fp8["peak"], "", "bfloat16", plain["flops_per_s"] / plain["peak"]


def rounding_rows(name: str, found: dict[str, dict[str, float]]) -> list[ResultRow]:
    """Errors of each precision beside bfloat16's."""
    rows = []
    for kind, errors in found.items():
        for key in ("all", *LAYERS, "cosine", "logprob mean", "logprob max"):
            if kind != "bfloat16" and key in errors:
                what = key if key in ("cosine", "logprob mean", "logprob max") else f"gradient error: {key}"
                rows.append(ResultRow(what, errors[key], "", "bfloat16", found["bfloat16"][key], f"{name}, {kind}"))
    return rows


def curve_rows(files: list[Path]) -> list[ResultRow]:
    """Held-out problems by version, and the mismatch to the server."""
    plain, fp8 = (json.loads(file.read_text()) for file in files)
    solved = [{r["eval/version"]: r[CURVE] for r in run if "eval/version" in r} for run in (plain, fp8)]
    rows = [
        ResultRow(f"held out, pass@1 at version {version:g}", solved[1][version], "", "bfloat16", share, "curve")
        for version, share in solved[0].items()
        if version in solved[1]
    ]
    steps = [[r for r in run if "eval/version" not in r][WARM_UP:] for run in (plain, fp8)]
    for key in ("mismatch/k1_fresh", "mismatch/k3_fresh", "mismatch/m2_fresh", "gradient/norm", "sample/solved"):
        means = [mean(r[key] for r in run if key in r) if any(key in r for r in run) else 0.0 for run in steps]
        rows.append(ResultRow(f"{key}, mean", means[1], "", "bfloat16", means[0], "curve"))
    return [*rows, ResultRow("versions", float(len(steps[1])), "", "bfloat16", float(len(steps[0])), "curve")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="speed,rounding", help="of speed, rounding and curve")
    parser.add_argument("curves", nargs="*", type=Path, help="for the part curve")
    parser.add_argument("--shapes", default=",".join(SPEED), help="of the part speed")
    parser.add_argument(
        "--model", type=Path, help="folder of a real model, such as SmolLM2-135M, for the part rounding"
    )
    parser.add_argument("--cases", type=json.loads, default={}, help="other keys of the cases of speed, by shape")
    parser.add_argument("--steps", type=int, help="pairs of steps")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each set of cases")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fp8_learner.json")
    args = parser.parse_args()
    parts = args.parts.split(",")
    cases: dict[str, Case] = {}
    if "speed" in parts:
        for shape in args.shapes.split(","):
            given = vars(SPEED.get(shape, Case("matmuls"))) | args.cases.get(shape, {})
            cases[shape] = Case(**given | ({"steps": args.steps} if args.steps else {}))
    if "rounding" in parts:
        cases["7B width"] = Case("rounding", "7b", samples=12, layers=2)
        if args.model:
            cases["real model"] = Case("rounding", samples=32, path=str(args.model.resolve()))
    with tempfile.TemporaryDirectory() as folder:
        answers = together(cases, Path(folder), torch.cuda.device_count() or 2, args.limit) if cases else {}
    rows = [row for name, found in answers.items() for row in rows_of(name, found)]
    rows += [ResultRow(f"FAILED: {name}", 0.0, "") for name in cases if name not in answers]
    if "curve" in parts:
        rows += curve_rows(args.curves)
    kept = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    mine = {row.case for row in rows}
    write(args.out, "fp8_learner", [row for row in kept if row.get("case", "") not in mine] + [r.line() for r in rows])
    for name, found in answers.items():
        args.out.with_name(f"{args.out.stem}.{name.replace(' ', '-')}.raw.json").write_text(json.dumps(found))
    return 1 if any(row.what.startswith("FAILED") for row in rows) else 0


def rows_of(name: str, found: dict[str, Any]) -> list[ResultRow]:
    return rounding_rows(name, found["rounding"]) if "rounding" in found else speed_rows(name, found)


if __name__ == "__main__":
    sys.exit(main())
