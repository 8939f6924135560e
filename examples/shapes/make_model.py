"""Make the vision quickstart's model: a Qwen3-VL of 0.8 million parameters, with a short supervised start.

`python -m examples.shapes.make_model --problems DIR/train.parquet --out MODEL` writes a Hugging Face folder. It reads
the training images only; the model never sees the held-out ones. Takes a minute on one thread, with
`python -m learner sft`, most of it for the model's certificate. The same arguments give the same weights, and an
existing model is kept.

The start is short on purpose, to leave reinforcement learning something to do: the model has the form of the answer
and knows most colours, but not yet which square is the left one.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from examples import warm_start
from examples.fine_tuning import Sections
from examples.kept import run_script
from examples.shapes.tiny_vlm import tiny_vlm

KIND = "qwen3_vl"
LAYERS, DEPTH, DEVIATION = 2, 2, 0.08
BATCH, LR = 32, 1e-3


def run_file(args: argparse.Namespace) -> Sections:
    """The run file of the supervised start: the problems are its demonstrations, in random order."""
    sections = warm_start.run_file(warm_start.random_model(args.out), args.seed, args.steps)
    learner = sections["learner"] | {"lr": LR, "schedule": "constant", "betas": [0.9, 0.95], "max_grad_norm": 1.0}
    return sections | {"data": {"train": str(args.problems)}, "sft": {"rows": BATCH}, "learner": learner}


def write(args: argparse.Namespace) -> str:
    """Make the model unless one with the same arguments exists; returns one line for people."""
    digest = hashlib.sha256(args.problems.read_bytes()).hexdigest()
    asked = {"seed": args.seed, "steps": args.steps, "problems": digest}

    def write_random(folder: Path) -> int:
        model = tiny_vlm(folder, KIND, seed=args.seed, layers=LAYERS, depth=DEPTH, deviation=DEVIATION)
        return int(model.num_parameters())

    return warm_start.teach(args.out, asked, write_random, run_file(args))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.shapes.make_model", description=__doc__)
    parser.add_argument("--problems", type=Path, required=True, help="train.parquet of make_problems")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help=f"steps of the supervised start, {BATCH} images each")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: give at least 1")
    if not args.problems.is_file():
        parser.error(f"--problems {args.problems}: no such file; write it with python -m examples.shapes.make_problems")
    return args


if __name__ == "__main__":
    run_script(parse, write)
