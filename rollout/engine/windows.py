"""Corrects Cohere's sliding windows, which vLLM makes one token longer than transformers and the learner.

Log-probabilities of longer samples would differ. So the server gets a shorter window, if vLLM's source adds one.
"""

import ast
from typing import Any

from buffer.data.images import read_model_file
from rollout.engine.door.installed import attention_of_cohere

KIND = "cohere2"
DEFAULT = 4096


def window_override(model_path: str) -> dict[str, Any]:
    """Return what vLLM reads in place of the model's own window, such as `{"sliding_window": 4095}`; {} for most
    models. Raises ConfigError for an unreadable config.json."""
    config = read_model_file(model_path, "config.json") or {}
    window = config.get("sliding_window", DEFAULT)
    if window is None or config.get("model_type") != KIND or not adds_one():
        return {}
    return {"sliding_window": window - 1}


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
