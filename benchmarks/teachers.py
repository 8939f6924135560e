"""What a teacher saves: versions to a mean reward of .8 on the quickstart's Countdown, with a teacher and without one.

`python -m benchmarks.teachers --work DIR` runs the real processes on two CPU cores, an hour long: per seed a student as
the quickstart makes it, trained on rewards alone, and with `examples/countdown/teacher.yaml` laid over. The teacher was
shown right answers to the training problems (`make_model --right-only`), and is the same for all seeds. With
`--gpus 0 1 2 3` all runs go side by side: server and teacher of a run share one GPU, its learner has the next, all in
bfloat16. `--teacher FOLDER` takes another teacher, such as the export of a run on rewards alone. `--set
run.versions=24 learner.lr=4e-3` changes keys of the runs with the teacher, `--both batch.max_staleness=0` keys of all
runs; `--only rewards`, `teacher` or `nothing` leaves other runs out, which count if they were made before: what is in
DIR is kept. A run has reached the goal at the
first version at which the mean reward of the last WINDOW versions is that high, and ends there. Prints one table;
writes `benchmarks/results/teachers.json`.
"""

import argparse
import fcntl
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml

from benchmarks.runs.ports import free_port
from benchmarks.runs.processes import FIRST_GPU, Died, Processes, records_in
from benchmarks.weights.table import ResultRow, progress, write

GOAL, WINDOW = 0.8, 5
TARGET = 1 / 3
"""Versions with a teacher, as a share of those on rewards alone, at most."""
FILES = Path(__file__).parents[1] / "examples" / "countdown"
TEACHER_STEPS = 4000
ALONE = {"learner": {"lr": 4e-4, "schedule": "constant"}}
"""What the runs on rewards alone change of the quickstart: its own schedule ends at its last version."""
TAUGHT = {"teacher": {"top_k": 16, "weight": 10}, "learner": {"lr": 2e-3}}
"""What the runs with the teacher change of the quickstart and `teacher.yaml`, before `--set`."""
ON_GPU: dict[str, dict[str, Any]] = {
    "model": {"dtype": "bfloat16"},
    "learner": {"device": "cuda", "attention": "sdpa", "compile": False},
    "rollout": {"device": "cuda"},
    "weights": {"probe_tolerance": 0.2},  # log-probabilities of -20 differ by .1 in bfloat16
}
ENGINE_ON_GPU = {"enforce_eager": True, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 * 2**20}
LONGEST_S = 7200.0


class Plan(NamedTuple):
    """One run."""

    seed: int
    taught: bool
    gpu: int | None
    """The GPU that the server and the teacher share; None: they run on the CPU."""
    learner_gpu: int | None


def make(*words: str | Path) -> None:
    """Run `python -m WORDS` and wait for its end."""
    progress(" ".join(map(str, words)))
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True, stdout=sys.stderr)


