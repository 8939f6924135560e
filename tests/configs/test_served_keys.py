"""Keys of config.json by which vLLM computes otherwise than transformers are refused, with value and remedy."""

from typing import Any

import pytest

from configs.architecture import unserved, unsupported

QWEN = {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 64}
MIXED = ["full_attention", "sliding_attention"] * 2
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "windows from a layer on": (QWEN | {"max_window_layers": 3}, "max_window_layers in its config.json leaves 3 of 4"),
    "by Qwen's own number of layers": (
        QWEN | {"num_hidden_layers": 32},
        "max_window_layers in its config.json leaves 28",
    ),
    "windows by type": (QWEN | {"layer_types": MIXED}, "layer_types in its config.json leaves 2 of 4"),
    "which vLLM would give to all": (
        QWEN | {"model_type": "qwen3", "layer_types": MIXED, "max_window_layers": 4},
        "layer_types in its config.json leaves 2 of 4",
    ),
    "a share of each head": (
        {"model_type": "llama", "partial_rotary_factor": 0.5},
        "partial_rotary_factor in its config",
    ),
    "in the rotary embedding": (
        {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor in its config.json is 0.5, by which vLLM computes",
    ),
    "for a type of layer": (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
        "partial_rotary_factor in its config.json is 0.5",
    ),
    "in words of GPT-NeoX": ({"model_type": "llama", "rotary_pct": 0.25}, "rotary_pct in its config.json is 0.25"),
    "a number of its dimensions": (
        {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_dim": 16}},
        "rope_dim in its config.json is 16",
    ),
    "clipped queries": (
        {"model_type": "olmoe", "clip_qkv": 8.0},
        "clip_qkv in its config.json is 8.0, by which transf",
    ),
    "a bias of some": ({"model_type": "llama", "qkv_bias": True}, "qkv_bias in its config.json is true, by which vLLM"),
    "wider heads": (
        {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "head_dim": 64},
        "head_dim in its config.json is 64, by which transformers computes",
    ),
    "of a mixture": (
        {"model_type": "qwen2_moe", "hidden_size": 64, "num_attention_heads": 2, "head_dim": 64},
        "head_dim in its config.json is 64, by which transformers computes",
    ),
    "another activation": (
        {"model_type": "qwen3_moe", "hidden_act": "gelu"},
        'hidden_act in its config.json is "gelu"',
    ),
    "a head of its own": ({"model_type": "cohere", "tie_word_embeddings": False}, "tie_word_embeddings in its config"),
    "keys and values of some heads": (
        {"model_type": "gpt_neox", "num_attention_heads": 2, "num_key_value_heads": 1},
        "num_key_value_heads in its config.json is 1, by which vLLM computes",
    ),
    "by another name": (
        {"model_type": "persimmon", "num_attention_heads": 2, "num_kv_heads": 1},
        "num_kv_heads in its config.json is 1, by which vLLM computes",
    ),
    "in a type with a number of its own": (
        {"model_type": "olmo2", "num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 1},
        "num_kv_heads in its config.json is 1, by which vLLM computes",
    ),
    "a softcap of attention": (
        {"model_type": "smollm3", "attn_logit_softcapping": 1.0},
        "attn_logit_softcapping in its config.json is 1.0, by which vLLM computes",
    ),
    "positions of images": (
        {"model_type": "llama", "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
        "mrope_section in its config.json is [4, 6, 6], by which vLLM computes",
    ),
    "Fourier embeddings": (
        {"model_type": "llama", "rope_parameters": {"rope_type": "default", "use_fope": True}},
        "use_fope in its config.json is true, by which vLLM computes",
    ),
    "an encoder's attention": (
        {"model_type": "llama", "is_causal": False},
        "is_causal in its config.json is false, so tokens would see later ones",
    ),
    "of a text model": (
        {"model_type": "llava", "text_config": {"model_type": "llama", "logit_scale": 0.5}},
        "logit_scale in its config.json is 0.5, by which vLLM computes",
    ),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "windows in all layers": QWEN | {"max_window_layers": 0},
    "windows in none": QWEN | {"max_window_layers": 4},
    "windows that are off": QWEN | {"use_sliding_window": False, "max_window_layers": 2},
    "windows by type, in all": QWEN | {"layer_types": ["sliding_attention"] * 4},
    "windows of another type": {"model_type": "gemma2", "num_hidden_layers": 4, "layer_types": MIXED},
    "whole heads": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    "a share that both take": {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "values that both take": {"model_type": "olmoe", "clip_qkv": None, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
    "biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "qkv_bias": True},
    "as many keys as heads": {"model_type": "gpt_neox", "num_attention_heads": 2, "num_key_value_heads": 2},
    "grouped queries of transformers' own class": {
        "model_type": "olmo2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_kv_heads": 2,
    },
    "grouped queries": {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1},
    "positions of images where there are some": {
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]},
    },
    "heads of the usual width": {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_would_compute_otherwise_is_refused(name: str) -> None:
    given, words = REFUSED[name]
    (reason,) = unsupported(given)
    assert reason.startswith(words)
    assert reason.endswith(("; remove it", "take another model", "take a causal language model"))


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_both_compute_alike_is_accepted(name: str) -> None:
    assert list(unsupported(ACCEPTED[name])) == []


def test_a_reward_model_is_judged_by_what_it_computes() -> None:
    """It has no head that predicts tokens, and its tokens may see later ones."""
    scoring = {"model_type": "gemma2", "architectures": ["Gemma2ForSequenceClassification"]}
    assert list(unserved(scoring | {"tie_word_embeddings": False, "is_causal": False})) == []
    (reason,) = unserved(scoring | {"hidden_activation": "gelu"})
    assert reason.startswith('hidden_activation in its config.json is "gelu"')
