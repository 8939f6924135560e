"""Finds what in a model's config.json prevents exact training, and how many positions the model has.
`learner/model/exactness.py` tries what only the built model shows."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from configs.served_keys import served_otherwise

PROVEN = (
    *("llama", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text"),
)
"""Tests compare packed rows of these types with transformers."""
SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")
"""Images of these types are trained. Other multimodal models are trained on text alone."""
MUTUAL = ("gemma3",)
"""The tokens of an image see each other, later ones too. All images are squares of one size."""
LAYER_TYPES = (
    *("full_attention", "sliding_attention", "attention"),
    *("linear_attention", "conv", "mamba", "mamba2", "hybrid", "recurrent"),
    *("mlp", "moe"),
)
"""The learner keeps documents apart in attention, in layers that keep a state (`learner/model/state.py`), and in layers
that see one token at a time."""
QUANTISED = ("quantization_config", "compression_config")
LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")
ROPES = ("default", "linear", "llama3", "mrope", "proportional", "yarn")
"""Their frequencies depend only on the config."""
FINAL = ("deepseek_llama_scaling", "deepseek_yarn", "llama3", "longrope", "su", "yarn")
"""With these `max_position_embeddings` is final; with others vLLM multiplies it by `factor`."""
GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Ends of names of classes with a head that predicts the next token."""
REWARD = ("SequenceClassification", "Reward")
"""In names of classes whose head scores a text."""
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "max_position_embeddings", "num_experts_per_tok", "decoder_sparse_step", "max_window_layers"),
)
"""Whole numbers or null."""
POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
ROPE_KEYS = ("rope_parameters", "rope_scaling")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model, which multimodal models nest."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def trains_text_alone(config: Mapping[str, Any], wanted: bool = False) -> bool:
    """Whether only the text model of a multimodal model is trained. `wanted`: `model.text_alone`."""
    seen = config.get("vision_config") is not None  # early files of Qwen2-VL nest their tower alone
    return (seen or text_config(config) is not config) and (wanted or config.get("model_type") not in SEEING)


def reads_images(config: Mapping[str, Any], text_alone: bool = False) -> bool:
    return config.get("model_type") in SEEING and not text_alone


def is_proven(config: Mapping[str, Any]) -> bool:
    """Whether tests cover models of this type."""
    if config.get("model_type") == "llama" and config.get("sliding_window"):  # which transformers ignores
        return False
    return config.get("model_type") in PROVEN and not any(unsupported(config))


def unsupported(config: Mapping[str, Any], served: bool = True) -> Iterator[str]:
    """Yield why the learner would not train the model exactly. `served`: beside servers of vLLM, which must compute the
    same."""
    text = text_config(config)
    if wrong := list(malformed(text)):
        yield from wrong
        return
    yield from _not_generative(config, text)
    found = (part.get(key) for part in (config, text) for key in QUANTISED)
    if quantised := next(filter(None, found), None):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        yield f"its weights are quantised ({method}), but the learner trains bfloat16 or float32; dequantise them first"
    for key in LAYER_KEYS:
        types = text.get(key)
        if others := sorted({str(each) for each in types} - {*LAYER_TYPES}) if isinstance(types, list | tuple) else []:
            rule = "the learner knows only full and sliding attention, delta rules, state spaces and convolutions"
            yield f"it has layers of type {', '.join(others)}, but {rule}; take a model without such layers"
    if crossing := text.get("cross_attention_layers"):
        rule = "and text, which passes none of them, gives their weights no gradient"
        yield f"its layers {crossing} attend to images alone, {rule}; take a model without such layers"
    for kind in sorted({rope_type(rope) for rope in ropes(text)} - {*ROPES}):
        rule = "whose frequencies are unknown or depend on the longest document of a packed row"
        yield f"its rotary embedding is of type {kind}, {rule}; take a model with one of {', '.join(ROPES)}"
    yield from unserved(config) if served else _bidirectional(config)


def unserved(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a server would not compute what transformers does. The config is well-formed."""
    text = text_config(config)
    yield from _bidirectional(config)
    yield from served_otherwise(text, list(ropes(text)), scores(config))


def _bidirectional(config: Mapping[str, Any]) -> Iterator[str]:
    if text_config(config).get("is_causal") is False and not scores(config):
        rule = "so tokens would see later ones"
        yield f"is_causal in its config.json is false, {rule}; remove it, or take a causal language model"


def scores(config: Mapping[str, Any]) -> bool:
    """Whether the model is a reward model."""
    return any(word in name for name in architectures(config) for word in REWARD)


def malformed(text: Mapping[str, Any]) -> Iterator[str]:
    remedy = "correct it or download the model again"
    for key in SIZES:
        if text.get(key) is not None and type(text[key]) is not int:
            yield f"{key} in its config.json is {json.dumps(text[key])}, not a whole number; {remedy}"
    for rope in ropes(text):
        factor = rope.get("factor")
        if factor is not None and type(factor) not in (int, float):
            yield f"the factor of its rotary embedding is {json.dumps(factor)}, not a number; {remedy}"


def _not_generative(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    named = architectures(config)
    if named and not any(name.endswith(GENERATIVE) for name in named):
        rule = "which has no head that predicts the next token"
        yield f"its architecture is {', '.join(named)}, {rule}; take a causal language model"
    if config.get("is_encoder_decoder"):
        yield "it is an encoder with a decoder, but the learner packs one sequence a sample; take a decoder"
    if text.get("dual_chunk_attention_config"):
        rule = "which vLLM computes and the learner does not"
        yield f"it has dual chunk attention, {rule}; remove dual_chunk_attention_config from its config.json"


def architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures") or ()
    return [named] if isinstance(named, str) else list(map(str, named))


def ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embedding, or one for each type of layer."""
    for key in ROPE_KEYS:
        given = config.get(key)
        if isinstance(given, Mapping) and given:
            nested = [each for each in given.values() if isinstance(each, Mapping)]
            yield from nested or [given]


def rope_type(rope: Mapping[str, Any]) -> str:
    """Example: `rope_type({"type": "yarn"}) == "yarn"`, in the words of transformers 4."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def usable_positions(config: Mapping[str, Any]) -> int | None:
    """Positions that vLLM computes. It accepts the smallest of POSITIONS times the rotary embedding's factor, except
    for FINAL and for Gemma 3, whose config has the product already. Of yarn it has a table of
    `original_max_position_embeddings` times the factor, and reads memory behind it for later positions."""
    found = [config[key] for key in POSITIONS if type(config.get(key)) is int]
    if not found:
        return None
    positions = min(found)
    factors = [rope["factor"] for rope in ropes(config) if rope_type(rope) not in FINAL and rope.get("factor")]
    accepted = positions if "gemma3" in str(config.get("model_type")) else int(positions * [1.0, *factors][-1])
    return min([accepted, *_tables(config)])


def _tables(config: Mapping[str, Any]) -> Iterator[int]:
    for rope in ropes(config):
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if "yarn" in rope_type(rope) and isinstance(original, int) and factor and "mrope_section" not in rope:
            yield int(original * factor)
