"""A lesson: a short supervised start of a real model, before any reward, from prompts and answers that are shown to it.

Used by the `teach_*.py` of examples, which say what answers. Writes them down as demonstrations and trains all weights
on them with `python -m learner sft`, on a GPU if there is one. The result is a Hugging Face folder, with the
demonstrations and the run in `lesson/`; the same arguments give the same answers, and an existing folder is kept.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from examples.fine_tuning import Row, Sections, begun, first_shown, tune
from examples.kept import is_kept, record_made

Messages = list[dict[str, str]]
Shown = Callable[[random.Random], tuple[Messages, str]]
"""Draws a prompt and the answer to imitate."""


def demonstrations(shown: Shown, source: random.Random) -> Iterator[Row]:
    """Endless rows of prompt and answer."""
    while True:
        prompt, answer = shown(source)
        yield {"prompt": prompt, "answer": answer}


def run_file(args: argparse.Namespace) -> Sections:
    """The run file of the lesson, without its data: the learning rate falls linearly to a tenth."""
    return {
        "run": {"seed": args.seed, "versions": args.steps},
        "model": {"path": str(args.model), "dtype": "bfloat16" if torch.cuda.is_available() else "float32"},
        "sft": {"rows": args.batch},
        "learner": {"lr": args.lr, "schedule": "linear", "warmup_versions": 0, "compile": False},
    }


def teach(args: argparse.Namespace, shown: Shown, **asked: Any) -> str:
    """Make the folder `args.out` unless one with the same arguments exists; returns one line for people. `asked`: what
    the answers depend on, beside the arguments of `add_arguments`."""
    asked |= {name: getattr(args, name) for name in ("seed", "steps", "batch", "lr")} | {"model": str(args.model)}
    asked["shown"], rows = first_shown(demonstrations(shown, random.Random(args.seed)))
    made, folder = args.out / "lesson.json", args.out / "lesson"
    if is_kept(made, asked, args.out / "model.safetensors"):
        return f"{args.out}: model kept, made before with the same arguments"
    began = time.monotonic()
    with begun(folder):
        made.unlink(missing_ok=True)
        tune(args.out, folder, rows, run_file(args))
        record_made(made, asked)
    return f"{args.out}: {args.steps} steps of {args.batch} answers, {time.monotonic() - began:.0f} s"


def add_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """The arguments that every lesson has."""
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to begin with")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model that is made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=64, help="answers per step")
    parser.add_argument("--lr", type=float, default=2e-4)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse a model that is not there, and numbers that teach nothing, with exit code 2."""
    if not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} has no config.json; name a model folder in Hugging Face format")
    for name in ("steps", "batch", "lr"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)}: give a number above 0")
