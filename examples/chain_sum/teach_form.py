"""Show a real model how sums of reasoning-gym are answered: a short supervised start, before any reward.

`python -m examples.chain_sum.teach_form --model FOLDER --out FOLDER` shows right answers to sums of two and three
terms, each step written down. It is short on purpose, some seconds on an H200 for SmolLM2-135M: the model then answers
in the form that is scored and calculates badly. Sums of four terms, a third of those in `smollm2.yaml`, are not shown.
"""

import argparse
import random
from collections.abc import Iterator, Sequence

from buffer.data.entry_maker import GeneratedRows
from configs.data.sources import GeneratedSet
from examples import lesson
from examples.kept import run_script

SHOWN = GeneratedSet(
    "chain_sum",
    {"size": 5000, "seed": 500_000, "min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
)
"""Apart from the seeds of the run file: entry i is drawn from seed + i."""


def steps_of(expression: str) -> Iterator[tuple[str, int]]:
    """The sums of an expression from left to right. Example: `7 - 12 + 3` gives `7 - 12`, -5 and `-5 + 3`, -2."""
    first, *rest = expression.split()
    total = int(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        value = total + int(term) if sign == "+" else total - int(term)
        yield f"{total} {sign} {term}", value
        total = value


def answer(question: str) -> str:
    """The answer that is imitated. Example: `7 - 12 = -5, -5 + 3 = -2 <answer>-2</answer>`."""
    expression = question.rpartition(":")[2].partition("=")[0]
    steps = list(steps_of(expression))
    return f"{', '.join(f'{text} = {value}' for text, value in steps)} <answer>{steps[-1][1]}</answer>"


def write(args: argparse.Namespace) -> str:
    """Teach, unless a folder with the same arguments exists; returns one line for people."""
    rows = GeneratedRows(SHOWN)

    def shown(source: random.Random) -> tuple[lesson.Messages, str]:
        question = str(rows(source.randrange(SHOWN.size))["problem"])
        return [{"role": "user", "content": question}], answer(question)

    return lesson.teach(args, shown, entries=SHOWN.config, package=rows.version)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.chain_sum.teach_form", description=__doc__)
    lesson.add_arguments(parser, steps=60)
    args = parser.parse_args(argv)
    lesson.check(parser, args)
    return args


if __name__ == "__main__":
    run_script(parse, write)
