"""The routes of samples: the experts that a server chose for each token (`rollout.routing_replay`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffer.wire.protocol import Part
from buffer.wire.sample import AnySample
from learner.model.experts.mixture import Experts


class RouteMismatch(RuntimeError):
    """A sample has no routes that can be replayed."""


def open_routes(part: Part, samples: Sequence[AnySample], sizes: Experts | None) -> tuple[list[np.ndarray | None], str]:
    """Routes of `samples`, [tokens, layers, k] each, and what is wrong with one."""
    if sizes is None:
        return [None] * len(samples), ""
    opened = [None if sample.routes is None else sample.routes.numpy() for sample in samples]
    items, rows = part.rows.item.numpy(), part.positions.numpy().tolist()
    for sample, routes, row in zip(samples, opened, rows, strict=True):
        if problem := _wrong(sample.num_tokens, routes, sizes):
            return [None] * len(samples), f"item {items[row]}: sample {row} of batch {part.version} {problem}"
    return opened, ""


def _wrong(tokens: int, routes: np.ndarray | None, sizes: Experts) -> str:
    remedy = "the servers must run this model, with rollout.routing_replay: true"
    if routes is None:
        return f"has no routes; {remedy}"
    wanted = (tokens, sizes.layers, sizes.top_k)
    if routes.shape != wanted:
        have = "and its tokens, layers with experts and experts a token are"
        return f"has routes {list(routes.shape)}, {have} {list(wanted)}; {remedy}"
    if (largest := int(routes.max())) >= sizes.number:
        return f"has a route to expert {largest}, and there are {sizes.number}, counted from 0; {remedy}"
    return ""


def laid_out(pieces: Sequence[np.ndarray | None]) -> Tensor | None:
    """Join pieces [tokens, layers, k] to [layers, tokens, k]."""
    known = [piece for piece in pieces if piece is not None]
    if not known:
        return None
    assert len(known) == len(pieces), "open_routes found those of every sample"
    joined: Any = np.concatenate(known).transpose(1, 0, 2)
    return torch.from_numpy(np.ascontiguousarray(joined, np.uint8 if joined.dtype == np.uint8 else np.int32))
