"""Does a real model learn? Countdown with two and three numbers, held-out problems before, during and after.

`python -m benchmarks.learns --model SMOLLM2` (two GPUs: one serves, one learns; about seven minutes for
SmolLM2-135M-Instruct) makes problems, teaches the model for `--teach` steps how they are searched
(`examples/countdown/teach_search.py`), and trains it by the real processes with `examples/countdown/smollm2.yaml`,
evaluating on problems that neither saw: four answers each at temperature 1, whose mean is pass@1. `--example chain_sum`
is the same with sums of reasoning-gym. `--staleness 0` and `16` repeat the run with the same seed and another bound on
age; what was made before is kept. The run ends after `--versions`, or with what it has after `--budget-s`.
The peer is a public log of TinyZero on Countdown (solved share at its versions 52, 92 and 170), whose model is larger
and whose problems are harder: it says what a curve of this kind looks like, not who is better.
Writes the rows of this run into `benchmarks/results/learns.json`, beside those of the others, its first and last
answers into a text file next to it, and draws `learns.png` of all of them. `--model TOY --toy` is the small form for
CPU, with the quickstart's model.
"""

import argparse
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.runs.ports import free_port
from benchmarks.runs.processes import Died, Processes
from benchmarks.weights.table import ResultRow, progress, write

TINYZERO = {52: 0.036, 92: 0.089, 170: 0.119}
"""Solved share by version, from a public log."""
SOLVED = {"countdown": "sample/solved", "chain_sum": "reward/mean"}
"""Key of the share of right answers in a version's record: a sum's score is 1 or 0."""
POINTS = (52, 92, 170)
CURVE = "held out, pass@1 at version "
"""Rows that the picture draws."""
WINDOW = 10
"""Versions that a point of the curve is the mean of."""
HELD_OUT, SAMPLES = 256, 4
"""Problems of the test set, and answers to each."""
PROBLEMS_MADE = ("--numbers", "2", "3", "--largest", "20", "--target", "40", "--operations", "+-*", "--eval", "500")
TOY_PROBLEMS = ("--numbers", "2", "3", "--largest", "9", "--target", "20", "--operations", "+-", "--eval", "60")
TOY_RUN: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32"},
    "data": {"max_prompt_tokens": 320},
    "sampling": {"max_tokens": 64},
    "batch": {"groups": 4, "samples": 4},
    "learner": {"tokens_per_microbatch": 8192, "threads": 1},
    "rollout": {"sequences": 32, "engine": {"max_model_len": 384, "kv_cache_memory_bytes": 256 * 2**20}},
}


def make(*words: str | Path) -> None:
    """Run `python -m WORDS` and wait."""
    progress(" ".join(map(str, words[:1])))
    subprocess.run([sys.executable, "-m", *map(str, words)], check=True, stdout=sys.stderr)


