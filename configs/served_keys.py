"""Finds keys of a text model's config.json by which vLLM computes otherwise than transformers and the learner.

Each was seen with a small model of its type: vLLM 0.32 on a CPU gave other log-probabilities, or did not start.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

OTHERWISE = "take another model"


class ReadByOne(NamedTuple):
    """A key that only one of the two reads."""

    kinds: tuple[str, ...]
    name: str
    alike: tuple[Any, ...]
    """Values with which both compute the same."""
    served: bool = False
    """vLLM reads it."""


OFF, SILU, TANH = (None, False), (None, "silu"), "gelu_pytorch_tanh"
LLAMAS = ("apertus", "ernie4_5", "llama", "ministral3", "mistral", "phi3")
"""Types of vLLM's Llama."""
GENERAL = (
    *("arcee", "bitnet", "cwm", "diffllama", "flex_olmo", "glm", "gpt_neox", "helium", "hunyuan_v1_dense", "jais2"),
    *("mellum", "ministral", "nanochat", "olmo", "olmo2", "olmo3", "persimmon", "phi", "seed_oss", "smollm3"),
    *("starcoder2", "youtu"),
)
"""vLLM runs transformers' classes with an attention of its own, which reads config.json in the same way for all."""
KEYS = (
    ReadByOne(GENERAL, "attn_logit_softcapping", (None,), served=True),
    ReadByOne((*LLAMAS, "exaone4", "granite", "nemotron"), "bias", OFF, served=True),
    ReadByOne(("ernie4_5", "exaone4", "ministral3", "mistral", "phi3"), "attention_bias", OFF, served=True),
    ReadByOne(("apertus", "ernie4_5", "exaone4", "ministral3", "mistral", "phi3"), "mlp_bias", OFF, served=True),
    ReadByOne(("llama",), "logit_scale", (1,), served=True),
    ReadByOne(("mistral",), "llama_4_scaling", (None,), served=True),
    ReadByOne(("granite",), "attention_sinks", OFF, served=True),
    ReadByOne(("granite",), "layer_types", (None,), served=True),
    ReadByOne(("granite",), "layer_rope_theta", (None,), served=True),
    ReadByOne(("cohere", "cohere2"), "rms_norm_eps", (None,), served=True),
    ReadByOne(("cohere2",), "use_qk_norm", OFF, served=True),
    ReadByOne(("gemma",), "hidden_activation", (None, TANH), served=True),
    ReadByOne(("gemma",), "hidden_act", (None, "gelu", TANH)),
    ReadByOne(("gemma2",), "hidden_activation", (None, TANH)),
    ReadByOne(
        (
            *("cohere", "cohere2", "ernie4_5", "exaone4", "glm4", "granite", "llama", "ministral3", "mistral"),
            *("mixtral", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        ),
        "hidden_act",
        SILU,
    ),
    ReadByOne(("cohere", "cohere2", "gemma", "olmoe", "qwen3", "qwen3_moe"), "attention_bias", OFF),
    ReadByOne(("cohere", "cohere2", "gemma2"), "tie_word_embeddings", (None, True)),
    ReadByOne(("ernie4_5",), "use_bias", OFF),
    ReadByOne(("qwen2_moe",), "qkv_bias", (None, True)),
    ReadByOne(("olmoe",), "clip_qkv", (None,)),
    ReadByOne(("olmoe",), "rms_norm_eps", (None, 1e-5)),
    ReadByOne(("olmoe",), "norm_topk_prob", OFF),
)
WHOLE_HEADS = (
    *("apertus", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "llama"),
    *("mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
"""transformers rotates whole heads, vLLM a share of each."""
SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
ROTATED = "rope_dim"
TEXT = (*WHOLE_HEADS, "glm4", "ministral3", "nemotron", "phi3")
"""vLLM has no positions of images for these."""
SECTIONS = ("mrope_section", "xdrope_section")
FOURIER = "use_fope"
OWN_KEYS = ("gpt_neox", "persimmon")
"""transformers gives each of their heads keys of its own."""
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""vLLM takes the first."""
HEAD = ("logit_scale", "tie_word_embeddings")
"""Keys of the head that predicts the next token."""
ALL_OR_NONE = ("qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
"""vLLM gives a window to all layers or to none. If some have one, it does not start, or gives it to all."""
WINDOW, FIRST_WINDOW = 4096, 28
"""Qwen's values for a config without `sliding_window` and `max_window_layers`."""


def served_otherwise(
    text: Mapping[str, Any], ropes: Sequence[Mapping[str, Any]], classifies: bool = False
) -> Iterator[str]:
    """Yield a clause for each key, with its value and the remedy. `ropes`: of `text`. `classifies`: the model's head
    predicts no tokens."""
    kind = text.get("model_type")
    for key in KEYS:
        if classifies and key.name in HEAD:
            continue
        if kind in key.kinds and key.name in text and text[key.name] not in key.alike:
            yield _differs(key.name, text[key.name], key.served)
    yield from _kv_heads(text) if kind in (*GENERAL, "vaultgemma") else ()
    for name in (FOURIER, *(SECTIONS if kind in TEXT else ())):
        yield from (_differs(name, part[name], served=True) for part in (text, *ropes) if part.get(name))
    yield from _rotations(text, ropes) if kind in WHOLE_HEADS else ()
    yield from _windows(text) if kind in ALL_OR_NONE else ()
    bias = bool(text.get("attention_bias"))
    if kind in LLAMAS and bool(text.get("qkv_bias", bias)) != bias:
        yield _differs("qkv_bias", text["qkv_bias"], served=True)
    heads, size, width = (text.get(key) for key in ("num_attention_heads", "head_dim", "hidden_size"))
    if kind in ("qwen2", "qwen2_moe") and heads and size and width and size * heads != width:
        yield _differs("head_dim", size, served=False)


def _differs(name: str, value: Any, served: bool) -> str:
    by, other = ("vLLM", "transformers") if served else ("transformers", "vLLM")
    remedy = "remove it" if served else OTHERWISE
    return f"{name} in its config.json is {json.dumps(value)}, by which {by} computes and {other} does not; {remedy}"


def _kv_heads(text: Mapping[str, Any]) -> Iterator[str]:
    heads, own = text.get("num_attention_heads"), text.get("model_type") in OWN_KEYS
    number = heads if own else text.get("num_key_value_heads") or heads
    for name in KV_HEADS if own else KV_HEADS[:2]:
        if text.get(name) not in (None, number):
            yield _differs(name, text[name], served=True)


def _rotations(text: Mapping[str, Any], ropes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for part in (text, *ropes):
        for name in SHARES:
            if part.get(name) not in (None, 1):
                yield _differs(name, part[name], served=True)
                return
        if part is not text and part.get(ROTATED):
            yield _differs(ROTATED, part[ROTATED], served=True)
            return


def _windows(text: Mapping[str, Any]) -> Iterator[str]:
    window, layers = text.get("sliding_window", WINDOW), text.get("num_hidden_layers") or 0
    full, key, remedy = layers, "max_window_layers", "set use_sliding_window to false"
    if isinstance(types := text.get("layer_types"), list | tuple):
        full, layers, key = types.count("full_attention"), len(types), "layer_types"
        remedy += " and remove the key"
    elif text.get("use_sliding_window") and window:
        full = text.get("max_window_layers", FIRST_WINDOW) or 0
    if 0 < full < layers:
        how = f"leaves {full} of {layers} layers without a sliding window, and vLLM gives one to all layers or to none"
        limit = f" if no sample exceeds {window} tokens" if window else ""
        yield f"{key} in its config.json {how}; {remedy}{limit}, or {OTHERWISE}"
