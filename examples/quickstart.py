"""`make quickstart`, `-vision` and `-calculator`: a toy's problems, model, training, evaluation and report, in turn.

`python -m examples.quickstart countdown [--seed N] [--section.key=value ...]` (or `shapes`, `calculator`) runs the
commands that a person would type and prints each before it runs. `--lora` lays the toy's `lora.yaml` over its run
file, and merges the last adapter to evaluate it. Data and model are kept in `runs/countdown` and reused; each call
trains in a new folder. Waits for each command in turn; Ctrl-C goes to the one that is running.
"""

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

RUNS = Path("runs")
NAMES = {"countdown": "quickstart", "shapes": "quickstart-vision", "calculator": "quickstart-calculator"}
"""The folder of each toy, and what its runs are called."""


def python(*words: str | Path) -> None:
    """Run `python -m WORDS` and wait; if it fails, the quickstart ends with its exit code."""
    line = ["-m", *map(str, words)]
    print(f"\n$ python {shlex.join(line)}", flush=True)
    if code := subprocess.run([sys.executable, *line]).returncode:
        sys.exit(code if code > 0 else 128 - code)


def fresh(stem: str) -> str:
    """`stem`, or `stem-2`, `stem-3` ...: the first name that no run's folder has."""
    names = [stem, *(f"{stem}-{number}" for number in range(2, 10_000))]
    return next(name for name in names if not (RUNS / name).exists())


def main(argv: Sequence[str] | None = None) -> None:
    """Run by `make quickstart`."""
    parser = argparse.ArgumentParser(prog="python -m examples.quickstart", description=__doc__)
    parser.add_argument("toy", choices=NAMES, help="folder of the example")
    parser.add_argument("--seed", type=int, default=0, help="of problems, model and run")
    parser.add_argument("--lora", action="store_true", help="train an adapter, by the lora.yaml of the example")
    args, overrides = parser.parse_known_args(argv)
    if strange := [word for word in overrides if word.startswith("-") and not re.match(r"--\w+\.\w", word)]:
        parser.error(f"{strange[0]}: no such flag; keys of the run file are written as --run.versions=5")
    folder = Path(__file__).parent / args.toy
    files = [folder / "quickstart.yaml", *([folder / "lora.yaml"] if args.lora else [])]
    if not files[-1].is_file():
        parser.error(f"{args.toy} has no {files[-1].name}; --lora is for countdown")
    signal.signal(signal.SIGINT, lambda *_: None)  # the running command gets it too; its exit code ends this
    began = time.monotonic()
    stem = NAMES[args.toy] + ("-lora" if args.lora else "")
    name = fresh(f"{stem}-seed{args.seed}" if args.seed else stem)
    data, model = (RUNS / args.toy / f"{what}-seed{args.seed}" for what in ("data", "model"))
    run = RUNS / name
    train, seed = data / "train.parquet", str(args.seed)
    python(f"examples.{args.toy}.make_problems", "--out", data, "--seed", seed)
    python(f"examples.{args.toy}.make_model", "--problems", train, "--out", model, "--seed", seed)
    places = [f"--model.path={model}", f"--data.train={train}", f"--data.eval={data / 'eval.parquet'}"]
    settings = [f"--run.name={name}", f"--run.seed={args.seed}", *places, *overrides]
    python("actors", "launch", *files, "--no-report", *settings)
    last = max((run / "checkpoints").glob("v*"))
    final = run / "merged" if args.lora else last / "huggingface"
    if args.lora:
        python("learner", "merge", last, final)
    python("rollout", "evaluate", run / "config.yaml", "--models", model, final, "--out", run / "evaluation.json")
    python("actors", "report", run)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{minutes:.1f} minutes in all; the run is in {run}, the report in {run / 'report.html'}")


if __name__ == "__main__":
    main()
