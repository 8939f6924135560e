"""A random Gemma 2 whose logits are so large that a softcap changes them."""

from typing import Any

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM


def tiny_gemma(**given: Any) -> Gemma2ForCausalLM:
    """Two layers, the same weights at each call. `given`: keys of its config; without a softcap of attention scores and
    of logits unless they are named."""
    torch.manual_seed(0)
    caps = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
    config = Gemma2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=1024,
        sliding_window=512,
        initializer_range=0.4,
        **caps | given,
    )
    return Gemma2ForCausalLM(config).eval()
