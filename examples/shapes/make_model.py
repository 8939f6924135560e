"""Make the vision quickstart's model: a Qwen3-VL of 0.8 million parameters, with a short supervised start.

`python -m examples.shapes.make_model --problems DIR/train.parquet --out MODEL` writes a Hugging Face folder, in
seconds. It reads the training images only; the model never sees the held-out ones. The same arguments give the same
weights, and an existing model is kept.

The training loop is this file's own, because `python -m learner sft` trains on text alone and refuses rows with images.
It is stopped early on purpose, to leave reinforcement learning something to do: the model has the form of the
answer and knows most colours, but not yet which square is the left one.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from buffer.data.images import ImageFormat, decode
from configs.schema import DataConfig
from examples.kept import is_kept, run_script
from examples.shapes.tiny_vlm import tiny_tokenizer, tiny_vlm

KIND = "qwen3_vl"
LAYERS, DEPTH, DEVIATION = 2, 2, 0.08
BATCH, LR = 32, 1e-3
IGNORED = -100
"""The label of tokens that Hugging Face models leave out of the loss."""


def prompt(tokenizer: PreTrainedTokenizerBase, problem: str, num_tokens: int) -> str:
    """The chat around a problem, with as many placeholders as its image has tokens."""
    parts: Any = [{"type": "image"}, {"type": "text", "text": problem.removeprefix("<image>")}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    return str(text).replace("<|image_pad|>", "<|image_pad|>" * num_tokens)


def batch(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, form: ImageFormat) -> dict[str, Tensor]:
    """What the model's forward pass takes. All prompts and answers have the same number of tokens."""
    pictures = [decode(row["images"][0]["bytes"], form) for row in rows]
    ids, labels = [], []
    for row, picture in zip(rows, pictures, strict=True):
        given = tokenizer.encode(prompt(tokenizer, row["problem"], picture.num_tokens), add_special_tokens=False)
        learned = [*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id]
        ids.append(given + learned)
        labels.append([IGNORED] * len(given) + learned)
    tokens = torch.tensor(ids)
    return {
        "input_ids": tokens,
        "labels": torch.tensor(labels),
        "mm_token_type_ids": (tokens == form.image_token).int(),
        "pixel_values": torch.cat([torch.from_numpy(picture.patches()) for picture in pictures]),
        "image_grid_thw": torch.tensor([picture.grid for picture in pictures]),
    }


def train(
    model: PreTrainedModel,
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    form: ImageFormat,
    args: argparse.Namespace,
) -> float:
    """`args.steps` of AdamW; returns the last loss in nats per token."""
    source = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    for _ in range(args.steps):
        loss = model(**batch(source.choices(rows, k=BATCH), tokenizer, form), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def write(args: argparse.Namespace) -> str:
    """Make the model unless one with the same arguments exists; returns one line for people."""
    digest = hashlib.sha256(args.problems.read_bytes()).hexdigest()
    asked = {"seed": args.seed, "steps": args.steps, "problems": digest}
    made = args.out / "warm_start.json"
    if is_kept(made, asked, args.out / "model.safetensors"):
        return f"{args.out}: model kept, made before with the same arguments"
    torch.set_num_threads(1)
    disable_progress_bar()
    began = time.monotonic()
    made.unlink(missing_ok=True)
    model = tiny_vlm(args.out, KIND, seed=args.seed, layers=LAYERS, depth=DEPTH, deviation=DEVIATION)
    form = ImageFormat.of(str(args.out), DataConfig(train=args.problems))
    assert form
    loss = train(model, pq.read_table(args.problems).to_pylist(), tiny_tokenizer(), form, args)
    model.save_pretrained(args.out)
    made.write_text(json.dumps(asked) + "\n")
    count = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{args.out}: {count:,} parameters, loss {loss:.3f} after {args.steps} steps, {time.monotonic() - began:.0f} s"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.shapes.make_model", description=__doc__)
    parser.add_argument("--problems", type=Path, required=True, help="train.parquet of make_problems")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help=f"steps of the supervised start, {BATCH} images each")
    args = parser.parse_args(argv)
    if not args.problems.is_file():
        parser.error(f"--problems {args.problems}: no such file; write it with python -m examples.shapes.make_problems")
    return args


if __name__ == "__main__":
    run_script(parse, write)