def trained(records: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """The records of versions, in order, without those of evaluations."""
    return [record for record in records if "reward/mean" in record and "eval/version" not in record]


def reached(rewards: Sequence[float]) -> int | None:
    """The first version at which the mean reward of the last WINDOW versions is GOAL; None: it never was."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((end for end in ends if mean(rewards[end - WINDOW : end]) >= GOAL), None)


def laid_over(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`config` with `changes`, section by section and key by key."""
    for key, value in changes.items():
        inner = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = laid_over(config[key], value) if inner else value
    return config


def setting(word: str) -> dict[str, Any]:
    """A key of the run file from `section.key=value`."""
    keys, _, value = word.partition("=")
    found: Any = yaml.safe_load(value)
    for key in reversed(keys.split(".")):
        found = {key: found}
    return dict(found)


def changes(args: argparse.Namespace, plan: Plan) -> list[str]:
    """What the command line changes of the run."""
    return [*args.both, *(args.set if plan.taught else [])]


def last_version(args: argparse.Namespace, plan: Plan) -> int:
    """Where the run ends if it does not reach the goal."""
    given = [setting(word).get("run", {}).get("versions") for word in changes(args, plan)]
    return max([int(versions) for versions in given if versions], default=args.versions)


def mark_of(*models: Path) -> str:
    """Part of a run's name, so that models of other records have runs of their own; "" for models without a record."""
    records = [model / "warm_start.json" for model in models]
    known = [record.read_bytes() for record in records if record.exists()]
    return f"-{sha256(b''.join(known)).hexdigest()[:6]}" if known else ""


def name_of(args: argparse.Namespace, plan: Plan) -> str:
    """The name of the run: of the seed, its models, and of what the command line changes."""
    models, other = [args.work / f"model-seed{plan.seed}"], ""
    if plan.taught:
        models.append(args.teacher or args.work / "teacher")
        other = f"-{sha256(str(args.teacher).encode()).hexdigest()[:6]}" if args.teacher else ""
    changed = "".join("-" + re.sub(r"[^\w.-]", "", word.partition(".")[2]) for word in changes(args, plan))
    return f"{'taught' if plan.taught else 'rewards'}-seed{plan.seed}{mark_of(*models)}{other}{changed}"


def run_of(args: argparse.Namespace, plan: Plan) -> Processes:
    """The processes of a run, not started yet, whose folder exists."""
    work, name, on_gpu = args.work, name_of(args, plan), plan.gpu is not None
    sources = ["quickstart.yaml", *(["teacher.yaml"] if plan.taught else [])]
    config: dict[str, Any] = {}
    for source in sources:
        laid_over(config, yaml.safe_load((FILES / source).read_text(encoding="utf-8")))
    run = {"folder": str(work), "name": name, "seed": plan.seed, "versions": args.versions}
    data = {"train": f"{work}/data/train.parquet", "eval": {}}
    buffer = {"address": f"tcp://127.0.0.1:{free_port()}"}
    own = {"run": run, "model": {"path": f"{work}/model-seed{plan.seed}"}, "data": data, "buffer": buffer}
    laid_over(config, own)
    for change in [TAUGHT if plan.taught else ALONE, *map(setting, changes(args, plan))]:
        laid_over(config, change)
    if plan.taught:
        laid_over(config, {"teacher": {"model": str(args.teacher or work / "teacher"), "port": free_port()}})
    if on_gpu:
        laid_over(config, ON_GPU | {"rollout": {"device": "cuda", "engine": ENGINE_ON_GPU}})
        laid_over(config, {"teacher": {"engine": {**ENGINE_ON_GPU, "dtype": "bfloat16"}}} if plan.taught else {})
    file = work / name / "given.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return Processes(file, {"rollout": plan.gpu, "learner": plan.learner_gpu})


@contextmanager
def only_maker(folder: Path) -> Iterator[None]:
    """Raises Died if another benchmark makes the run in `folder` now: it would read a run file of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "benchmark.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Died(f"another benchmark makes the run in {folder} now; wait for its end") from None
        yield


def play(args: argparse.Namespace, plan: Plan) -> list[dict[str, float]]:
    """Run until the goal is reached or the versions are trained; the records. A run that was made before, or that
    `--only` leaves out, is only read."""
    folder = args.work / name_of(args, plan)

    def done() -> bool:
        records = trained(records_in(folder / "metrics.jsonl"))
        return len(records) >= last_version(args, plan) or reached([one["reward/mean"] for one in records]) is not None

    if args.only in (None, "teacher" if plan.taught else "rewards") and not done():
        try:
            with only_maker(folder):
                make_run(args, plan, done)
        except (Died, TimeoutError) as error:
            progress(f"{folder.name}: {error}")
    return trained(records_in(folder / "metrics.jsonl"))


def make_run(args: argparse.Namespace, plan: Plan, done: Callable[[], bool]) -> None:
    """Start the processes of a run, and stop them when it is `done`. Raises Died and TimeoutError."""
    with run_of(args, plan) as run:
        if plan.taught:  # no end of the weights wire: it may share the server's GPU as it is
            seen = {} if plan.gpu is None else {"CUDA_VISIBLE_DEVICES": str(FIRST_GPU + plan.gpu)}
            run.start("teacher", "rollout teacher", "--name", "teacher-0", **seen)
        for name in ("buffer", "rollout", "learner"):
            run.start(name, name)
        run.wait("the goal, or the last version", done, args.budget_s)


def rows_of(seed: int, alone: list[dict[str, float]], taught: list[dict[str, float]]) -> list[ResultRow]:
    """The figures of one seed."""
    case = f"seed {seed}"
    by_rewards, by_both = (reached([one["reward/mean"] for one in each]) for each in (alone, taught))
    kl = [one["teacher/reverse_kl"] for one in taught]
    goal = f"to a mean reward of {GOAL:g}"
    rows = [ResultRow("reverse KL, last 5 versions", mean(kl[-5:]), "nat", "first 5 versions", mean(kl[:5]), case)]
    if by_both is None:
        ends = [mean([one["reward/mean"] for one in each[-WINDOW:]]) for each in (taught, alone)]
        what = f"not {goal} in {len(taught)} versions: the last mean"
        return [ResultRow(what, ends[0], "", f"alone, after {len(alone)}", ends[1], case), *rows]
    least, bound = by_rewards or len(alone), "" if by_rewards else ", less than"
    share = ResultRow(f"  as a share{bound}", by_both / least, "", "target", TARGET, case)
    versions = float(by_both), "", f"rewards alone{'' if by_rewards else ', more than'}", float(least), case
    return [ResultRow(f"versions {goal}, with a teacher", *versions), share, *rows]


def prepare(args: argparse.Namespace, workers: int) -> None:
    """Make problems, teacher and students, side by side; what was made before is kept."""
    make("examples.countdown.make_problems", "--out", args.work / "data")
    given = ["examples.countdown.make_model", "--problems", args.work / "data" / "train.parquet"]
    steps = ["--steps", str(TEACHER_STEPS), "--seed", "7"]
    models = [] if args.teacher else [[*given, "--out", args.work / "teacher", "--right-only", *steps]]
    models += [[*given, "--out", args.work / f"model-seed{seed}", "--seed", str(seed)] for seed in args.seeds]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda words: make(*words), models))


def plans(seeds: Sequence[int], gpus: Sequence[int]) -> list[Plan]:
    """All runs; each takes the next GPU."""
    kinds = [(seed, taught) for taught in (False, True) for seed in seeds]
    if not gpus:
        return [Plan(seed, taught, None, None) for seed, taught in kinds]
    ring = [gpus[number % len(gpus)] for number in range(len(kinds) + 1)]
    return [Plan(*kind, ring[number], ring[number + 1]) for number, kind in enumerate(kinds)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run by `python -m benchmarks.teachers`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.teachers", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for problems, models and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--versions", type=int, default=120, help="of a run, at most")
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="at least two; none: on the CPU")
    parser.add_argument("--only", choices=("rewards", "teacher", "nothing"), help="make no other runs")
    parser.add_argument("--teacher", type=Path, help="folder of a model; its own is made if there is none")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="of runs with the teacher")
    parser.add_argument("--both", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="of all runs")
    parser.add_argument("--budget-s", type=float, default=LONGEST_S, help="of a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "teachers.json")
    args = parser.parse_args(argv)
    args.work, args.teacher = args.work.resolve(), args.teacher and args.teacher.resolve()
    if len(args.gpus) == 1:
        parser.error("--gpus: the learner needs another GPU than the server; name two or more")
    wanted = plans(args.seeds, args.gpus)
    workers = len(wanted) if args.gpus else 1
    prepare(args, workers)
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda plan: play(args, plan), wanted))
    alone, taught = found[: len(args.seeds)], found[len(args.seeds) :]
    triples = zip(args.seeds, alone, taught, strict=True)
    rows = [row for seed, *both in triples if all(both) for row in rows_of(seed, *both)]
    write(args.out, "teachers", [row.line() for row in rows], show=True)


if __name__ == "__main__":
    main()
