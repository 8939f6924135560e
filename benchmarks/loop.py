"""What does the loop cost? Trained tokens/s of a run, against the slower of its two sides alone. Two GPUs, or CPU.

`python -m benchmarks.loop`: 1.5B, answers of 512, 16 groups of 16 a version, learner compiled, real processes started
by hand. One command measures all three, with one start of the server: first the server alone (`stand_in.py` takes its
batches, trains nothing and publishes nothing after version 0, and the bound on age never binds), then the run, for
`--versions` after `--warm-up`, then the learner alone: the server is killed, and the learner, started again without a
checkpoint, gets all batches of the run once more, which lie in the buffer. Tokens are sampled ones. Prints one table;
writes JSON after each part. `--shape speck` is the small form for CPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.runs.processes import Died, Watch
from benchmarks.runs.trained import figures_of, trained_run, versions_of
from benchmarks.weights.table import ResultRow, progress, write

SHAPES_LOOP = {
    "Qwen2.5-1.5B": {"length": 512, "running": 512, "groups": 16, "samples": 16},
    "speck": {"length": 48, "running": 32, "groups": 4, "samples": 4},
}
LIMIT = 0.95
SIDES = {"server": "the server alone", "learner": "the learner alone, batches at hand"}
SHOWN = ("learner works", "waits s/version", "train s/version", "age mean", "age max", "running", "front",
         "gpu rollout", "gpu learner", "dropped", "failed")  # fmt: skip
OF_SERVER = ("age mean", "age max", "running", "front", "gpu rollout", "failed")


class LoopBenchmark:
    """The three parts, on one run's processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, shape = args, SHAPES_LOOP[args.shape]
        self.running = args.running or shape["running"]
        self.run = trained_run(args.work.resolve(), f"loop-{int(time.time())}", args.shape, 0.0, shape["length"],
                               self.running, shape["groups"], shape["samples"],
                               args.engine, args.learner)  # fmt: skip
        self.found: dict[str, dict[str, float]] = {}
        self.failed: dict[str, str] = {}

    def server_alone(self) -> dict[str, float]:
        """Tokens/s of the batches that reach the stand-in."""
        run, args = self.run, self.args
        run.start("buffer", "buffer", "--batch.max_staleness=100000")
        run.start("rollout", "rollout")
        run.start("learner", "benchmarks.runs.stand_in", "1e9", "0")
        run.wait("the first batch", lambda: bool(run.records("batches.jsonl")), args.start_s)
        warm = len(run.records("batches.jsonl")) + 3
        run.wait("3 more batches", lambda: len(run.records("batches.jsonl")) >= warm, args.start_s)
        until = time.monotonic() + args.seconds
        with Watch(run) as watch:
            run.wait(f"{args.seconds:g} s of the server alone", lambda: time.monotonic() > until, args.seconds + 60.0)
        first, *rest = run.records("batches.jsonl")[warm - 1 :]
        rate = sum(batch["tokens"] for batch in rest) / (rest[-1]["at"] - first["at"])
        run.stop("learner", 0.0)
        run.stop("buffer")
        for file in run.folder.glob("buffer.sqlite*"):  # the run proper begins at version 0
            file.rename(file.with_name(f"alone-{file.name}"))
        return watch.figures() | {"sampled tokens/s": rate}

    def whole_run(self) -> dict[str, float]:
        """The same server, and a learner."""
        run, args = self.run, self.args
        run.start("buffer", "buffer", f"--batch.max_staleness={args.staleness}")
        run.start("learner", "learner")
        return self.trained(args.warm_up, "the run")

    def learner_alone(self) -> dict[str, float]:
        """The same batches again, without a server."""
        run, warm_up = self.run, 2
        run.stop("learner", 0.0)
        run.stop("rollout", 0.0)
        (run.folder / "metrics.jsonl").rename(run.folder / "metrics-of-the-run.jsonl")
        run.start("learner", "learner")
        return self.trained(warm_up, "the learner alone")

    def trained(self, warm_up: int, what: str) -> dict[str, float]:
        """Figures of the versions after `warm_up`."""
        run, args = self.run, self.args
        run.wait(f"{what}: {warm_up} versions of warm-up", lambda: versions_of(run) >= warm_up, args.start_s)
        wanted = warm_up + args.versions
        with Watch(run) as watch:
            run.wait(f"{what}: {args.versions} versions", lambda: versions_of(run) >= wanted, args.start_s)
        return figures_of(run.records()[warm_up - 1 : wanted]) | watch.figures()

    def rows(self) -> list[dict[str, Any]]:
        """The run against each side, then its figures."""
        rows = [ResultRow(f"FAILED: {part}", 0.0, "", why) for part, why in self.failed.items()]
        rates = {part: found["sampled tokens/s"] for part, found in self.found.items()}
        whole = rates.pop("run", None)
        for side, rate in rates.items():
            if whole is None:
                rows.append(ResultRow(f"tokens/s of {SIDES[side]}", rate, "1/s"))
            else:
                rows.append(ResultRow("trained tokens/s of the run", whole, "1/s", SIDES[side], rate))
        if whole is not None and len(rates) == len(SIDES):
            slower = min(rates, key=lambda side: rates[side])
            against = f"{SIDES[slower]} is the slower side; limit"
            rows.append(ResultRow("  ratio to the slower side", whole / rates[slower], "", against, LIMIT))
        for part, found in self.found.items():
            shown = [key for key in SHOWN if key in found and (part != "learner" or key not in OF_SERVER)]
            rows += [ResultRow(f"{part}: {key}", found[key], "") for key in shown]
        return [row.line() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen2.5-1.5B", choices=SHAPES_LOOP)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=45.0, help="of the server alone")
    parser.add_argument("--running", type=int, default=0, help="sequences; 0: the shape's own")
    parser.add_argument("--engine", type=json.loads, default={}, help="rollout.engine, as JSON")
    parser.add_argument("--learner", type=json.loads, default={}, help="keys of the section learner, as JSON")
    parser.add_argument("--start-s", type=float, default=300.0, help="longest time of each part")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-loop"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "loop.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    benchmark = LoopBenchmark(args)
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "server": benchmark.server_alone, "run": benchmark.whole_run, "learner": benchmark.learner_alone,
    }  # fmt: skip
    with benchmark.run:
        for part, measure in parts.items():
            try:
                benchmark.found[part] = measure()
                progress(f"{part}: {benchmark.found[part]}")
            except (Died, TimeoutError, OSError, KeyError, IndexError) as error:
                benchmark.failed[part] = f"{type(error).__name__}: {error}"
                progress(f"{part} failed: {benchmark.failed[part]}")
                break
            finally:
                write(args.out, "loop", benchmark.rows(), show=False)
    write(args.out, "loop", benchmark.rows())
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    sys.exit(main())
