"""Families of models that are trained exactly: a whole policy of each against transformers' own forward pass.

Documents packed in one row, longer and shorter than any window, and answers to a shared prompt get the
log-probabilities and gradients of each document alone. What a server would get are the tensors of the model's files,
under their names. The models are tiny and random; their norms, biases and sinks differ from the initial values.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from configs.schema import LearnerConfig, ModelConfig
from learner.model import loading
from learner.model.exactness import reasons
from learner.model.memory import estimate
from learner.model.microbatch import lay_out
from learner.model.policy import Policy

WINDOW, VOCABULARY = 16, 112
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
TIED = {"tie_word_embeddings": True}
DELTA_RULE = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
PROPORTIONAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
NEMOTRON = {
    "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
    "num_hidden_layers": ...,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        TIED
        | {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("gemma3_text", TIED | SLIDING | {"query_pre_attn_scalar": 32}),
    "gemma4": (
        "gemma4_text",
        TIED
        | SLIDING
        | {
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 3.0,
            "rope_parameters": PROPORTIONAL,
            "global_head_dim": 64,
        },
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    ),
    "cohere": ("cohere", TIED | {"logit_scale": 0.25}),
    "cohere2": ("cohere2", TIED | SLIDING | {"logit_scale": 0.25}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", SLIDING),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0]}),
    "qwen3_5": ("qwen3_5_text", DELTA_RULE),
    "lfm2": ("lfm2", TIED | {"layer_types": ["conv", "conv", "full_attention"], "block_multiple_of": 32}),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.5}),
    "granitemoehybrid": (
        "granitemoehybrid",
        MAMBA
        | {
            "layer_types": ["mamba", "mamba", "attention"],
            "logits_scaling": 3.0,
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
    ),
    "jamba": (
        "jamba",
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", DELTA_RULE),
    "recurrent_gemma": (
        "recurrent_gemma",
        TIED
        | {
            "block_types": ["recurrent", "recurrent", "attention"],
            "lru_width": 64,
            "attention_window_size": WINDOW,
            "logits_soft_cap": 3.0,
        },
    ),
    "minicpm3": ("minicpm3", LATENT | {"dim_model_base": 16}),
    "youtu": ("youtu", LATENT | {"head_dim": ..., "pad_token_id": None}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "apertus": ("apertus", {}),
    "vaultgemma": ("vaultgemma", SLIDING | {"query_pre_attn_scalar": 32, "final_logit_softcapping": 3.0}),
    "nanochat": ("nanochat", {"final_logit_softcapping": 3.0}),
    "hyperclovax": ("hyperclovax", {"logits_scaling": 3.0}),
    "granite_swa": ("granite_swa", SLIDING | {"logits_scaling": 3.0}),
    "exaone4": ("exaone4", SLIDING),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {}),
    "jais2": ("jais2", {}),
    "diffllama": ("diffllama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": ...}),
    "starcoder2": ("starcoder2", {}),
    "persimmon": ("persimmon", {"num_key_value_heads": ...}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "cwm": ("cwm", SLIDING | {"bos_token_id": 2}),
    "bitnet": ("bitnet", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, **SLIDING}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "olmoe": ("olmoe", EXPERTS | {"intermediate_size": 32}),
    "glm4_moe": ("glm4_moe", ROUTED),
    "deepseek_v3": ("deepseek_v3", ROUTED | LATENT | {"head_dim": ...}),
    "deepseek_v2": ("deepseek_v2", ROUTED | LATENT | {"head_dim": ..., "topk_method": "greedy"}),
    "qwen3_next": ("qwen3_next", DELTA_RULE | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_RULE | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0}),
    "lfm2_moe": (
        "lfm2_moe",
        TIED | EXPERTS | {"layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 1},
    ),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "afmoe": ("afmoe", EXPERTS | SLIDING),
    "laguna": ("laguna", EXPERTS | SLIDING | {"shared_expert_intermediate_size": 32}),
    "kimi_linear": (
        "kimi_linear",
        ROUTED
        | LATENT
        | {"head_dim": ..., "linear_num_heads": 2, "linear_head_dim": 16, "layer_types": DELTA_RULE["layer_types"]},
    ),
    "hunyuan_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 32}),
}
FAST = (
    *("mistral", "gemma2", "gemma4", "granite", "cohere", "phi", "olmo3", "glm4", "qwen3_5", "lfm2", "nemotron_h"),
    *("falcon_h1", "minicpm3", "stablelm", "apertus", "gpt_neox", "gpt_oss", "deepseek_v3", "qwen3_next", "mixtral"),
    "ernie4_5_moe",
)
"""Families of the fast tests: each part that is special at least once."""
LEARNER = LearnerConfig(head_chunk_tokens=32, activation_checkpointing="block", gather="pass")


def config_of(name: str) -> Any:
    kind, overrides = FAMILIES[name]
    return AutoConfig.for_model(kind, **{key: x for key, x in (COMMON | overrides).items() if x is not ...})


def saved(config: Any, folder: Path) -> Any:
    """Save a random model, and return it as transformers runs it: eager, float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *loading.persistent_buffers(model)]:
            if not name.endswith(("A_log", "dt_bias", ".D")):
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=draw))
    model.save_pretrained(folder)
    return model


