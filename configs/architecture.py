"""What in a model's config.json keeps the learner from training it exactly; and how many positions it has.

Pure functions of the config as JSON has it, in the words of transformers 4 or 5. What only the built model shows is
tried by `learner/model/exactness.py`. Used by `checks.py`, `model_facts.py`, `actors/doctor` and the learner.
"""

from collections.abc import Iterator, Mapping
from typing import Any

PROVEN = (
    *("llama", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text"),
)
"""Types of models whose packed rows the tests compare with transformers': the doctor need not try them."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Layers whose documents do not see each other in a packed row."""
QUANTISED = ("quantization_config", "compression_config")
"""Keys that say how weights are quantised, now and in the first compressed tensors."""
LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")
"""Keys that list the type of each layer."""
ROPES = ("default", "linear", "llama3", "mrope", "yarn")
"""Rotary embeddings whose frequencies depend on nothing but the config."""
FINAL = ("deepseek_llama_scaling", "deepseek_yarn", "llama3", "longrope", "su", "yarn")
"""Rotary embeddings with which `max_position_embeddings` counts as it is; with others it is multiplied by `factor`."""
ROPE_KEYS = ("rope_parameters", "rope_scaling")
"""Where transformers 5 and 4 write the rotary embedding."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: that of a vision-language model is nested."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def is_proven(config: Mapping[str, Any]) -> bool:
    """Whether the tests compare such models with transformers', so that nothing need be tried."""
    return config.get("model_type") in PROVEN and not any(unsupported(config))


def unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Why the learner would not train such a model exactly, as far as config.json says: each with its remedy.

    Example: `next(unsupported({"layer_types": ["conv"]}))` begins with `it has layers of type conv, and documents of`.
    """
    text = text_config(config)
    found = (part.get(key) for part in (config, text) for key in QUANTISED)
    if quantised := next(filter(None, found), None):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        yield f"its weights are quantised ({method}), and the learner trains bfloat16 or float32; dequantise them first"
    for key in LAYER_KEYS:
        types = text.get(key)
        if others := sorted({str(each) for each in types} - {*LAYER_TYPES}) if isinstance(types, list | tuple) else []:
            rule = "documents of a packed row are kept apart in full and sliding attention only"
            yield f"it has layers of type {', '.join(others)}, and {rule}; take a model without such layers"
    for kind in sorted({rope_type(rope) for rope in ropes(text)} - {*ROPES}):
        rule = "whose frequencies follow the longest document of a packed row, or are unknown"
        yield f"its rotary embedding is of type {kind}, {rule}; take a model with one of {', '.join(ROPES)}"


def ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rotary embeddings of a text config, one for each type of layer where they differ."""
    for key in ROPE_KEYS:
        given = config.get(key)
        if isinstance(given, Mapping) and given:
            nested = [each for each in given.values() if isinstance(each, Mapping)]
            yield from nested or [given]


def rope_type(rope: Mapping[str, Any]) -> str:
    """Example: `rope_type({"type": "yarn", "factor": 4.0}) == "yarn"`, in the words of transformers 4."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def usable_positions(config: Mapping[str, Any]) -> int | None:
    """The longest sample that vLLM serves of a text config; None where the config does not say.

    vLLM multiplies `max_position_embeddings` by the rotary embedding's factor, but not with one of FINAL, nor for
    Gemma 3, which writes the product.
    """
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    factors = [rope["factor"] for rope in ropes(config) if rope_type(rope) not in FINAL and rope.get("factor")]
    return positions if "gemma3" in str(config.get("model_type")) else int(positions * [1.0, *factors][-1])
