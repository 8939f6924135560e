"""What a teacher saves: versions to a mean reward of .8 on the quickstart's Countdown, with a teacher and without one.

`python -m benchmarks.teachers --work DIR` runs the real processes on two CPU cores, half an hour long: per seed a
student as the quickstart makes it, trained on rewards alone, and with `examples/countdown/teacher.yaml` laid over. The
teacher was shown right answers to the training problems (`make_model --right-only`), and is the same for all seeds.
What was made or run before in DIR is kept. A run has reached the goal at the first version at which the mean reward of
the last WINDOW versions is that high. Prints one table; writes `benchmarks/results/teachers.json`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.runs.processes import free_port
from benchmarks.weights.table import ResultRow, progress, write

GOAL, WINDOW = 0.8, 5
TARGET = 1 / 3
"""Versions with a teacher, as a share of those on rewards alone, at most."""
FILES = Path(__file__).parents[1] / "examples" / "countdown"
TEACHER_STEPS = 4000


def make(*words: str | Path) -> None:
    """Run `python -m WORDS` and wait for its end."""
    progress(" ".join(map(str, words)))
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True, stdout=sys.stderr)


def records(run: Path) -> list[dict[str, float]]:
    """The records of versions of a run, in order."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "reward/mean" in line and "eval/version" not in line]


def reached(rewards: Sequence[float]) -> int | None:
    """The first version at which the mean reward of the last WINDOW versions is GOAL; None: it never was."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((end for end in ends if mean(rewards[end - WINDOW : end]) >= GOAL), None)


def trained(work: Path, seed: int, taught: bool, versions: int) -> list[dict[str, float]]:
    """The records of one run."""
    name = f"{'taught' if taught else 'rewards'}-seed{seed}"
    run, model, data = work / name, work / f"model-seed{seed}", work / "data"
    files = [FILES / "quickstart.yaml", *([FILES / "teacher.yaml"] if taught else [])]
    words = [f"--run.folder={work}", f"--run.name={name}", f"--run.seed={seed}", f"--run.versions={versions}"]
    words += [f"--model.path={model}", f"--data.train={data}/train.parquet", f"--data.eval={data}/eval.parquet"]
    words += [f"--buffer.address=tcp://127.0.0.1:{free_port()}", "--learner.schedule=constant", "--learner.lr=4e-4"]
    if taught:
        words += [f"--teacher.model={work / 'teacher'}", f"--teacher.port={free_port()}"]
    if not (run / "metrics.jsonl").exists() or len(records(run)) < versions:
        make("actors", "launch", *files, "--no-report", *words)
    return records(run)


def rows_of(seed: int, alone: list[dict[str, float]], taught: list[dict[str, float]]) -> list[ResultRow]:
    """The figures of one seed."""
    case = f"seed {seed}"
    by_rewards, by_both = (reached([one["reward/mean"] for one in each]) for each in (alone, taught))
    kl = [one["teacher/reverse_kl"] for one in taught]
    goal = f"to a mean reward of {GOAL:g}"
    rows = [ResultRow("reverse KL, last 5 versions", mean(kl[-5:]), "nat", "first 5 versions", mean(kl[:5]), case)]
    if by_both is None or by_rewards is None:
        ends = [mean([one["reward/mean"] for one in each[-WINDOW:]]) for each in (taught, alone)]
        return [ResultRow(f"never {goal}: the last mean, with a teacher", ends[0], "", "alone", ends[1], case), *rows]
    share = ResultRow("  as a share", by_both / by_rewards, "", "target", TARGET, case)
    versions = float(by_both), "", "rewards alone", float(by_rewards), case
    return [ResultRow(f"versions {goal}, with a teacher", *versions), share, *rows]


def main(argv: Sequence[str] | None = None) -> None:
    """Run by `python -m benchmarks.teachers`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.teachers", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for problems, models and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--versions", type=int, default=120, help="of the runs on rewards alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "teachers.json")
    args = parser.parse_args(argv)
    make("examples.countdown.make_problems", "--out", args.work / "data")
    given = ["examples.countdown.make_model", "--problems", args.work / "data" / "train.parquet"]
    steps = ["--steps", str(TEACHER_STEPS), "--seed", "7"]
    make(*given, "--out", args.work / "teacher", "--right-only", *steps)
    rows: list[ResultRow] = []
    for seed in args.seeds:
        make(*given, "--out", args.work / f"model-seed{seed}", "--seed", str(seed))
        taught = trained(args.work, seed, True, args.versions // 3)
        rows += rows_of(seed, trained(args.work, seed, False, args.versions), taught)
        write(args.out, "teachers", [row.line() for row in rows], show=seed == args.seeds[-1])


if __name__ == "__main__":
    main()