def alone(model: Any, text: np.ndarray) -> Tensor:
    """Log-probabilities of a document by the model's own forward pass, 0 for its first token: [tokens]."""
    ids = torch.as_tensor(text)[None]
    logp = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), logp[:-1].gather(-1, ids[0, 1:, None])[:, 0]])


def row_of(texts: list[np.ndarray], groups: tuple[int, ...] = ()) -> Any:
    sampled = [np.full(len(x), i >= len(groups)) for i, x in enumerate(texts)]
    zeros = [np.zeros(len(x)) for x in texts]
    return lay_out(texts, sampled, zeros, zeros, range(len(texts)), groups)


def texts_of(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(sum(lengths))
    return [draw.integers(2, VOCABULARY, length) for length in lengths]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_a_family_is_trained_exactly(name: str, tmp_path: Path, mesh: Any) -> None:
    config = config_of(name)
    assert reasons(config) == []
    model = saved(config, tmp_path)
    written = ModelConfig(path=str(tmp_path), dtype="float32")
    assert estimate(written, LEARNER, 1).total(1024) > 16 * model.num_parameters()
    policy = Policy(written, LEARNER, mesh)
    check_packed(policy, model)
    if policy.sharing.prompts:
        check_shared(policy, model)
    check_published(policy, tmp_path)


def check_packed(policy: Policy, model: Any) -> None:
    """Log-probabilities and gradients of packed documents are those of each alone."""
    texts = texts_of(40, 7, 1, 25, 33)
    wanted = torch.cat([alone(model, text) for text in texts])
    got = policy(policy.place(row_of(texts)), temperature=1.0)[0]
    assert float((got - wanted).detach().abs().max()) < 1e-4
    by = torch.randn(len(got), generator=torch.Generator().manual_seed(2))
    (wanted * by).sum().backward()
    (got * by).sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    scale = max(float(grad.norm()) for grad in theirs.values() if grad is not None)
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        ours = parameter.grad.full_tensor()
        error = float((ours - (0 if theirs[name] is None else theirs[name])).norm())
        assert error <= 1e-4 * float(ours.norm()) + 1e-6 * scale, name


@torch.no_grad()
def check_shared(policy: Policy, model: Any) -> None:
    """Answers to a shared prompt, and to a copied one, get the log-probabilities of whole documents."""
    prompt, *answers = texts_of(19, 14, 1, 26)
    whole = [alone(model, np.concatenate([prompt, answer]))[len(prompt) :] for answer in answers]
    row = row_of([prompt, *answers], (len(answers),))
    for each in (row, row.copying(np.inf)):
        got = policy.score(policy.place(each), temperature=1.0)[len(prompt) :]
        assert float((got - torch.cat(whole)).abs().max()) < 1e-4


def check_published(policy: Policy, folder: Path) -> None:
    """A server gets what the model's files hold, under their names."""
    policy.zero_grad()
    policy.logprobs_of([2, 3, 4])
    files = load_file(folder / "model.safetensors")
    published = {name: tensor.clone() for name, tensor in policy.full_weights()}
    assert list(published) == [spec.name for spec in policy.weight_specs()]
    assert published.keys() == files.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, files[name].to(tensor.dtype)), name
