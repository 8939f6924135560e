"""Shapes of models of other families than Qwen's dense ones, for benchmarks: `config.json` of each. Pure data.

Sizes are those of the public models; a name that ends in `-cut` has fewer layers, experts or words, so that a learner
of one GPU holds it. The specks have the same layers, for CPU.
"""

from typing import Any

from configs.architecture import reads_images

QWEN35_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "tie_word_embeddings": True, "eos_token_id": None, "head_dim": 256,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN35 = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True}
GEMMA3_TEXT: dict[str, Any] = {"model_type": "gemma3_text", "sliding_window": 1024, "eos_token_id": None}
GEMMA3 = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": None}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "eos_token_id": None, "head_dim": 64,
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128,
    "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "eos_token_id": None,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "eos_token_id": None,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"],
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "conv_L_cache": 3, "conv_bias": False,
    "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    "tie_word_embeddings": True,
}  # fmt: skip
SPECK: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "max_position_embeddings": 4096}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3.5-2B": QWEN35 | {
        "text_config": QWEN35_TEXT | {
            "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
            "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 16,
            "linear_num_value_heads": 16, "max_position_embeddings": 32768,
        },
        "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
                          "out_hidden_size": 2048},
    },
    "Gemma-3-4B": GEMMA3 | {
        "text_config": GEMMA3_TEXT | {
            "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
        },
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                          "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
                          "vision_use_head": False},
    },
    "Gemma-3-4B-cut": GEMMA3 | {
        "text_config": GEMMA3_TEXT | {
            "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 20,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
        },
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 2,
                          "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
                          "vision_use_head": False},
    },
    "gpt-oss-20b-cut": GPT_OSS | {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_local_experts": 32, "max_position_embeddings": 32768,
    },
    "DeepSeek-V3-cut": DEEPSEEK | {
        "vocab_size": 32768, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 32, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "max_position_embeddings": 32768,
    },
    "Nemotron-H-cut": NEMOTRON | {
        "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "max_position_embeddings": 8192,
    },
    "LFM2-350M": LFM2 | {
        "vocab_size": 65536, "hidden_size": 1024, "block_dim": 1024, "conv_dim": 1024, "block_ff_dim": 6656,
        "intermediate_size": 6656, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0,
        "layer_types": ["full_attention" if at in (2, 5, 8, 10, 12, 14) else "conv" for at in range(16)],
    },
    "speck-qwen3.5": QWEN35 | {
        "text_config": QWEN35_TEXT | SPECK | {"num_hidden_layers": 4, "linear_num_key_heads": 2,
                                              "linear_num_value_heads": 2, "head_dim": 32},
        "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
                          "out_hidden_size": 64},
    },
    "speck-gemma-3": GEMMA3 | {
        "text_config": GEMMA3_TEXT | SPECK | {"num_hidden_layers": 2, "head_dim": 32, "sliding_window": 32},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "image_size": 28, "patch_size": 14},
    },
    "speck-gpt-oss": GPT_OSS | SPECK | {"num_local_experts": 8, "sliding_window": 32, "head_dim": 32},
    "speck-deepseek": DEEPSEEK | SPECK | {
        "moe_intermediate_size": 32, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32,
    },
    "speck-lfm2": LFM2 | SPECK | {
        "block_dim": 64, "conv_dim": 64, "block_ff_dim": 128, "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", "full_attention"],
    },
    "speck-nemotron": NEMOTRON | SPECK | {"head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2,
                                          "ssm_state_size": 16},
}  # fmt: skip
"""By name. vLLM on a CPU serves no mixture of these types (docs/experts.md). vLLM alone reads `topk_method` and
`scoring_func`."""
EOSLESS = {"eos_token_id": None, "bos_token_id": None}
"""No end token: sequences run to their full length."""


def family_config(shape: str) -> dict[str, Any]:
    """`config.json` of a shape."""
    given = FAMILIES[shape] | EOSLESS | {"dtype": "bfloat16"}
    return given | ({"text_config": given["text_config"] | EOSLESS} if "text_config" in given else {})


def text_alone(shape: str) -> bool:
    """`model.text_alone` of a shape, of which no benchmark has images."""
    return reads_images(FAMILIES.get(shape, {}))


def vocabulary_of(config: dict[str, Any]) -> int:
    """Tokens of a model by its `config.json`."""
    return int(config.get("text_config", config)["vocab_size"])