def prepare(args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """The keys of `data` and the folder of the model that was taught; what was made before is kept."""
    if args.example == "chain_sum":
        model = args.work / "taught-chain_sum"
        make("examples.chain_sum.teach_form", "--model", args.model, "--out", model)
        return {}, model
    data, model = args.work / "problems", args.work / "taught"
    wording = ("--prompt", "words", "--seed", str(args.seed))
    if args.toy:
        make("examples.countdown.make_problems", "--out", data, *TOY_PROBLEMS, *wording)
        base = args.work / "toy"
        make("examples.countdown.make_model", "--problems", data / "train.parquet", "--out", base, "--steps", "30")
    else:
        make("examples.countdown.make_problems", "--out", data, *PROBLEMS_MADE, "--count", "9000", *wording)
        base = args.model
    given = ["--model", base, "--problems", data / "train.parquet", "--out", model, "--steps", str(args.teach)]
    make("examples.countdown.teach_search", *given, "--operations", "+-" if args.toy else "+-*")
    held_out = {"path": str(data / "eval.parquet"), "limit": HELD_OUT, "samples": SAMPLES, "temperature": 1.0}
    return {"train": str(data / "train.parquet"), "eval": {"held_out": held_out}}, model


def run_of(args: argparse.Namespace, data: dict[str, Any], model: Path) -> Processes:
    """The run's processes, not started yet."""
    source = Path(__file__).parents[1] / "examples" / args.example / "smollm2.yaml"
    config: dict[str, dict[str, Any]] = yaml.safe_load(source.read_text(encoding="utf-8"))
    name = f"{args.example}-{args.staleness}-{int(time.time())}"
    changes: dict[str, dict[str, Any]] = {
        "run": {"name": name, "folder": str(args.work), "versions": args.versions, "seed": args.seed},
        "model": {"path": str(model)},
        "data": data,
        "eval": {"every": args.every},
        "batch": {"max_staleness": args.staleness},
        "buffer": {"address": f"tcp://127.0.0.1:{free_port()}"},
    }
    for more in (changes, TOY_RUN if args.toy else {}, *map(setting, args.set)):
        for section, keys in more.items():
            config[section] = {**config.get(section, {}), **keys}
    file = args.work / name / "given.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    server, learner = (None, None) if args.toy else args.gpus
    return Processes(file, {"rollout": server, "learner": learner})


def setting(word: str) -> dict[str, dict[str, Any]]:
    """A key of the run file from `section.key=value`."""
    (section, key), value = word.partition("=")[0].split("."), word.partition("=")[2]
    return {section: {key: yaml.safe_load(value)}}


def trained(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of versions, without those of evaluations."""
    return [record for record in records if "eval/version" not in record]


def solved_at(records: Sequence[dict[str, Any]], key: str, version: int) -> float | None:
    """The share of sampled answers that solved their problem in the `WINDOW` versions up to `version`."""
    known = [r[key] for r in trained(records) if version - WINDOW < r["version"] <= version]
    return mean(known) if known else None


def rows_of(args: argparse.Namespace, records: Sequence[dict[str, Any]]) -> list[ResultRow]:
    """The curve: sampled answers and held-out problems by version, age and speed."""
    case, steps = f"{args.example} {args.staleness}", trained(records)
    peers = TINYZERO if args.example == "countdown" else {}
    rows = []
    last = steps[-1]["version"]
    for version in sorted({min(WINDOW, last), *(v for v in POINTS if v <= last), last}):
        if (share := solved_at(records, SOLVED[args.example], version)) is not None:
            peer = peers.get(version)
            against = "a public log of TinyZero" if peer is not None else ""
            rows.append(
                ResultRow(f"solved of sampled, {WINDOW} versions up to {version}", share, "", against, peer, case)
            )
    held_out = {r["eval/version"]: r[f"eval/held_out/mean@{SAMPLES}"] for r in records if "eval/version" in r}
    first = next(iter(held_out.values()), None)
    for version, share in held_out.items():
        rows.append(ResultRow(f"{CURVE}{version:g}", share, "", "before", first, case))
    for key, what, unit in (
        ("age/mean", "age", "versions"),
        ("length/mean", "sampled tokens of an answer", ""),
        ("time/version_s", "time of a version", "s"),
    ):
        rows.append(ResultRow(what, mean(step[key] for step in steps[WINDOW:] or steps), unit, case=case))
    return rows


def answers(run: Processes, order: str, groups: int = 4) -> str:
    """Answers of the first (`order` "asc") or last ("desc") groups that were trained, as `buffer show` prints them."""
    found = f"SELECT item FROM items WHERE state = 'trained' ORDER BY batch {order}, item {order} LIMIT {groups}"
    with closing(sqlite3.connect(f"file:{run.folder / 'buffer.sqlite'}?mode=ro", uri=True)) as db:
        items = [item for (item,) in db.execute(found)]
    command = [sys.executable, "-m", "buffer", "show"]
    shown = (subprocess.run([*command, str(item), str(run.folder)], capture_output=True, text=True) for item in items)
    return "\n".join(done.stdout + done.stderr for done in shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--toy", action="store_true", help="the small form for CPU")
    parser.add_argument("--example", choices=("countdown", "chain_sum"), default="countdown")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--versions", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="versions between evaluations")
    parser.add_argument("--teach", type=int, default=400, help="steps of the supervised start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, nargs=2, default=[0, 1], help="of the server and of the learner")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="of the run file")
    parser.add_argument("--budget-s", type=float, default=400.0, help="of the run; it ends with what it has")
    parser.add_argument("--start-s", type=float, default=300.0)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-learns"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "learns.json")
    args = parser.parse_args()
    if args.model is None and not args.toy:
        parser.error("--model: name the folder of a model in Hugging Face format")
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    data, model = prepare(args)
    failed, texts = [], []
    with run_of(args, data, model) as run:
        for name in ("buffer", "rollout", "learner"):
            run.start(name, name)
        try:
            run.wait("the first version", lambda: bool(trained(run.records())), args.start_s)
            texts.append(answers(run, "asc"))
            until = time.monotonic() + args.budget_s

            def done() -> bool:
                return bool(time.monotonic() > until or len(trained(run.records())) >= args.versions)

            run.wait(f"version {args.versions}", done, args.budget_s + 60.0)
        except (Died, TimeoutError) as error:
            case = f"{args.example} {args.staleness}"
            failed.append(ResultRow("FAILED", 0.0, "", f"{type(error).__name__}: {error}", case=case))
        if texts:  # also of a run that failed later
            texts.append(answers(run, "desc"))
        records = run.records()
    found = rows_of(args, records) if trained(records) else []
    keep(args, [row.line() for row in [*failed, *found]], records, texts)
    return 1 if failed else 0


def keep(args: argparse.Namespace, rows: list[dict[str, Any]], records: list[dict[str, Any]], texts: list[str]) -> None:
    """Write what was found: rows, after those of other runs that the file has; raw records and answers next to it, by
    the run; and the picture of all runs."""
    case = f"{args.example} {args.staleness}"
    before = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = [*(row for row in before if row.get("case", case) != case), *rows]
    write(args.out, "learns", rows)
    name = f"{args.out.stem}.{args.example}-{args.staleness}"
    args.out.with_name(f"{name}.raw.json").write_text(json.dumps(records))
    args.out.with_name(f"{name}.samples.txt").write_text("\n".join(texts))
    draw(rows, args.out.with_suffix(".png"))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The share of held-out problems solved, by version: a panel for each example, a line for each bound on age."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        if row["what"].startswith(CURVE):
            example, staleness = row["case"].split()
            point = int(row["what"].removeprefix(CURVE)), row["value"]
            curves.setdefault(example, {}).setdefault(staleness, []).append(point)
    figure, grid = pyplot.subplots(1, max(1, len(curves)), figsize=(5 * max(1, len(curves)), 3.6), squeeze=False)
    for panel, (example, lines) in zip(grid.flat, curves.items(), strict=False):
        for staleness in sorted(lines, key=int):
            panel.plot(*zip(*lines[staleness], strict=True), marker="o", label=f"max_staleness {staleness}")
        panel.set(title=example, xlabel="version", ylabel="held-out problems solved", ylim=(0, 1))
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
