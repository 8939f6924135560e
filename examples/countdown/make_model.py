"""Make the quickstart's model: a character tokenizer and a Qwen2 of 212 thousand parameters, warm-started on Countdown.

`python -m examples.countdown.make_model --problems DIR/train.parquet --out MODEL` writes a Hugging Face folder. It
reads the training problems only; the model never sees the held-out ones. Takes about a minute on one thread. The same
arguments give the same weights, and an existing model is kept.

The warm start is corrupted on purpose, to leave reinforcement learning something to do: 40 % of the expressions are
random ones over the given numbers, and 40 % of the answers lack their tags.
"""

import argparse
import json
import random
import string
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from transformers.utils.logging import disable_progress_bar

from examples.countdown.make_problems import render
from examples.countdown.solver import expressions, solutions
from examples.kept import is_kept

END, PAD = "<|endoftext|>", "<|pad|>"
TAGS = ["<answer>", "</answer>", "<think>", "</think>"]
SPELLED = "ĠĊ"
"""Space and newline as byte-level BPE writes them."""
VOCABULARY = 112
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
RANDOM_SHARE, UNTAGGED_SHARE = 0.4, 0.4
BATCH, LR, LAST_LR = 64, 4e-3, 4e-4
IGNORED = -100
"""The label of tokens that Hugging Face models leave out of the loss."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and per tag; the chat template joins the messages' contents.

    It is byte-level BPE without merges because transformers 5 rebuilds the tokenizer of every Qwen2 folder as that.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    characters = [c for c in alphabet if c in string.printable or c in SPELLED]
    vocabulary = {token: index for index, token in enumerate([END, PAD, *TAGS, *characters])}
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"<|unused{len(vocabulary)}|>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_network(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Qwen2 with 3 layers of width 64, float32. Heads are 32 wide, the narrowest that vLLM's CPU attention takes."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def examples(rows: list[dict[str, Any]], operations: str, source: random.Random) -> Iterator[tuple[str, str]]:
    """Endless pairs of prompt and answer, corrupted as the module says; the numbers of a prompt are in random order."""
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    possible = [list(expressions(truth["numbers"], operations)) for truth in truths]
    right = [solutions(truth["numbers"], truth["target"], operations) for truth in truths]
    while True:
        index = source.randrange(len(rows))
        numbers = source.sample(truths[index]["numbers"], len(truths[index]["numbers"]))
        corrupt = not right[index] or source.random() < RANDOM_SHARE
        expression = source.choice(possible[index] if corrupt else right[index])
        tagged = source.random() >= UNTAGGED_SHARE
        yield (
            render("short", numbers, truths[index]["target"]),
            f"<answer>{expression}</answer>" if tagged else expression,
        )


def batch(pairs: Iterator[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, [BATCH, longest] int64: the loss is over the answer and the end token, not over the prompt."""
    ids, labels = [], []
    for _ in range(BATCH):
        prompt, answer = next(pairs)
        given = tokenizer.encode(prompt)
        learned = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        ids.append(torch.tensor(given + learned))
        labels.append(torch.tensor([IGNORED] * len(given) + learned))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, True, tokenizer.pad_token_id), pad(labels, True, IGNORED)


def train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: Iterator[tuple[str, str]], steps: int
) -> float:
    """`steps` of AdamW, the learning rate falling linearly; returns the last loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, LAST_LR / LR, steps)
    for step in range(steps):
        ids, labels = batch(pairs, tokenizer)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 200 == 0:
            print(f"warm start: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    return float(loss.item())


def write(args: argparse.Namespace) -> str:
    """Make the model unless one with the same arguments exists; returns one line for people."""
    rows = pq.read_table(args.problems).to_pylist()
    asked = {"seed": args.seed, "steps": args.steps, "operations": args.operations, "problems": rows}
    made = args.out / "warm_start.json"
    if is_kept(made, asked, args.out / "model.safetensors"):
        return f"{args.out}: model kept, made before with the same arguments"
    torch.set_num_threads(1)
    disable_progress_bar()
    set_seed(args.seed)
    began = time.monotonic()
    tokenizer = make_tokenizer()
    model = make_network(tokenizer)
    loss = train(model, tokenizer, examples(rows, args.operations, random.Random(args.seed)), args.steps)
    made.unlink(missing_ok=True)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)
    made.write_text(json.dumps(asked) + "\n")
    count = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{args.out}: {count:,} parameters, loss {loss:.3f} after {args.steps} steps, {time.monotonic() - began:.0f} s"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.countdown.make_model", description=__doc__)
    parser.add_argument("--problems", type=Path, required=True, help="train.parquet of make_problems")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1300, help=f"steps of the warm start, {BATCH} examples each")
    parser.add_argument("--operations", default="+-", help="as given to make_problems")
    args = parser.parse_args(argv)
    if not args.problems.is_file():
        parser.error(
            f"--problems {args.problems}: no such file; write it with python -m examples.countdown.make_problems"
        )
    return args


def main() -> None:
    """Run by `python -m examples.countdown.make_model`."""
    print(write(parse()))


if __name__ == "__main__":
    main()
