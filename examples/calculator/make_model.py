"""Make the calculator's model: a character tokenizer and a Qwen2 of 212 thousand parameters, warm-started on episodes.

`python -m examples.calculator.make_model --problems DIR/train.parquet --out MODEL` writes a Hugging Face folder. It
reads the training problems only; the model never sees the held-out ones. Takes a minute or two on one thread, with
`python -m learner sft`. The same arguments give the same weights, and an existing model is kept.

The warm start is corrupted on purpose, to leave reinforcement learning something to do: 60 % of the episodes guess
instead of asking the calculator, and some of the rest ask for another number than the problem's, stop at the value in
between, or answer without tags.
"""

import argparse
import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from examples.calculator.problems import Problem, steps
from examples.calculator.task import calculate
from examples.kept import run_script
from examples.warm_start import BATCH, END, character_tokenizer, make_model

TAGS = ["<calc>", "</calc>", "<answer>", "</answer>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '" + END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Each message is closed by the token that ends an answer."""
GUESSED, MISREAD, STOPPED, UNTAGGED = 0.6, 0.1, 0.1, 0.15
"""Shares of the corruptions, each of the episodes that come to it."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The template writes `<|user|>17*6-9=<|endoftext|><|assistant|>`, so that a chat extends token by token."""
    return character_tokenizer(TAGS, TEMPLATE)


def problem_of(text: str) -> Problem:
    """The parts of a problem's text."""
    first, sign, second, then, third = re.fullmatch(r"(\d+)(.)(\d)(.)(\d)=", text).groups()  # type: ignore[union-attr]
    return int(first), sign, int(second), then, int(third)


def said(problem: Problem, source: random.Random) -> list[str]:
    """The model's messages in one episode, corrupted as the module says."""
    if source.random() < MISREAD:
        problem = (source.randrange(10, 100), *problem[1:])
    first, second, answer = steps(problem)
    calls = [f"<calc>{first}</calc>", f"<calc>{second}</calc>"]
    if source.random() < GUESSED:
        calls, answer = [], str(source.randrange(10, 1000))
    elif source.random() < STOPPED:
        calls, answer = calls[:1], second[:-2]
    return [*calls, answer if source.random() < UNTAGGED else f"<answer>{answer}</answer>"]


def episodes(rows: Sequence[dict[str, str]], source: random.Random) -> Iterator[list[dict[str, str]]]:
    """Endless episodes as chats: what is given and what the model says, in turn."""
    while True:
        problem = problem_of(source.choice(rows)["problem"])
        given, chat = "".join(map(str, problem)) + "=", []
        for message in said(problem, source):
            chat += [{"role": "user", "content": given}, {"role": "assistant", "content": message}]
            given = calculate(message) or ""
        yield chat


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.calculator.make_model", description=__doc__)
    parser.add_argument("--problems", type=Path, required=True, help="train.parquet of make_problems")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600, help=f"steps of the warm start, {BATCH} episodes each")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: give at least 1")
    if not args.problems.is_file():
        remedy = "write it with python -m examples.calculator.make_problems"
        parser.error(f"--problems {args.problems}: no such file; {remedy}")
    return args


def write(args: argparse.Namespace) -> str:
    """Make the model unless one with the same arguments exists; returns one line for people."""
    digest = hashlib.sha256(args.problems.read_bytes()).hexdigest()
    asked = {"seed": args.seed, "steps": args.steps, "problems": digest}
    chats = episodes(pq.read_table(args.problems).to_pylist(), random.Random(args.seed))
    return make_model(args.out, asked, make_tokenizer(), ({"messages": chat} for chat in chats))


if __name__ == "__main__":
    run_script(parse, write)
