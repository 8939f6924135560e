"""Attention in plain arithmetic for any device, the only kernel with a softcap.

It is slow: it takes one sequence after another, and waits for the GPU, because it reads the bounds of the sequences.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from learner.model.kernels.sequences import Pair, Sequences, Triple

PAIRS = 1 << 24
"""64 MiB of float32."""


def forward(q: Tensor, k: Tensor, v: Tensor, at: Sequences) -> Pair:
    """Output, and log-sum-exp in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=wide)
    for rows, seen, hidden in _tiles(q, at):
        scores, _ = _scores(q[rows].to(wide), k[seen].to(wide), hidden, at)
        norm = scores.logsumexp(-1)
        out[rows] = _weighted((scores - norm[..., None]).exp(), v[seen].to(wide)).to(out.dtype)
        lse[:, rows] = norm
    return out, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Sequences) -> Triple:
    """Gradients of query, key and value, in their dtypes."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
    rowsum = (grad.to(wide) * out.to(wide)).sum(-1).T
    for rows, seen, hidden in _tiles(q, at):
        own, keys, values, upstream = (x.to(wide) for x in (q[rows], k[seen], v[seen], grad[rows]))
        scores, slope = _scores(own, keys, hidden, at)
        p = (scores - lse[:, rows, None]).exp()
        dv[seen] += _per_key(p, upstream, v.shape[1])
        dp = torch.einsum("nkgd,mkd->kgnm", _grouped(upstream, v.shape[1]), values).flatten(0, 1)
        ds = p * (dp - rowsum[:, rows, None]) * at.scale
        ds = ds if slope is None else ds * slope
        dq[rows] = _weighted(ds, keys).to(dq.dtype)
        dk[seen] += _per_key(ds, own, k.shape[1])
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _tiles(q: Tensor, at: Sequences) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the keys that some of them see, and which are hidden."""
    for own, seen in at.spans():
        offset = (seen.stop - seen.start) - (own.stop - own.start)
        step = max(1, PAIRS // max(1, q.shape[1] * (seen.stop - seen.start)))
        for start in range(own.start, own.stop, step):
            rows = slice(start, min(start + step, own.stop))
            if not at.causal and at.window is None:
                yield rows, seen, None
                continue
            first, last = (place - own.start + offset for place in (rows.start, rows.stop - 1))
            low = 0 if at.window is None else max(0, first - at.window + 1)
            end = last + 1 if at.causal else seen.stop - seen.start
            distance = _places(first, last + 1, q)[:, None] - _places(low, end, q)
            hidden = (distance < 0) & at.causal
            hidden = hidden if at.window is None else hidden | (distance >= at.window)
            yield rows, slice(seen.start + low, seen.start + end), hidden


def _places(first: int, end: int, like: Tensor) -> Tensor:
    return torch.arange(first, end, device=like.device)


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, at: Sequences) -> tuple[Tensor, Tensor | None]:
    scores = torch.einsum("nkgd,mkd->kgnm", _grouped(q, k.shape[1]), k).flatten(0, 1) * at.scale
    slope = None
    if at.softcap is not None:
        bent = (scores / at.softcap).tanh()
        scores, slope = bent * at.softcap, 1 - bent.square()
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf), slope


def _grouped(x: Tensor, groups: int) -> Tensor:
    """-> [queries, heads of keys, heads of queries for each, head_dim]"""
    return x.reshape(len(x), groups, -1, x.shape[2])


def _weighted(p: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("kgnm,mkd->nkgd", p.unflatten(0, (v.shape[1], -1)), v).flatten(1, 2)


def _per_key(p: Tensor, x: Tensor, groups: int) -> Tensor:
    return torch.einsum("kgnm,nkgd->mkd", p.unflatten(0, (groups, -1)), _grouped(x, groups))
