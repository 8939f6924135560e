"""The kernels behind `operators.attend`: attention over sequences of many lengths, forward and backward.

Query and output are [queries, heads, head_dim], key and value [keys, fewer or as many heads, head_dim], log-sum-exp
[heads, queries]. In a backward pass output and log-sum-exp may be a longer softmax's: gradients are then exact parts of
the whole. No sequence is empty.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn
from torch import Tensor

from learner.model.kernels import plain
from learner.model.kernels.sequences import Pair, Sequences, Triple

aten = torch.ops.aten


class Kernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor, Sequences], Pair]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequences], Triple]
    """(gradient of the output, query, key, value, output, log-sum-exp, sequences) -> gradients."""


def empty_results(q: Tensor, v: Tensor) -> Pair:
    """Room for output and log-sum-exp, which is float32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=dtype)


def _by_head(x: Tensor) -> Tensor:
    return x[None].transpose(1, 2)


def _cpu_mask(q: Tensor, k: Tensor, causal: bool) -> tuple[bool, Tensor | None]:
    """aten's causal mask aligns the first query with the first key."""
    (queries, keys), dtype = (len(q), len(k)), q.dtype
    if not causal or queries == keys:
        return causal, None
    return False, torch.full((queries, keys), -torch.inf, dtype=dtype).triu(1 + keys - queries)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, at: Sequences) -> Pair:
    """An empty query would kill the process (SIGFPE), so nothing is padded."""
    assert at.window is None
    out, lse = empty_results(q, v)
    for own, seen in at.spans():
        causal, mask = _cpu_mask(q[own], k[seen], at.causal)
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            _by_head(q[own]), _by_head(k[seen]), _by_head(v[seen]), 0.0, causal, attn_mask=mask, scale=at.scale
        )
        out[own], lse[:, own] = found[0][0].transpose(0, 1), found[1][0]
    return out, lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Sequences) -> Triple:
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    for own, seen in at.spans():
        causal, mask = _cpu_mask(q[own], k[seen], at.causal)
        inputs = map(_by_head, (grad[own], q[own], k[seen], v[seen], out[own]))
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, lse[None, :, own], 0.0, causal, attn_mask=mask, scale=at.scale
        )
        for whole, part, of in zip(grads, found, (own, seen, seen), strict=True):
            whole[of] = part[0].transpose(0, 1)
    return grads


def _varlen_options(at: Sequences) -> tuple[bool, list[int]]:
    left, right = at.bounds(none=-1)
    return at.causal and at.window is None, [left, 0 if at.causal else right]


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, at: Sequences) -> Pair:
    causal, window = _varlen_options(at)
    out, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *at.places, causal, at.scale, window)
    return out, lse


def _varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Sequences) -> Triple:
    causal, window = _varlen_options(at)
    dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.torch_attn._varlen_attn_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, *at.places, causal, dropout, at.scale, window
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, at: Sequences) -> Pair:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    left, right = at.bounds(none=-1)
    out, lse, *_ = _flash_attn_varlen_forward(
        q, k, v, *at.places, 0.0, at.scale, at.causal, window_size_left=left, window_size_right=right
    )
    return out, lse


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Sequences) -> Triple:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    left, right = at.bounds(none=-1)
    _flash_attn_varlen_backward(  # fills `grads`
        grad, q, k, v, out, lse, *grads, *at.places, 0.0, at.scale, at.causal,
        window_size_left=left, window_size_right=right, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return grads


def _flash4_options(at: Sequences) -> dict[str, Any]:
    left, right = at.bounds(none=None)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options = {"softmax_scale": at.scale, "causal": at.causal, "window_size_left": left, "window_size_right": right}
    return dict(zip(names, at.places, strict=True)) | options


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, at: Sequences) -> Pair:
    from flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **_flash4_options(at))
    return out, lse


def _flash4_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Sequences) -> Triple:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = _flash_attn_bwd(q, k, v, out, grad, lse, **_flash4_options(at))
    return dq, dk, dv


KERNELS = {
    "sdpa": Kernel(_cpu_forward, _cpu_backward),
    "varlen": Kernel(_varlen_forward, _varlen_backward),
    "flash": Kernel(_flash_forward, _flash_backward),
    "flash4": Kernel(_flash4_forward, _flash4_backward),
    "plain": Kernel(plain.forward, plain.backward),
}
"""`sdpa` takes `plain` where aten's CPU kernel does not do."""
