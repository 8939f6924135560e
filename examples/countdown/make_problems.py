"""Write Countdown problems to `train.parquet` and `eval.parquet`, as rows that TinyZero and verl read.

`python -m examples.countdown.make_problems --out DIR` makes the quickstart's problems: three numbers from 1 to 9, + and
-, targets 1 to 27. Every problem has a solution by construction and occurs once, in one of the two files. The same
arguments give the same rows, and existing files are kept.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from configs.entrypoint import BAD_INPUT
from configs.plain_text import print_visible
from examples.kept import is_kept, record_made, run_script, write_rows

PROMPTS = {
    "short": "{numbers}={target}\n",
    "words": "Using the numbers [{numbers}], create an equation that equals {target}. You can use basic arithmetic "
    "operations (+, -, *, /) and each number exactly once. Show your work in <think> </think> tags. And return the "
    "final answer in <answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>.",
}
MAX_MISSES = 50_000
"""Draws in a row without a new problem after which all problems are taken to be found."""
MOST = 100_000
Puzzle = tuple[tuple[int, ...], int]
"""Numbers, sorted, and target."""


def draw(random: random.Random, args: argparse.Namespace) -> Puzzle | None:
    """Numbers, sorted, and the value of a random expression over all of them; None if that is not a target."""
    many = args.numbers if isinstance(args.numbers, int) else random.choice(args.numbers)
    numbers = tuple(sorted(random.randint(1, args.largest) for _ in range(many)))
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        random.shuffle(values)
        a, b = values.pop(), values.pop()
        operation = random.choice(args.operations)
        if operation == "/" and b == 0:
            return None
        values.append({"+": a + b, "-": a - b, "*": a * b}[operation] if operation != "/" else a / b)
    value = values[0]
    return (numbers, int(value)) if value.denominator == 1 and 1 <= value <= args.target else None


def collect(random: random.Random, args: argparse.Namespace) -> list[Puzzle]:
    """`args.count` distinct problems in random order; without a count all there are, up to MOST."""
    found: dict[Puzzle, None] = {}
    misses = 0
    while misses < MAX_MISSES and len(found) < (args.count or MOST):
        problem = draw(random, args)
        misses = misses + 1 if problem is None or problem in found else 0
        if problem is not None:
            found[problem] = None
    if args.count is not None and len(found) < args.count:
        raise ValueError(
            f"--count {args.count}: only {len(found)} distinct problems were found; ask for fewer, or leave it out"
        )
    if len(found) <= args.eval:
        raise ValueError(f"--eval {args.eval}: there are only {len(found)} problems, and some must be left to train on")
    problems = sorted(found)
    random.shuffle(problems)
    return problems


def render(prompt: str, numbers: Sequence[int], target: int) -> str:
    """The prompt's text. Example: `render("short", [8, 6, 4], 2)` -> `"8 6 4=2\\n"`."""
    return PROMPTS[prompt].format(numbers=" ".join(map(str, numbers)), target=target)


def row(problem: Puzzle, index: int, split: str, random: random.Random, prompt: str) -> dict[str, Any]:
    """One row; its numbers are in random order.

    Example: `{"data_source": "countdown", "prompt": [{"role": "user", "content": "8 6 4=2\\n"}], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": {"target": 2, "numbers": [8, 6, 4]}},
    "extra_info": {"split": "train", "index": 0}}`
    """
    numbers, target = random.sample(problem[0], len(problem[0])), problem[1]
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": render(prompt, numbers, target)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"target": target, "numbers": numbers}},
        "extra_info": {"split": split, "index": index},
    }


def write(args: argparse.Namespace) -> str:
    """Write both files unless files with the same arguments exist; returns one line for people."""
    asked = {key: value for key, value in vars(args).items() if key != "out"}
    made = args.out / "problems.json"
    files = {split: args.out / f"{split}.parquet" for split in ("train", "eval")}
    if is_kept(made, asked, *files.values()):
        return f"{args.out}: problems kept, made before with the same arguments"
    source = random.Random(args.seed)
    problems = collect(source, args)
    parts = {"eval": problems[: args.eval], "train": problems[args.eval :]}
    args.out.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    for split, part in parts.items():
        rows = [row(problem, index, split, source, args.prompt) for index, problem in enumerate(part)]
        write_rows(files[split], rows)
    record_made(made, asked)
    return f"{args.out}: {len(parts['train'])} problems to train on, {len(parts['eval'])} held out"


def checked(args: argparse.Namespace) -> str:
    """As `write`; numbers of problems that there are not end this process with exit code 2."""
    try:
        return write(args)
    except ValueError as error:
        print_visible(f"make_problems: {error}", sys.stderr)
        sys.exit(BAD_INPUT)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.countdown.make_problems", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and eval.parquet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--numbers",
        type=int,
        nargs="+",
        default=[3],
        choices=range(2, 7),
        help="numbers of a problem; several: of each",
    )
    parser.add_argument("--largest", type=int, default=9, help="numbers are 1 to this")
    parser.add_argument("--operations", default="+-", help="any of +-*/")
    parser.add_argument("--target", type=int, default=27, help="targets are 1 to this")
    parser.add_argument("--count", type=int, help=f"problems in all; left out: as many as there are, up to {MOST}")
    parser.add_argument("--eval", type=int, default=80, help="of these, held out of training")
    parser.add_argument(
        "--prompt", default="short", choices=PROMPTS, help="wording: short for the toy, words for real models"
    )
    args = parser.parse_args(argv)
    args.numbers = args.numbers[0] if len(args.numbers) == 1 else args.numbers
    if not args.operations or set(args.operations) - set("+-*/"):
        parser.error(f"--operations {args.operations!r}: give one or more of + - * /")
    for name in ("largest", "target", "count", "eval"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give at least 1")
    return args


if __name__ == "__main__":
    run_script(parse, checked)
