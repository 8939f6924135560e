"""A reward model small enough for a test: a random sequence classification model, and what transformers says of it."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from examples.countdown.make_model import make_tokenizer

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"


def make_reward_model(folder: Path) -> Path:
    """Write a Qwen2 of two layers in float32 with one class, and a tokenizer of characters; returns `folder`."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        num_labels=1,  # type: ignore[call-arg]
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits_of(folder: Path, chats: list[list[dict[str, Any]]]) -> list[float]:
    """What transformers computes for whole chats, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    with torch.no_grad():
        return [
            float(model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0])
            for text in texts
        ]
