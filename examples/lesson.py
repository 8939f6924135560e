"""A lesson: a short supervised start of a real model, before any reward, from prompts and answers that are shown to it.

Used by the `teach_*.py` of examples, which say what answers. Trains all weights, on a GPU if there is one, and writes a
Hugging Face folder; the same arguments give the same answers, and an existing folder is kept.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.utils.logging import disable_progress_bar

from examples.kept import is_kept
from examples.warm_start import IGNORED

Messages = list[dict[str, str]]
Shown = Callable[[random.Random], tuple[Messages, str]]
"""Draws a prompt and the answer to imitate."""
Pairs = Iterator[tuple[list[int], list[int]]]
"""Endless prompts and answers in tokens."""


def pairs(shown: Shown, tokenizer: PreTrainedTokenizerBase, source: random.Random) -> Pairs:
    """Prompts as the chat template renders them; an answer ends with the tokenizer's end."""
    while True:
        messages, answer = shown(source)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        encode = tokenizer.encode
        yield (
            encode(text, add_special_tokens=False),
            [*encode(answer, add_special_tokens=False), tokenizer.eos_token_id],
        )


def batch(source: Pairs, size: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, [size, longest] int64: the loss is over the answers."""
    chosen = [next(source) for _ in range(size)]
    ids = [torch.tensor(prompt + answer) for prompt, answer in chosen]
    labels = [torch.tensor([IGNORED] * len(prompt) + answer) for prompt, answer in chosen]
    fill = torch.nn.utils.rnn.pad_sequence
    return fill(ids, True, pad), fill(labels, True, IGNORED)


def train(args: argparse.Namespace, source: Pairs, pad: int) -> Any:
    """The model after `args.steps` of AdamW, the learning rate falling linearly to a tenth."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    for step in range(args.steps):
        ids, labels = batch(source, args.batch, pad)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids.to(device), labels=labels.to(device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"lesson: step {step} of {args.steps}, loss {loss.item():.3f}", flush=True)
    return model


def teach(args: argparse.Namespace, shown: Shown, **asked: Any) -> str:
    """Make the folder `args.out` unless one with the same arguments exists; returns one line for people. `asked`: what
    the answers depend on, beside the arguments of `add_arguments`."""
    asked |= {name: getattr(args, name) for name in ("seed", "steps", "batch", "lr")} | {"model": str(args.model)}
    made = args.out / "lesson.json"
    if is_kept(made, asked, args.out / "model.safetensors"):
        return f"{args.out}: model kept, made before with the same arguments"
    disable_progress_bar()
    set_seed(args.seed)
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    source = pairs(shown, tokenizer, random.Random(args.seed))
    model = train(args, source, tokenizer.pad_token_id or tokenizer.eos_token_id)
    made.unlink(missing_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
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
