"""What drawing by difficulty saves a real model: sampled tokens until it solves .7 of the fit problems of a mixture.

`python -m benchmarks.mixture --work DIR` runs the real processes: per seed and bound on the age one run that draws
uniformly and one with `data.difficulty: {}`. Problems are Countdown's, as the prompts of the quickstart: 600 trivial
ones, whose target is the sum, 300 fit ones, which need a minus, and 600 impossible ones, whose target no expression
has. The student is as large as the quickstart's, and solves the trivial ones from the beginning: it was shown right
answers to them, and to the others corrupted ones as the quickstart's. `mean@2` of all fit problems, at temperature 1,
is taken after every EVERY versions; a run ends where it is .7.

One core or two on the CPU, hours long; with `--gpus 0 1 2 3` all runs go side by side, server and learner of a run on
two GPUs. `--set learner.lr=1e-3` changes keys of all runs; what is in DIR is kept, and `--only nothing` makes no runs.
Prints one table; writes `benchmarks/results/mixture.json`.
"""

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement, permutations
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.runs.ports import free_port
from benchmarks.runs.processes import Died, Processes, records_in
from benchmarks.teachers import ENGINE_ON_GPU, FILES, ON_GPU, laid_over, only_maker, setting, trained
from benchmarks.weights.table import ResultRow, progress, write
from examples.countdown.make_model import make_tokenizer
from examples.countdown.make_problems import render
from examples.countdown.solver import expressions, solutions
from examples.warm_start import make_model

GOAL, TARGET = 0.7, 0.6
"""Share of the fit problems to be solved, and tokens by difficulty as a share of those of uniform drawing, at most."""
KINDS = {"trivial": 600, "fit": 300, "impossible": 600}
"""Problems of each kind."""
SHOWN = {"trivial": 0.2, "fit": 0.6, "impossible": 0.2}
"""Shares of what the student is shown."""
RANDOM_SHARE, UNTAGGED_SHARE = 0.4, 0.2
"""Shares of corrupted and of untagged answers, among answers to problems that are not trivial."""
EVERY, ANSWERS = 4, 2
STEPS = 1300
CHANGES: dict[str, Any] = {
    "batch": {"groups": 32, "samples": 8},
    "learner": {"lr": 8e-4, "schedule": "constant"},
    "eval": {"every": EVERY},
}
"""What all runs change of the quickstart, before `--set`."""
LONGEST_S = 7200.0
Problem = dict[str, Any]


class MixturePlan(NamedTuple):
    """One run."""

    seed: int
    staleness: int
    by_difficulty: bool
    gpus: tuple[int, int] | None
    """Of server and learner; None: they run on the CPU."""

    @property
    def name(self) -> str:
        return f"{'difficulty' if self.by_difficulty else 'uniform'}-staleness{self.staleness}-seed{self.seed}"


def name_of(args: argparse.Namespace, plan: MixturePlan) -> str:
    """The name of the run: of its plan, and of what `--set` changes."""
    return plan.name + "".join("-" + re.sub(r"[^\w.-]", "", word.partition(".")[2]) for word in args.set)


def kind_of(numbers: Sequence[int], target: int) -> str:
    """One of KINDS."""
    if target == sum(numbers):
        return "trivial"
    return "fit" if solutions(numbers, target, "+-") else "impossible"


def problems() -> list[Problem]:
    """KINDS of them, each once, in random order; the same in every call."""
    draw, found = random.Random(0), {kind: list[tuple[tuple[int, ...], int]]() for kind in KINDS}
    for numbers in combinations_with_replacement(range(1, 10), 3):
        for target in range(1, 28):
            kind = kind_of(numbers, target)
            orders = sorted(set(permutations(numbers)))
            found[kind] += [(order, target) for order in (orders if kind == "trivial" else draw.sample(orders, 1))]
    chosen = [(kind, one) for kind, number in KINDS.items() for one in draw.sample(found[kind], number)]
    draw.shuffle(chosen)
    return [
        {
            "data_source": "countdown",
            "prompt": [{"role": "user", "content": render("short", numbers, target)}],
            "reward_model": {"style": "rule", "ground_truth": {"target": target, "numbers": list(numbers)}},
            "kind": kind,
        }
        for kind, (numbers, target) in chosen
    ]


