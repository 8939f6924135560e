"""Show a real model how Countdown is searched: a short supervised start from the solver's traces, before any reward.

`python -m examples.countdown.teach_search --model FOLDER --problems DIR/train.parquet --out FOLDER` trains all weights
on traces of the training problems and writes a Hugging Face folder. It never sees the held-out problems. Takes about a
minute on an H200 for SmolLM2-135M; the same arguments give the same traces, and an existing folder is kept.

A trace tries expressions in random order and says what each equals. It is cut short on purpose: most traces give up
before the target is met and answer with the last expression they tried. Reinforcement learning has that to mend: to go
on trying until the target is there, and to answer with what met it.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.utils.logging import disable_progress_bar

from examples.countdown.solver import expressions
from examples.kept import is_kept
from examples.warm_start import IGNORED
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


def examples(
    rows: Sequence[Row], operations: str, tokenizer: PreTrainedTokenizerBase, source: random.Random
) -> Iterator[tuple[list[int], list[int]]]:
    """Endless prompts and answers in tokens; an answer ends with the tokenizer's end."""
    while True:
        row = source.choice(rows)
        truth = row["reward_model"]["ground_truth"]
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        answer = trace(truth["numbers"], truth["target"], operations, source)
        encode = tokenizer.encode
        yield (
            encode(text, add_special_tokens=False),
            [*encode(answer, add_special_tokens=False), tokenizer.eos_token_id],
        )


def batch(pairs: Iterator[tuple[list[int], list[int]]], size: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, [size, longest] int64: the loss is over the answers."""
    chosen = [next(pairs) for _ in range(size)]
    ids = [torch.tensor(prompt + answer) for prompt, answer in chosen]
    labels = [torch.tensor([IGNORED] * len(prompt) + answer) for prompt, answer in chosen]
    fill = torch.nn.utils.rnn.pad_sequence
    return fill(ids, True, pad), fill(labels, True, IGNORED)


def train(args: argparse.Namespace, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model after `args.steps` of AdamW, the learning rate falling linearly to a tenth."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    pairs = examples(rows, args.operations, tokenizer, random.Random(args.seed))
    for step in range(args.steps):
        ids, labels = batch(pairs, args.batch, tokenizer.pad_token_id or tokenizer.eos_token_id)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids.to(device), labels=labels.to(device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"warm start: step {step} of {args.steps}, loss {loss.item():.3f}", flush=True)
    return model


def write(args: argparse.Namespace) -> str:
    """Make the folder unless one with the same arguments exists; returns one line for people."""
    rows = pq.read_table(args.problems).to_pylist()
    asked = {name: getattr(args, name) for name in ("seed", "steps", "batch", "lr", "operations")}
    asked |= {"model": str(args.model), "problems": len(rows), "first": rows[0]["prompt"]}
    made = args.out / "warm_start.json"
    if is_kept(made, asked, args.out / "model.safetensors"):
        return f"{args.out}: model kept, made before with the same arguments"
    disable_progress_bar()
    set_seed(args.seed)
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = train(args, rows, tokenizer)
    made.unlink(missing_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    made.write_text(json.dumps(asked) + "\n")
    return f"{args.out}: {args.steps} steps of {args.batch} traces, {time.monotonic() - began:.0f} s"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.countdown.teach_search", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to begin with")
    parser.add_argument("--problems", type=Path, required=True, help="train.parquet of make_problems")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model that is made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64, help="traces per step")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--operations", default="+-*", help="that the traces try; any of +-*/")
    args = parser.parse_args(argv)
    if not args.operations or set(args.operations) - set("+-*/"):
        parser.error(f"--operations {args.operations!r}: give one or more of + - * /")
    for name, path in (("problems", args.problems), ("model", args.model / "config.json")):
        if not path.is_file():
            parser.error(f"--{name}: {path} is no file; make the problems with examples.countdown.make_problems, "
                         "and name a model folder in Hugging Face format")  # fmt: skip
    return args


if __name__ == "__main__":
    print(write(parse()))
