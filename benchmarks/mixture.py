"""What drawing by difficulty saves a real model: sampled tokens until it solves .7 of the fit problems of a mixture.

`python -m benchmarks.mixture --work DIR` runs the real processes: per seed and bound on the age one run with
`data.difficulty: {}` and one that draws uniformly. Problems are Countdown's, as the prompts of the quickstart: 300
trivial ones, two numbers and their sum; 150 fit ones, three numbers from 1 to 9 that need a minus; 300 impossible ones,
whose target no expression has. The student is the quickstart's. It was shown right answers to trivial problems, and to
the fit ones 60 % random expressions: at first it solves 99 % of the trivial problems and a third of the fit ones.

Both runs train batches of 16 groups with variance, `batch.skip_zero_variance`, and differ in the tokens that such
a batch costs; those of groups that are left out count. `mean@2` of all fit problems, at temperature 1,
is taken after every EVERY versions. A run ends where it is .7. A run that draws uniformly ends without it as soon as
the tokens of the run by difficulty are TARGET of its own; the share then is a bound.

On two cores, about an hour in all; with `--gpus 0 1 2 3` all runs go side by side, server and learner of a run on two
GPUs. `--set learner.lr=1e-3` changes keys of all runs; what is in DIR is kept, and `--only nothing` makes no runs.
Prints one table; writes `benchmarks/results/mixture.json`.
"""

import argparse
import random
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache, lru_cache
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.runs.ports import free_port
from benchmarks.runs.processes import Died, Processes, records_in
from benchmarks.teachers import ENGINE_ON_GPU, FILES, ON_GPU, laid_over, mark_of, only_maker, setting, trained
from benchmarks.weights.table import ResultRow, progress, write
from examples.countdown.make_model import make_tokenizer
from examples.countdown.make_problems import render
from examples.countdown.solver import expressions, solutions
from examples.warm_start import make_model

