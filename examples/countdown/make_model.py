"""Make the quickstart's model: a character tokenizer and a Qwen2 of 212 thousand parameters, warm-started on Countdown.

`python -m examples.countdown.make_model --problems DIR/train.parquet --out MODEL` writes a Hugging Face folder. It
reads the training problems only; the model never sees the held-out ones. Takes a minute or two on one thread, with
`python -m learner sft`. The same arguments give the same weights, and an existing model is kept.

The warm start is corrupted on purpose, to leave reinforcement learning something to do: 40 % of the expressions are
random ones over the given numbers, and 40 % of the answers lack their tags. With `--right-only` it is not: that makes
a teacher of the task (docs/teachers.md).
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from examples.countdown.make_problems import render
from examples.countdown.solver import expressions, solutions
from examples.kept import run_script
from examples.warm_start import BATCH, character_tokenizer, make_model

TAGS = ["<answer>", "</answer>", "<think>", "</think>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
RANDOM_SHARE, UNTAGGED_SHARE = 0.4, 0.4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The chat template joins the messages' contents."""
    return character_tokenizer(TAGS, TEMPLATE)


def examples(
    rows: list[dict[str, Any]], operations: str, source: random.Random, right_only: bool = False
) -> Iterator[tuple[str, str]]:
    """Endless pairs of prompt and answer, corrupted as the module says unless `right_only`; the numbers of a prompt are
    in random order."""
    random_share, untagged_share = (0.0, 0.0) if right_only else (RANDOM_SHARE, UNTAGGED_SHARE)
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    possible = [list(expressions(truth["numbers"], operations)) for truth in truths]
    right = [solutions(truth["numbers"], truth["target"], operations) for truth in truths]
    while True:
        index = source.randrange(len(rows))
        numbers = source.sample(truths[index]["numbers"], len(truths[index]["numbers"]))
        corrupt = not right[index] or source.random() < random_share
        expression = source.choice(possible[index] if corrupt else right[index])
        tagged = source.random() >= untagged_share
        yield (
            render("short", numbers, truths[index]["target"]),
            f"<answer>{expression}</answer>" if tagged else expression,
        )


def write(args: argparse.Namespace) -> str:
    """Make the model unless one with the same arguments exists; returns one line for people."""
    rows = pq.read_table(args.problems).to_pylist()
    asked = {"seed": args.seed, "steps": args.steps, "operations": args.operations, "problems": rows}
    asked |= {"right_only": True} if args.right_only else {}
    pairs = examples(rows, args.operations, random.Random(args.seed), args.right_only)
    shown = ({"prompt": prompt, "answer": answer} for prompt, answer in pairs)
    return make_model(args.out, asked, make_tokenizer(), shown, plain=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.countdown.make_model", description=__doc__)
    parser.add_argument("--problems", type=Path, required=True, help="train.parquet of make_problems")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1300, help=f"steps of the warm start, {BATCH} examples each")
    parser.add_argument("--operations", default="+-", help="as given to make_problems")
    parser.add_argument("--right-only", action="store_true", help="imitate right answers only: for a teacher")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: give at least 1")
    if not args.problems.is_file():
        parser.error(
            f"--problems {args.problems}: no such file; write it with python -m examples.countdown.make_problems"
        )
    return args


if __name__ == "__main__":
    run_script(parse, write)
