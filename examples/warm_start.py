"""A language model made on the spot: a character tokenizer and a Qwen2 with 212 thousand parameters, taught texts.

Used by the `make_model.py` of examples, which say what texts: reinforcement learning is to begin with a model that has
the form of an answer and errs on purpose. Takes up to a minute on one thread; the same arguments give the same weights.
"""

import json
import string
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from transformers.utils.logging import disable_progress_bar

from examples.kept import is_kept

END, PAD = "<|endoftext|>", "<|pad|>"
SPELLED = "ĠĊ"
"""Space and newline as byte-level BPE writes them."""
VOCABULARY = 112
BATCH, LR, LAST_LR = 64, 4e-3, 4e-4
IGNORED = -100
"""The label of tokens that Hugging Face models leave out of the loss."""
Texts = Iterator[Sequence[str]]
"""Endless examples: each is what is given, what is learned, and so on in turn, end tokens included."""


def character_tokenizer(tags: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and per tag, and the chat template.

    It is byte-level BPE without merges because transformers 5 rebuilds the tokenizer of every Qwen2 folder as that.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    characters = [c for c in alphabet if c in string.printable or c in SPELLED]
    vocabulary = {token: index for index, token in enumerate([END, PAD, *tags, *characters])}
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"<|unused{len(vocabulary)}|>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=template,
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


def batch(texts: Texts, tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, [BATCH, longest] int64: the loss is over what is learned, not over what is given."""
    ids, labels = [], []
    for _ in range(BATCH):
        parts = [(tokenizer.encode(text), index % 2 == 1) for index, text in enumerate(next(texts))]
        ids.append(torch.tensor([token for part, _ in parts for token in part]))
        labels.append(torch.tensor([token if learned else IGNORED for part, learned in parts for token in part]))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, True, tokenizer.pad_token_id), pad(labels, True, IGNORED)


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Texts, steps: int) -> float:
    """`steps` of AdamW, the learning rate falling linearly; returns the last loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, LAST_LR / LR, steps)
    for step in range(steps):
        ids, labels = batch(texts, tokenizer)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 200 == 0:
            print(f"warm start: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    return float(loss.item())


def make_model(out: Path, asked: dict[str, Any], tokenizer: PreTrainedTokenizerFast, texts: Texts) -> str:
    """Write a Hugging Face folder unless one made with the same arguments exists; returns one line for people. `asked`:
    the arguments, of which `seed` and `steps` are used here."""
    made = out / "warm_start.json"
    if is_kept(made, asked, out / "model.safetensors"):
        return f"{out}: model kept, made before with the same arguments"
    torch.set_num_threads(1)
    disable_progress_bar()
    set_seed(asked["seed"])
    began = time.monotonic()
    model = make_network(tokenizer)
    loss = train(model, tokenizer, texts, asked["steps"])
    made.unlink(missing_ok=True)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    made.write_text(json.dumps(asked) + "\n")
    count = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.monotonic() - began
    return f"{out}: {count:,} parameters, loss {loss:.3f} after {asked['steps']} steps, {seconds:.0f} s"
