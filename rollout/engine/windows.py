"""Sliding windows that vLLM makes one token longer than transformers and the learner: Cohere's.

Log-probabilities of samples longer than the window would differ. So the server is given a window that is one shorter,
where the installed vLLM's source adds one.
"""

import ast
from typing import Any

from buffer.data.images import read_model_file
from rollout.engine.door.installed import attention_of_cohere

KIND = "cohere2"
DEFAULT = 4096
"""The window where config.json names none."""


def window_override(model_path: str) -> dict[str, Any]:
    """What vLLM must read in place of the model's own window, as `hf_overrides`; empty for most models.

    Example: `{"sliding_window": 4095}` for Command R7B. Raises ConfigError for a config.json that cannot be read.
    """
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
