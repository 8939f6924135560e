"""Write calculator problems to `train.parquet` and `eval.parquet`, with the columns `problem` and `answer`.

`python -m examples.calculator.make_problems --out DIR` makes the quickstart's: `17*6-9=` and the like, a number of two
digits, then `+`, `-` or `*` and a digit, then `+` or `-` and a digit, reckoned from left to right; no value is below 0.
Every problem occurs once, in one of the two files. The same arguments give the same rows, and existing files are kept.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.calculator.problems import split
from examples.kept import is_kept, record_made, run_script, write_rows


def write(args: argparse.Namespace) -> str:
    """Write both files unless files with the same arguments exist; returns one line for people."""
    asked = {"seed": args.seed, "eval": args.eval}
    made = args.out / "problems.json"
    files = {name: args.out / f"{name}.parquet" for name in ("eval", "train")}
    if is_kept(made, asked, *files.values()):
        return f"{args.out}: problems kept, made before with the same arguments"
    parts = split(args.seed, args.eval)
    args.out.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    for name, part in parts.items():
        write_rows(files[name], part)
    record_made(made, asked)
    return f"{args.out}: {len(parts['train'])} problems to train on, {len(parts['eval'])} held out"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.calculator.make_problems", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and eval.parquet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval", type=int, default=200, help="problems that are held out of training")
    args = parser.parse_args(argv)
    if not 1 <= args.eval <= 10_000:
        parser.error(f"--eval {args.eval}: give 1 to 10000")
    return args


if __name__ == "__main__":
    run_script(parse, write)
