"""A random Qwen3-MoE, small enough for a test, whose tokens are the words `w0`, `w1`, ...

tiny_experts(folder)                                     8 experts of which each token takes 2, in both of its layers
tiny_experts(folder, num_experts=7, dtype="bfloat16")    any field of its config in another way
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}
"""vLLM's kernels for CPU want hidden sizes that 32 divides."""


def tiny_experts(folder: Path, **overrides: Any) -> Path:
    """Write config, random weights (always the same) and a tokenizer into `folder`, which is returned."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPE | overrides)
    Qwen3MoeForCausalLM(config).to(config.dtype).save_pretrained(folder)
    words = {f"w{number}": number for number in range(config.vocab_size)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), bos_token="w0", eos_token="w1", unk_token="w2"
    ).save_pretrained(folder)
    return folder
