"""How many versions an hour does a run make at each bound on the age, against the same run in step? Two GPUs, or CPU.

`python -m benchmarks.async_vs_sync --staleness 0,1,2,4,8` runs the real processes, started by hand: one GPU serves, one
learns, 1.5B, lengths geometric (mean 1,000, cut at 4,096), 16 groups of 16 a version. Server and learner start once;
for each bound only the buffer is started again, with another `batch.max_staleness`, as an operator may do in a live
run. After `max_staleness + WARM_UP` versions `--versions` are counted. `FIRST_GPU=2` and another `--work` let several
of these run beside each other, each with bounds of its own; `--merge` takes what earlier commands measured, from their
folders, into the table. When `--budget-s` ends, the bound under way counts with the versions it has. `--shape speck` is
the small form for CPU.

The closed form for the mean age (queueing theory, checked on Qwen3-8B by Applied Compute): a group lives for C M / B
versions where C sequences run, B samples make a batch and M = E[longest of a group] / E[length]; the server's policy
is one training step behind, which adds its share of a version. Where the learner limits, groups wait in the buffer too:
the mean number stored, in batches, is added. The bound cuts all of it off. C and the shares are measured, M is that of
the geometric distribution.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.runs.processes import Died, Processes, Watch
from benchmarks.runs.trained import figures_of, trained_run, versions_of
from benchmarks.weights.table import ResultRow, progress, write

SHAPES_RUN: dict[str, dict[str, int]] = {
    "Qwen2.5-1.5B": {"mean": 1000, "cut": 4096, "running": 512, "groups": 16, "samples": 16},
    "speck": {"mean": 24, "cut": 96, "running": 32, "groups": 4, "samples": 4},
}
WARM_UP = 2
TARGET = {4: 2.4}
SHOWN = ("versions/h", "sampled tokens/s", "learner works", "gpu learner", "gpu rollout", "running", "age mean",
         "age closed form", "age closed form, no bound", "age max", "waits s/version", "train s/version", "stored",
         "length", "front", "versions", "dropped", "failed")  # fmt: skip


def tail_ratio(mean: float, cut: int, samples: int) -> float:
    """E[longest of `samples` lengths] / E[length] for a geometric length of `mean`, cut at `cut`."""
    stays = [(1.0 - 1.0 / mean) ** n for n in range(cut)]
    return sum(1.0 - (1.0 - stay) ** samples for stay in stays) / sum(stays)


def closed_form(found: dict[str, float], shape: dict[str, int]) -> float:
    """The mean age that the formula above gives for what was measured, if no bound cuts it off."""
    samples = shape["groups"] * shape["samples"]
    lives = found["running"] * tail_ratio(shape["mean"], shape["cut"], shape["samples"]) / samples
    return lives + found["learner works"] + found["stored"] / shape["groups"]


class Comparison:
    """One start of server and learner, and the bounds it measures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.shape = args, SHAPES_RUN[args.shape]
        self.until: float = time.monotonic() + args.budget_s

    def run(self) -> list[str]:
        """Measure each bound; returns what failed."""
        args, shape, failed = self.args, self.shape, []
        name = f"run-{int(time.time())}"
        running = args.running or shape["running"]
        run = trained_run(args.work.resolve(), name, args.shape, shape["mean"], shape["cut"], running, shape["groups"],
                          shape["samples"], args.engine, args.learner)  # fmt: skip
        with run:
            for place, bound in enumerate(args.staleness):
                try:
                    if place:
                        run.stop("buffer")
                    run.start("buffer", "buffer", f"--batch.max_staleness={bound}")
                    if not place:
                        run.start("rollout", "rollout")
                        run.start("learner", "learner")
                        run.wait("the first version", lambda: versions_of(run) > 0, args.start_s)
                    self.measure(run, bound)
                except (Died, TimeoutError, OSError, KeyError) as error:
                    failed.append(f"max_staleness {bound}: {type(error).__name__}: {error}")
                    progress(failed[-1])
                    if isinstance(error, Died) or time.monotonic() > self.until:
                        break
        return failed

    def measure(self, run: Processes, bound: int) -> None:
        """Count the versions of one bound and write what was found."""

        def left() -> float:
            return self.until - time.monotonic()

        began = versions_of(run) + bound + WARM_UP
        run.wait(
            f"{bound + WARM_UP} versions of warm-up at max_staleness {bound}", lambda: versions_of(run) >= began, left()
        )
        wanted = versions_of(run) + self.args.versions
        first = versions_of(run) - 1
        with Watch(run) as watch:
            what = f"{self.args.versions} versions at max_staleness {bound}"
            run.wait(what, lambda: versions_of(run) >= wanted or left() < 5.0, self.args.budget_s)
        found = figures_of(run.records()[first:]) | watch.figures()
        found["age closed form, no bound"] = closed_form(found, self.shape)
        found["age closed form"] = min(float(bound), found["age closed form, no bound"])
        (self.args.work / f"staleness-{bound}.json").write_text(json.dumps({"shape": self.args.shape, **found}))
        progress(f"max_staleness {bound}: {found}")


def rows_of(works: list[Path], shape: str, failed: list[str]) -> list[dict[str, Any]]:
    """The rows of all bounds that were measured, in order."""
    found: dict[int, dict[str, Any]] = {}
    for file in (file for work in works for file in work.glob("staleness-*.json")):
        figures = json.loads(file.read_text())
        if figures["shape"] == shape:
            found[int(file.stem.rpartition("-")[2])] = figures
    rows = [ResultRow("FAILED", 0.0, "", why) for why in failed]
    for bound, figures in sorted(found.items()):
        case = f"{bound}: max_staleness {bound}, {shape}"
        if 0 in found and bound:
            speed, synchronous = figures["versions/h"], found[0]["versions/h"]
            rows.append(ResultRow("versions/h against max_staleness 0", speed, "1/h", "synchronous", synchronous, case))
            against = f"target {TARGET[bound]:g}" if bound in TARGET else ""
            rows.append(ResultRow("  ratio", speed / synchronous, "", against, case=case))
        rows += [ResultRow(key, figures[key], "", case=case) for key in SHOWN if key in figures]
    return [row.line() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen2.5-1.5B", choices=SHAPES_RUN)
    parser.add_argument("--staleness", default=[0, 1, 2, 4, 8], type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--running", type=int, default=0, help="sequences; 0: the shape's own")
    parser.add_argument("--engine", type=json.loads, default={}, help="rollout.engine, as JSON")
    parser.add_argument("--learner", type=json.loads, default={}, help="keys of the section learner, as JSON")
    parser.add_argument("--start-s", type=float, default=300.0)
    parser.add_argument("--budget-s", type=float, default=570.0, help="seconds for all of it")
    parser.add_argument("--merge", action="store_true", help="measure nothing, make the table of --work and --also")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="folders of earlier commands")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-async"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "async_vs_sync.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    failed = [] if args.merge else Comparison(args).run()
    write(args.out, "async_vs_sync", rows_of([*args.also, args.work], args.shape, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
