"""Corrects what vLLM computes otherwise than transformers and the learner, by other keys of config.json.

vLLM makes Cohere's sliding windows one token longer; so the server gets a shorter window, if vLLM's source adds one.
vLLM looks for the factor of Ministral 3's queries at late positions under another key, and would leave it out.
What cannot be corrected is refused.
"""

import ast
from collections.abc import Mapping
from typing import Any

from buffer.data.images import read_model_file
from configs.architecture import malformed, ropes, text_config, unserved
from configs.load import ConfigError
from rollout.engine.door.installed import attention_of_cohere

KIND = "cohere2"
DEFAULT = 4096
SCALED = "ministral3"
BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
SCALE = {BETA: 0.1, ORIGINAL: 16384}
"""transformers' values for a config without a rotary embedding."""


def check_served(key: str, model_path: str) -> None:
    """Raise ConfigError if vLLM would not compute what transformers does, also for a model from a hub, which no check
    of the run file has read. `key`: names the model."""
    config = read_model_file(model_path, "config.json") or {}
    found = list(malformed(text_config(config))) or list(unserved(config))
    if found:
        raise ConfigError([f"{key}: {model_path} ({config.get('model_type')}): {line}" for line in found])


def overridden(model_path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `hf_overrides` for vLLM: what the model needs, and `given`, which comes first. Raises ConfigError for an
    unreadable config.json."""
    made = window_override(model_path) | dict(given)
    for key, value in scale_override(model_path).items():
        made[key] = value | made.get(key, {})
    return made


def window_override(model_path: str) -> dict[str, Any]:
    """Return what vLLM reads in place of the model's own window, such as `{"sliding_window": 4095}`; {} for most
    models."""
    config = read_model_file(model_path, "config.json") or {}
    window = config.get("sliding_window", DEFAULT)
    if window is None or config.get("model_type") != KIND or not adds_one():
        return {}
    return {"sliding_window": window - 1}


def scale_override(model_path: str) -> dict[str, Any]:
    """Return vLLM's key for the factor of late queries, in the text model's config; {} for most models."""
    config = read_model_file(model_path, "config.json") or {}
    text = text_config(config)
    rope = next(ropes(text), SCALE)
    if text.get("model_type") != SCALED or rope.get(BETA) is None:
        return {}
    given = {"llama_4_scaling": {ORIGINAL: rope.get(ORIGINAL, SCALE[ORIGINAL]), "beta": rope[BETA]}}
    return given if text is config else {"text_config": given}


def adds_one() -> bool:
    """Whether the installed vLLM adds one to the window."""
    node = attention_of_cohere()
    return node is not None and any(_is_sum(each) for each in ast.walk(node))


def _is_sum(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and isinstance(node.left, ast.Attribute)
        and node.left.attr == "sliding_window"
    )
