"""Make the images of the vision quickstart: two coloured squares side by side, whose colours are to be named.

`python -m examples.shapes.make_problems --out DIR` writes `train.parquet` and `eval.parquet` with EasyR1's columns
(`problem`, `images`, `answer`). Each image is 64 x 32 pixels, two tokens of the toy's model, and each pixel has noise,
so no two are equal. The same arguments give the same rows, and existing files are kept.
"""

import argparse
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from examples.kept import is_kept, record_made, run_script, write_rows

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "gold": (230, 200, 40)}
SIDE = 32
"""Of a square, in pixels."""
NOISE = 30
"""Most that is added to, or taken off, each channel of each pixel, of 255."""
QUESTION = "<image>which colours?"


def row(source: np.random.Generator) -> dict[str, Any]:
    """One row.

    Example: `{"problem": "<image>which colours?", "images": [{"bytes": PNG, "path": None}], "answer": "red gold"}`
    """
    left, right = source.choice(list(COLOURS), 2)
    squares = np.repeat([[COLOURS[left], COLOURS[right]]], SIDE, axis=1).repeat(SIDE, axis=0)
    pixels = (squares + source.integers(-NOISE, NOISE + 1, squares.shape)).clip(0, 255)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return {"problem": QUESTION, "images": [{"bytes": file.getvalue(), "path": None}], "answer": f"{left} {right}"}


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Endless rows, no two alike."""
    source = np.random.default_rng(seed)
    while True:
        yield row(source)


def write(args: argparse.Namespace) -> str:
    """Write both files unless files with the same arguments exist; returns one line for people."""
    asked = {key: value for key, value in vars(args).items() if key != "out"}
    made, files = args.out / "problems.json", [args.out / "train.parquet", args.out / "eval.parquet"]
    if is_kept(made, asked, *files):
        return f"{args.out}: problems kept, made before with the same arguments"
    args.out.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    drawn = rows(args.seed)
    for file, count in zip(files, (args.count, args.eval), strict=True):
        write_rows(file, [next(drawn) for _ in range(count)])
    record_made(made, asked)
    return f"{args.out}: {args.count} images to train on, {args.eval} held out"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.shapes.make_problems", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and eval.parquet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="images to train on")
    parser.add_argument("--eval", type=int, default=200, help="further images, held out of training")
    args = parser.parse_args(argv)
    for name in ("count", "eval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give at least 1")
    return args


if __name__ == "__main__":
    run_script(parse, write)
