"""What does the scheduler of a rollout server's vLLM cost a step, against vLLM's own? CPU, no model.

`python -m benchmarks.scheduler`: the real schedulers plan steps for 512 sequences with prompts of 128 tokens in groups
of 16, and take what a played model samples (`benchmarks/runs/played_model.py`); a group comes when a place is free.
Answers are all of 1,865 tokens, or geometric with mean 1,000 and cut at 4,096, as in `benchmarks.rollout --cases
long-tail`. While vLLM's engine process does this, it launches nothing on the GPU. The schedulers take turns, `--rounds`
of them. Prints one table, medians over the steps of all rounds; writes JSON.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.runs.played_model import PlayedModel, engine_config, scheduler_of
from benchmarks.weights.shapes import folder_of
from benchmarks.weights.table import ResultRow, progress, write
from rollout.engine.scheduling.scheduler import KeepingAsyncScheduler

SEQUENCES, SAMPLES, PROMPT, LONGEST, FIXED, MEAN, BLOCKS = 512, 16, 128, 4096, 1865, 1000, 80_000
OURS, THEIRS = "a rollout server's", "vLLM's own"
KINDS = {OURS: KeepingAsyncScheduler, THEIRS: AsyncScheduler}


class Served:
    """A scheduler whose places are kept taken; `fixed`: answers of one length, whose ends are spread at first."""

    def __init__(self, kind: Any, config: Any, fixed: bool) -> None:
        self._draw, self._fixed, self._number, self._taken = random.Random(0), fixed, 0, 0
        self.model = PlayedModel(scheduler_of(kind, config, BLOCKS), 2, lambda name, number: (number + 1000, -1.0))

    def step(self) -> tuple[float, float]:
        """Seconds that the scheduler took to plan a step, and to take another."""
        while self._taken < SEQUENCES:
            self._group()
        began = time.perf_counter()
        self.model.schedule()
        planned = time.perf_counter() - began
        found = self.model.output()
        began = time.perf_counter()
        sent = {} if found is None else self.model.scheduler.update_from_output(*found)
        taken = time.perf_counter() - began
        self._taken -= sum(each.finish_reason is not None for outputs in sent.values() for each in outputs.outputs)
        return planned, taken

    def _group(self) -> None:
        first, prompt = self._number < SEQUENCES, self._draw.choices(range(3, 500), k=PROMPT)
        length = self._draw.randrange(1, FIXED) if first else FIXED
        for _ in range(SAMPLES):
            answer = length if self._fixed else min(LONGEST, 1 + int(self._draw.expovariate(1 / MEAN)))
            self.model.add(f"r{self._number}", prompt, max_tokens=answer, logprobs=0)
            self._number, self._taken = self._number + 1, self._taken + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-up", type=int, default=2000, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=400, help="of each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-scheduler"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scheduler.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    config = engine_config(folder_of("speck", args.work), SEQUENCES + SAMPLES, 2 * SEQUENCES, PROMPT + LONGEST)
    rows: list[dict[str, Any]] = []
    for lengths, fixed in (("all of 1,865", True), ("geometric, mean 1,000", False)):
        served = {name: Served(kind, config, fixed) for name, kind in KINDS.items()}
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
        for one in served.values():
            for _ in range(args.warm_up):
                one.step()
        for number in range(args.rounds):
            for name, one in served.items():
                seen[name] += [one.step() for _ in range(args.steps)]
            progress(f"{lengths}: round {number + 1} of {args.rounds}")
        rows += [row.line() for row in rows_of(f"{SEQUENCES} sequences, answers {lengths}", seen)]
        write(args.out, "scheduler", rows, show=False)
    write(args.out, "scheduler", rows)
    return 0


def rows_of(case: str, seen: dict[str, list[tuple[float, float]]]) -> list[ResultRow]:
    """Milliseconds of each part of a step, ours beside vLLM's."""
    ms = {
        name: [1e3 * median(part) for part in (*zip(*steps, strict=True), [sum(step) for step in steps])]
        for name, steps in seen.items()
    }
    parts = ("to plan a step", "to take what a step sampled", "both")
    rows = [
        ResultRow(f"ms {part}, {OURS} scheduler", ours, "ms", THEIRS, theirs, case)
        for part, ours, theirs in zip(parts, ms[OURS], ms[THEIRS], strict=True)
    ]
    return [*rows, ResultRow("  ratio", ms[THEIRS][2] / ms[OURS][2], "", "times vLLM's own", case=case)]


if __name__ == "__main__":
    sys.exit(main())
