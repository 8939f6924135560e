"""The experts that vLLM chose: kept until a sequence ends, and checked.

A row is [layers, k]: the experts that read one token. vLLM returns a row per token but the last sampled one, from the
computation that sampled the next. Some kernels report no choice: their rows are silently zeros.
"""

from typing import Any

import numpy as np

from configs.model_facts import expert_layers, num_experts
from rollout.errors import EngineDead

CHECKED_TOKENS = 64
"""Rows whose ids are compared; all are checked for zeros."""


class RowsKept:
    """Copies rows: the steps' arrays would stay in memory for all their sequences."""

    def __init__(self) -> None:
        self._data, self._like = bytearray(), np.zeros((0, 0, 0), np.uint8)

    def add(self, rows: np.ndarray) -> None:
        """`rows`: [tokens, layers, k]."""
        self._data += rows.tobytes()
        self._like = rows[:0]

    def joined(self) -> np.ndarray | None:
        return np.frombuffer(self._data, self._like.dtype).reshape(-1, *self._like.shape[1:]) if self._data else None


class ReturnedRoutes:
    """Checks a model's rows. `config`: the text config of transformers."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._layers, self._all_layers = expert_layers(config), int(config["num_hidden_layers"])
        self._experts, self._k = num_experts(config), int(config["num_experts_per_tok"])

    def checked(self, rows: np.ndarray | None, tokens: int) -> np.ndarray:
        """Return rows [tokens, layers, k] of layers with experts. Raises EngineDead for impossible rows."""
        if rows is None:
            raise EngineDead(f"{SILENT} no routes with {tokens} tokens{REMEDY}")
        shape, dtype = (tokens, self._all_layers, self._k), "uint8" if self._experts <= 256 else "uint16"
        if rows.shape != shape or rows.dtype != dtype:
            raise EngineDead(f"{SILENT} routes {rows.dtype}{list(rows.shape)} instead of {dtype}{list(shape)}{REMEDY}")
        rows = rows[:, self._layers]
        zeros = ~rows.any(axis=(1, 2)) if self._k > 1 else np.full(tokens, not rows.any())
        if zeros.any() and self._experts > 1:
            raise EngineDead(f"{SILENT} zeros as the routes of token {zeros.argmax()} of {tokens}{REMEDY}")
        some = np.sort(rows[np.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS), dtype=int)], axis=-1)
        if (some[..., 1:] == some[..., :-1]).any() or some.max() >= self._experts:
            raise EngineDead(f"{SILENT} routes that are no {self._k} of {self._experts} experts{REMEDY}")
        return rows


SILENT = "rollout.routing_replay: vLLM returned"
REMEDY = "; its kernel for this device does not report its choices: set rollout.routing_replay to false"
