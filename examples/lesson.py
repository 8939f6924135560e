"""A lesson: a short supervised start of a real model, before any reward, from prompts and answers that are shown to it.

Used by the `teach_*.py` of examples, which say what answers. Writes them down as demonstrations and trains all weights
on them with `python -m learner sft`, on a GPU if there is one. The result is a Hugging Face folder, with the
demonstrations and the run in `lesson/`; the same arguments give the same answers, and an existing folder is kept.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from examples.kept import is_kept

Messages = list[dict[str, str]]
Shown = Callable[[random.Random], tuple[Messages, str]]
"""Draws a prompt and the answer to imitate."""


def write_down(file: Path, shown: Shown, number: int, source: random.Random) -> None:
    """Write so many demonstrations, one a line."""
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(number):
            prompt, answer = shown(source)
            lines.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")


def run_file(args: argparse.Namespace, demonstrations: Path) -> dict[str, Any]:
    """The run file of the lesson: the learning rate falls linearly to a tenth, each demonstration is shown once."""
    return {
        "run": {"name": "run", "folder": str(demonstrations.parent), "seed": args.seed, "versions": args.steps},
        "model": {"path": str(args.model), "dtype": "bfloat16" if torch.cuda.is_available() else "float32"},
        "data": {"train": str(demonstrations), "shuffle": False, "epochs": 1},
        "sft": {"rows": args.batch},
        "learner": {"lr": args.lr, "schedule": "linear", "warmup_versions": 0, "compile": False},
    }


def train(args: argparse.Namespace, shown: Shown) -> Path:
    """Train on `args.steps` batches; returns the folder of the model. If the training fails, this process ends with its
    exit code."""
    folder = args.out / "lesson"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_down(folder / "demonstrations.jsonl", shown, args.steps * args.batch, random.Random(args.seed))
    config = folder / "lesson.yaml"
    config.write_text(yaml.safe_dump(run_file(args, folder / "demonstrations.jsonl")), encoding="utf-8")
    if code := subprocess.run([sys.executable, "-m", "learner", "sft", str(config)]).returncode:
        sys.exit(code if code > 0 else 128 - code)
    return Path(folder / "run" / "checkpoints" / f"v{args.steps:06d}" / "huggingface")


def teach(args: argparse.Namespace, shown: Shown, **asked: Any) -> str:
    """Make the folder `args.out` unless one with the same arguments exists; returns one line for people. `asked`: what
    the answers depend on, beside the arguments of `add_arguments`."""
    asked |= {name: getattr(args, name) for name in ("seed", "steps", "batch", "lr")} | {"model": str(args.model)}
    made = args.out / "lesson.json"
    if is_kept(made, asked, args.out / "model.safetensors"):
        return f"{args.out}: model kept, made before with the same arguments"
    began = time.monotonic()
    made.unlink(missing_ok=True)
    trained = train(args, shown)
    shutil.copytree(trained, args.out, dirs_exist_ok=True)
    shutil.rmtree(trained.parents[1])
    made.write_text(json.dumps(asked) + "\n")
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
