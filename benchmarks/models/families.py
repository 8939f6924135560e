"""The families of models whose certificates are made: all of transformers' causal language models and of its models of
images and text, most of which are trained on text alone, and variants.

A family is a `model_type` and the keys in which its config differs from the default one; the certificate shrinks it.
"""

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

PARTS_ONLY = ("musicgen", "musicgen_melody", "vision-encoder-decoder")
"""Types whose config cannot be made without the configs of other models."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
GLM_TEXT = {
    **{"rope_parameters": GLM_ROPE, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
    "attention_bias": True,
}
GLM_VISION: dict[str, Any] = {"text_config": {**GLM_TEXT, "hidden_size": 4096, "model_type": "glm4v_text"}}
DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm4v", "glm46v", "glmga"), GLM_VISION),
    "glm4v_moe": {"text_config": {**GLM_TEXT, "hidden_size": 4096, "model_type": "glm4v_moe_text"}},
    "lfm2_vl": {
        "text_config": {
            **{"model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
        }
    },
    "lfm2": {"hidden_size": 2048, "block_dim": 2048, "conv_dim": 2048},
    "glm4_moe": {"head_dim": 128},
    "gemma3": {"vision_config": {"vision_use_head": False, "image_size": 896, "patch_size": 14}},
    "shieldgemma2": {"architectures": ["ShieldGemma2ForImageClassification"]},
    "llama4": {"text_config": {"model_type": "llama4_text", "num_hidden_layers": 2}},
    "rwkv": {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    "xlstm": {"embedding_dim": 64, "num_heads": 2, "num_blocks": 2, "vocab_size": 64},
    "mamba2": {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "n_groups": 1, "num_hidden_layers": 2},
    "codegen": {"n_embd": 128, "n_head": 4, "rotary_dim": 16, "n_layer": 2},
    "dbrx": {"d_model": 64, "n_heads": 2, "n_layers": 2},
    "deepseek_v2": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "granite": {"attention_multiplier": 0.0078125},
    "granitemoe": {"attention_multiplier": 0.0078125},
    "granitemoeshared": {"attention_multiplier": 0.0078125},
    "granite_swa": {"attention_multiplier": 0.0078125},
    "granitemoe_swa": {"attention_multiplier": 0.0078125},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "ministral": {"head_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "blt": {"vocab_size": 64, "encoder_hash_byte_group_vocab": 64},
    "zamba2": {"hidden_size": 64, "num_attention_heads": 4, "n_mamba_heads": 4, "mamba_headdim": 32},
}
"""What the default configs of some types lack, such as names in LFM2's files; or sizes that are not shrunk."""
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3.1 (llama3 rope)": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 8}),
    "llama with linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral 0.1 (window)": ("mistral", {"sliding_window": 64}),
    "mistral 0.3 (no window)": ("mistral", {"sliding_window": None}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, **WINDOWS, "layer_types": ["sliding_attention"] * 4}),
    "qwen2 with windows in some layers": ("qwen2", {"use_sliding_window": True, **WINDOWS}),
    "qwen2.5 with yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2.5, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe, some layers dense": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "gemma3 with linear rope": ("gemma3_text", {"sliding_window": 64}),
    "gemma2 without softcaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 with a softcap in the head": ("gemma2", {"attn_logit_softcapping": None}),
    "granite 3 (multipliers)": (
        "granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    ),
    "granite with an attention multiplier": ("granite", {"attention_multiplier": 0.1, "residual_multiplier": 0.22}),
    "phi3 with a window": ("phi3", {"sliding_window": 64}),
    "smollm3 without rope in a layer": ("smollm3", {"no_rope_layers": [1, 0, 1, 0], "num_hidden_layers": 4}),
    "olmo3 with windows": ("olmo3", WINDOWS),
    "exaone4 with windows": ("exaone4", WINDOWS),
    "cohere, tied": ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.0625}),
    "cohere without a scale": ("cohere", {"tie_word_embeddings": True, "logit_scale": 1.0}),
    "stablelm with parallel residuals": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon with new heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}),
    "mixtral with a window": ("mixtral", {"sliding_window": 64}),
    "deepseek_v3 without groups": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "deepseek_v2 without query rank": ("deepseek_v2", {"q_lora_rank": None}),
    "glm4_moe, tied": ("glm4_moe", {"tie_word_embeddings": True}),
    "starcoder2 with a window": ("starcoder2", {"sliding_window": 64}),
    "seed_oss with dropout": ("seed_oss", {"residual_dropout": 0.1, "attention_dropout": 0.1}),
    "nemotron_h without experts": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "lfm2 with convolutions": ("lfm2", {"layer_types": ["conv", "conv", "full_attention"], "num_hidden_layers": 3}),
}
"""What a family's own default config does not show."""


def families() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return every family by name, each a `model_type` and overrides of its config."""
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    plain = {kind: (kind, DEFAULTS.get(kind, {})) for kind in sorted(known - {*PARTS_ONLY})}
    return {**plain, **VARIANTS}


def config_of(name: str) -> Any:
    """Return the config of a family."""
    kind, overrides = families()[name]
    return AutoConfig.for_model(kind, **DEFAULTS.get(kind, {}) | overrides)


def stay() -> None:
    """Called first by each rank of a certificate. Its parent is a fork server, which ends with the benchmark."""