GOAL, TARGET = 0.7, 0.6
"""Share of the fit problems to be solved, and tokens by difficulty as a share of those of uniform drawing, at most."""
KINDS = {"trivial": 300, "fit": 150, "impossible": 300}
"""Problems of each kind."""
LARGEST_ADDEND = 30
"""Numbers of trivial problems are 1 to this."""
SHOWN = {"trivial": 0.2, "fit": 0.6, "impossible": 0.2}
"""Shares of what the student is shown."""
RANDOM_SHARE = 0.6
"""Share of random expressions among the answers to fit problems. All answers have their tags: otherwise problems
without a solution would teach the tags."""
EVERY, ANSWERS = 4, 2
STEPS = 1300
CHANGES: dict[str, Any] = {
    "batch": {"groups": 16, "skip_zero_variance": True},
    "learner": {"lr": 4e-4, "schedule": "constant"},  # runs end at different versions
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
    """The name of the run: of its plan, its model, and of what `--set` changes."""
    name = plan.name + mark_of(args.work / f"model-seed{plan.seed}")
    return name + "".join("-" + re.sub(r"[^\w.-]", "", word.partition(".")[2]) for word in args.set)


def problems() -> list[Problem]:
    """KINDS of them, each once, in random order; the same in every call."""
    draw, found = random.Random(0), {kind: list[tuple[tuple[int, ...], int]]() for kind in KINDS}
    found["trivial"] = [(pair, sum(pair)) for pair in product(range(1, LARGEST_ADDEND + 1), repeat=2)]
    for numbers in combinations_with_replacement(range(1, 10), 3):
        for target in (other for other in range(1, 28) if other != sum(numbers)):
            kind = "fit" if solutions(numbers, target, "+-") else "impossible"
            found[kind].append((tuple(draw.sample(numbers, 3)), target))
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
        yield render("short", draw.sample(numbers, len(numbers)), target), f"<answer>{text}</answer>"


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


class MixtureProgress(NamedTuple):
    """A run so far."""

    trained: int
    """Versions."""
    solved: Mapping[int, float]
    """Solved share of the fit problems, by version."""
    tokens: Mapping[int, int]
    """Sampled until each of these versions, those of groups without variance included."""

    @property
    def goal(self) -> int | None:
        """The first version that solves GOAL of the fit problems; None: none did."""
        return min((version for version, share in self.solved.items() if share >= GOAL), default=None)

    @property
    def last(self) -> int:
        """The last version that was evaluated."""
        return max(self.solved)


def progress_of(folder: Path) -> MixtureProgress:
    """Read what the run in `folder` has written. Reads it again only if its metrics have grown."""
    file = folder / "metrics.jsonl"
    return read(folder, file.stat().st_size if file.exists() else 0)


@lru_cache(maxsize=32)
def read(folder: Path, size: int) -> MixtureProgress:
    """The progress of the run in `folder`, whose metrics have `size` bytes."""
    records, key = records_in(folder / "metrics.jsonl"), f"eval/fit/mean@{ANSWERS}"
    found = {int(one["eval/version"]): one[key] for one in records if key in one}
    return MixtureProgress(len(trained(records)), found, {version: tokens_until(folder, version) for version in found})


@cache
def tokens_until(folder: Path, version: int) -> int:
    """Tokens of all groups that were stored until the last batch of `version` was formed; this no longer changes."""
    formed = "SELECT formed_at FROM batches WHERE version = ?"
    with closing(sqlite3.connect(f"file:{folder / 'buffer.sqlite'}?mode=ro", uri=True)) as ledger:
        query = f"SELECT COALESCE(SUM(sampled), 0) FROM items WHERE stored_at <= ({formed})"
        return int(ledger.execute(query, (version - 1,)).fetchone()[0])


def is_over(run: MixtureProgress, versions: int, by_difficulty: MixtureProgress | None = None) -> bool:
    """Whether a run has its `versions` or the goal. One that draws uniformly is over without it when the tokens of the
    run `by_difficulty` are TARGET of its own."""
    if run.trained >= versions or run.goal is not None:
        return True
    if by_difficulty is None or by_difficulty.goal is None or not run.solved:
        return False
    return by_difficulty.tokens[by_difficulty.goal] <= TARGET * run.tokens[run.last]


def play(args: argparse.Namespace, plan: MixturePlan) -> MixtureProgress:
    """Run until the run `is_over`; its progress. A run that is over is only read."""
    folder, peer = (args.work / name_of(args, each) for each in (plan, plan._replace(by_difficulty=True)))

    def done() -> bool:
        return is_over(progress_of(folder), args.versions, None if plan.by_difficulty else progress_of(peer))

    if args.only != "nothing" and not done():
        try:
            with only_maker(folder):
                file = folder / "given.yaml"
                file.write_text(yaml.safe_dump(config_of(args, plan), sort_keys=False))
                gpus = dict(zip(("rollout", "learner"), plan.gpus or (None, None), strict=True))
                with Processes(file, gpus) as run:
                    for name in ("buffer", "rollout", "learner"):
                        run.start(name, name)
                    run.wait("the end of the run", done, args.budget_s)
        except (Died, TimeoutError) as error:
            progress(f"{plan.name}: {error}")
    return progress_of(folder)


def rows_of(case: str, uniform: MixtureProgress, chosen: MixtureProgress) -> list[ResultRow]:
    """The figures of two runs that differ in their draws."""
    if not uniform.solved or not chosen.solved:
        return []
    share = "solved share of the fit problems"
    first = ResultRow(f"{share} at first", chosen.solved[0], "", "uniform drawing", uniform.solved[0], case)
    last = ResultRow(
        f"{share} at the end", chosen.solved[chosen.last], "", "uniform drawing", uniform.solved[uniform.last], case
    )
    if chosen.goal is None:
        return [first, last, ResultRow(f"not {GOAL:g} within versions", chosen.last, "", "uniform", uniform.last, case)]
    reached, end = uniform.goal is not None, uniform.last if uniform.goal is None else uniform.goal
    tokens, peer = chosen.tokens[chosen.goal], uniform.tokens[end]
    drawn = "uniform drawing" if reached else "uniform drawing, more than"
    what = "share of the tokens" if reached else "share of the tokens, less than"
    return [
        first,
        last,
        ResultRow(f"versions to {GOAL:g}", chosen.goal, "", drawn, end, case),
        ResultRow(f"sampled tokens to {GOAL:g}", tokens, "", drawn, peer, case),
        ResultRow(what, tokens / peer, "", "target", TARGET, case),
    ]


def plans(seeds: Sequence[int], staleness: Sequence[int], gpus: Sequence[int]) -> list[MixturePlan]:
    """All runs, in pairs of by difficulty and uniform; each takes the next two GPUs."""
    kinds = [(seed, age, chosen) for age in staleness for seed in seeds for chosen in (True, False)]
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
    for plan, chosen, uniform in zip(wanted[::2], found[::2], found[1::2], strict=True):
        rows += rows_of(f"{plan.staleness}, seed {plan.seed}", uniform, chosen)
    write(args.out, "mixture", [row.line() for row in rows], show=True)


if __name__ == "__main__":
    main()
