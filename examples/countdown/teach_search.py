"""Show a real model how Countdown is searched: a short supervised start from the solver's traces, before any reward.

`python -m examples.countdown.teach_search --model FOLDER --problems DIR/train.parquet --out FOLDER` trains all weights
on traces of the training problems and writes a Hugging Face folder. It never sees the held-out problems. Takes about a
minute on an H200 for SmolLM2-135M; the same arguments give the same traces, and an existing folder is kept.

A trace tries expressions in random order and says what each equals. It is cut short on purpose: most traces give up
before the target is met and answer with the last expression they tried. Reinforcement learning has that to mend: to go
on trying until the target is there, and to answer with what met it.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from examples import lesson
from examples.countdown.solver import expressions
from examples.kept import run_script
from rollout.rewards.countdown import evaluate

PATIENCE = (1, 1, 1, 1, 2, 2, 3, 4, 6, 8)
"""How many expressions a trace tries before it gives up: one of these, each as likely."""
Row = dict[str, Any]


def tried(numbers: Sequence[int], target: int, operations: str, source: random.Random) -> list[tuple[str, str]]:
    """Expressions in random order with their values, up to the one that equals `target` or until patience ends.

    Example: `[("8-6+4", "6"), ("6-8+4", "2")]` for 8, 6, 4 and the target 2.
    """
    found = []
    candidates = list(expressions(numbers, operations))
    source.shuffle(candidates)
    for text in candidates[: source.choice(PATIENCE)]:
        found.append((text, value_of(text)))
        if found[-1][1] == str(target):
            break
    return found


def value_of(text: str) -> str:
    """The value of an expression as a trace writes it. Example: `value_of("7/2")` -> `"7/2"`."""
    try:
        return str(evaluate(text).value)
    except ZeroDivisionError:
        return "none"


def trace(numbers: Sequence[int], target: int, operations: str, source: random.Random) -> str:
    """The answer that is imitated. Example: `<think>8-6+4=6, 6-8+4=2</think><answer>6-8+4</answer>`."""
    steps = tried(numbers, target, operations, source)
    search = ", ".join(f"{text}={value}" for text, value in steps)
    return f"<think>{search}</think><answer>{steps[-1][0]}</answer>"


def traces_of(rows: Sequence[Row], operations: str) -> lesson.Shown:
    """Draws one of these problems, and a trace."""

    def shown(source: random.Random) -> tuple[lesson.Messages, str]:
        row = source.choice(rows)
        truth = row["reward_model"]["ground_truth"]
        return row["prompt"], trace(truth["numbers"], truth["target"], operations, source)

    return shown


def write(args: argparse.Namespace) -> str:
    """Teach, unless a folder with the same arguments exists; returns one line for people."""
    rows: list[Row] = pq.read_table(args.problems).to_pylist()
    shown = traces_of(rows, args.operations)
    return lesson.teach(args, shown, operations=args.operations, problems=len(rows), first=rows[0]["prompt"])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.countdown.teach_search", description=__doc__)
    lesson.add_arguments(parser, steps=400)
    parser.add_argument("--problems", type=Path, required=True, help="train.parquet of make_problems")
    parser.add_argument("--operations", default="+-*", help="that the traces try; any of +-*/")
    args = parser.parse_args(argv)
    if not args.operations or set(args.operations) - set("+-*/"):
        parser.error(f"--operations {args.operations!r}: give one or more of + - * /")
    if not args.problems.is_file():
        parser.error(f"--problems: {args.problems} is no file; make them with examples.countdown.make_problems")
    lesson.check(parser, args)
    return args


if __name__ == "__main__":
    run_script(parse, write)