def texts(rows: Sequence[Problem], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Endless prompts and answers: right ones to trivial problems, corrupted ones to the others."""
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    possible = [list(expressions(truth["numbers"], "+-")) for truth in truths]
    right = [solutions(truth["numbers"], truth["target"], "+-") for truth in truths]
    places = {kind: [at for at, row in enumerate(rows) if row["kind"] == kind] for kind in KINDS}
    while True:
        index = draw.choice(places[draw.choices([*SHOWN], [*SHOWN.values()])[0]])
        numbers, target = truths[index]["numbers"], truths[index]["target"]
        if rows[index]["kind"] == "trivial":
            yield render("short", numbers, target), f"<answer>{'+'.join(map(str, numbers))}</answer>"
            continue
        corrupt = not right[index] or draw.random() < RANDOM_SHARE
        text = draw.choice(possible[index] if corrupt else right[index])
        tagged = f"<answer>{text}</answer>" if draw.random() >= UNTAGGED_SHARE else text
        yield render("short", draw.sample(numbers, len(numbers)), target), tagged


def prepare(work: Path, seeds: Sequence[int]) -> None:
    """Write problems and students; what was made before is kept."""
    rows, data = problems(), work / "data"
    data.mkdir(parents=True, exist_ok=True)
    for name, kinds in (("train", set(KINDS)), ("fit", {"fit"})):
        table = pa.Table.from_pylist([row for row in rows if row["kind"] in kinds])
        pq.write_table(table, data / f"{name}.parquet")
    for seed in seeds:
        asked = {"seed": seed, "steps": STEPS, "problems": rows}
        pairs = texts(rows, random.Random(seed))
        shown = ({"prompt": prompt, "answer": answer} for prompt, answer in pairs)
        progress(make_model(work / f"model-seed{seed}", asked, make_tokenizer(), shown, plain=True))


def config_of(args: argparse.Namespace, plan: MixturePlan) -> dict[str, Any]:
    """The run file."""
    config: dict[str, Any] = yaml.safe_load((FILES / "quickstart.yaml").read_text(encoding="utf-8"))
    fit = {"path": f"{args.work}/data/fit.parquet", "samples": ANSWERS, "temperature": 1.0}
    own = {
        "run": {"folder": str(args.work), "name": name_of(args, plan), "seed": plan.seed, "versions": args.versions},
        "model": {"path": f"{args.work}/model-seed{plan.seed}"},
        "data": {"train": f"{args.work}/data/train.parquet", "eval": {"fit": fit}},
        "batch": {"max_staleness": plan.staleness},
        "buffer": {"address": f"tcp://127.0.0.1:{free_port()}"},
    }
    config["data"]["eval"] = {}
    for change in (CHANGES, own, {"data": {"difficulty": {}}} if plan.by_difficulty else {}, *map(setting, args.set)):
        laid_over(config, change)
    if plan.gpus:
        laid_over(config, ON_GPU | {"rollout": {"device": "cuda", "engine": ENGINE_ON_GPU}})
    return config


def solved(records: Sequence[dict[str, Any]]) -> dict[int, float]:
    """The solved share of the fit problems, by version."""
    key = f"eval/fit/mean@{ANSWERS}"
    return {int(one["eval/version"]): one[key] for one in records if key in one}


def tokens_to_goal(records: Sequence[dict[str, Any]]) -> tuple[int, float] | None:
    """Version at which the goal was reached, and the tokens sampled until then; None: it never was."""
    version = min((version for version, share in solved(records).items() if share >= GOAL), default=None)
    if version is None:
        return None
    return version, sum(one["tokens_sampled"] for one in trained(records) if one["version"] <= version)


def play(args: argparse.Namespace, plan: MixturePlan) -> list[dict[str, Any]]:
    """Run until the goal is reached or the versions are trained; the records. A run that has them is only read."""
    folder = args.work / name_of(args, plan)

    def done() -> bool:
        records = records_in(folder / "metrics.jsonl")
        return len(trained(records)) >= args.versions or tokens_to_goal(records) is not None

    if args.only != "nothing" and not done():
        try:
            with only_maker(folder):
                file = folder / "given.yaml"
                file.write_text(yaml.safe_dump(config_of(args, plan), sort_keys=False))
                gpus = dict(zip(("rollout", "learner"), plan.gpus or (None, None), strict=True))
                with Processes(file, gpus) as run:
                    for name in ("buffer", "rollout", "learner"):
                        run.start(name, name)
                    run.wait("the goal, or the last version", done, args.budget_s)
        except (Died, TimeoutError) as error:
            progress(f"{plan.name}: {error}")
    return records_in(folder / "metrics.jsonl")


def rows_of(case: str, uniform: Sequence[dict[str, Any]], chosen: Sequence[dict[str, Any]]) -> list[ResultRow]:
    """The figures of two runs that differ in their draws."""
    shares = [solved(each) for each in (chosen, uniform)]
    if not all(shares):
        return []
    last = [share[max(share)] for share in shares]
    found = [ResultRow("solved share of the fit problems at the end", last[0], "", "uniform drawing", last[1], case)]
    by_difficulty, peer = tokens_to_goal(chosen), tokens_to_goal(uniform)
    if by_difficulty is None:
        return [*found, ResultRow(f"not {GOAL:g} within versions", max(shares[0]), "", "uniform", max(shares[1]), case)]
    bound = "" if peer else ", less than"
    versions, tokens = peer or (max(shares[1]), sum(one["tokens_sampled"] for one in trained(uniform)))
    drawn = "uniform drawing" if peer else "uniform drawing, more than"
    found.append(ResultRow(f"versions to {GOAL:g}", by_difficulty[0], "", drawn, versions, case))
    found.append(ResultRow(f"sampled tokens to {GOAL:g}", by_difficulty[1], "", drawn, tokens, case))
    return [*found, ResultRow(f"share of the tokens{bound}", by_difficulty[1] / tokens, "", "target", TARGET, case)]


def plans(seeds: Sequence[int], staleness: Sequence[int], gpus: Sequence[int]) -> list[MixturePlan]:
    """All runs, in pairs of uniform and by difficulty; each takes the next two GPUs."""
    kinds = [(seed, age, chosen) for age in staleness for seed in seeds for chosen in (False, True)]
    pairs = [(gpus[at % len(gpus)], gpus[(at + 1) % len(gpus)]) if gpus else None for at in range(len(kinds))]
    return [MixturePlan(*kind, pair) for kind, pair in zip(kinds, pairs, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run by `python -m benchmarks.mixture`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixture", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for problems, models and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--versions", type=int, default=300, help="of a run, at most")
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="at least two; none: on the CPU")
    parser.add_argument("--only", choices=["models", "nothing"], help="make no runs; nothing: no models either")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="of all runs")
    parser.add_argument("--budget-s", type=float, default=LONGEST_S, help="of a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "mixture.json")
    args = parser.parse_args(argv)
    args.work = args.work.resolve()
    if len(args.gpus) == 1:
        parser.error("--gpus: the learner needs another GPU than the server; name two or more")
    if args.only != "nothing":
        prepare(args.work, args.seeds)
    if args.only == "models":
        return
    wanted = plans(args.seeds, args.staleness, args.gpus)
    with ThreadPoolExecutor(len(wanted) if args.gpus else 1) as pool:
        found = list(pool.map(lambda plan: play(args, plan), wanted))
    rows = []
    for plan, uniform, chosen in zip(wanted[::2], found[::2], found[1::2], strict=True):
        rows += rows_of(f"{plan.staleness}, seed {plan.seed}", uniform, chosen)
    write(args.out, "mixture", [row.line() for row in rows], show=True)


if __name__ == "__main__":
    main()
