"""Batches whose samples have the routes of a server: for the learner's tests with experts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from buffer.wire.message import Array
from buffer.wire.sample import Sample
from configs.schema import ModelConfig
from learner.model.experts.mixture import Experts
from learner.model.experts.router import Router
from tests.harness.tiny_experts import tiny_experts
from tests.harness.world import Entry

SIZES = Experts(layers=2, number=8, top_k=2)
"""Experts of `tiny_experts` as it is."""


def expert_model(folder: Path, **shape: Any) -> ModelConfig:
    """The tiny mixture of experts; `shape`: fields of its config."""
    tiny_experts(folder, **shape)
    return ModelConfig(path=str(folder), dtype=shape.get("dtype", "float32"))


def random_routes(tokens: Sequence[int], sizes: Experts = SIZES, seed: int = 0) -> np.ndarray:
    """Distinct experts for each token and layer, [tokens, layers, k], that depend on the tokens before them alone, so
    that samples with one prompt have one route through it."""
    state, routes = seed, []
    for token in tokens:
        state = hash((state, int(token)))
        draw = np.random.default_rng(state % 2**32)
        routes.append([draw.permutation(sizes.number)[: sizes.top_k] for _ in range(sizes.layers)])
    return np.array(routes, np.uint8)


def routed(
    entries: Sequence[Entry], routes_of: Callable[[np.ndarray], np.ndarray] = random_routes, last: bool = False
) -> list[Entry]:
    """The batch with routes, those of `routes_of` for the tokens of each segment; zeros for its last token, or not."""
    samples = [_with_routes(Sample.unpack(entry.sample), routes_of, last) for entry in entries]
    return [entry._replace(sample=sample.pack()) for entry, sample in zip(entries, samples, strict=True)]


def _with_routes(sample: Sample, routes_of: Callable[[np.ndarray], np.ndarray], last: bool) -> Sample:
    tokens, segments = sample.tokens.numpy(), []
    for start, stop in sample.bounds:
        segment = np.array(routes_of(tokens[start:stop]))
        segment[-1] *= last
        segments.append(segment)
    return sample.model_copy(update={"routes": Array.of(np.concatenate(segments))})


def own_routes(model: Any, tokens: np.ndarray) -> np.ndarray:
    """What the routers of transformers' `model` choose: [tokens, layers, k]."""
    chosen: list[np.ndarray] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    assert not any(isinstance(gate, Router) for gate in gates)
    hooks = [gate.register_forward_hook(lambda _, __, out: chosen.append(out[2].numpy())) for gate in gates]
    with torch.no_grad():
        model(torch.tensor(tokens.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return np.stack(chosen, 1).astype(np.uint8)
