"""Attention over a row whose answers have copies of their prompt's keys: one causal call of a kernel.

A row is [shared prompts | their answers, group by group | whole documents]. Queries are the row's; keys and values are
gathered, so that each answer has all of its prompt's before its own. The arithmetic of a token is then that of its
sample by itself. In the backward pass the gradients of all copies add up, in float32. What is copied is small where
prompts are short; `joined.py` computes the others without copies. torch.compile traces all of it. Called by
`learner/model/attention.py`; waits for nothing.
"""

from typing import Any

import torch
from torch import Tensor

from learner.model.kernels.joined import Options
from learner.model.kernels.operators import attend, attend_backward
from learner.model.microbatch import CopiedPrompts


def attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, copied: CopiedPrompts, options: Options
) -> Tensor:
    """Attention of query, key and value [tokens, heads, head_dim] over the pieces at `starts`, with gradient."""
    out: Tensor = _CopiedAttention.apply(q, k, v, starts, longest, options, *copied)  # type: ignore[no-untyped-call]
    return out


class _CopiedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        longest: int,
        options: Options,
        keys: Tensor,
        key_starts: Tensor,
        longest_keys: int,
    ) -> Tensor:
        out: Tensor
        seen = k.index_select(0, keys), v.index_select(0, keys)
        out, lse = attend(q, *seen, starts, key_starts, longest, longest_keys, *options)
        ctx.save_for_backward(q, k, v, out, lse, starts, keys, key_starts)
        ctx.rest = longest, longest_keys, options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, starts, keys, key_starts = ctx.saved_tensors
        longest, longest_keys, options = ctx.rest
        seen = k.index_select(0, keys), v.index_select(0, keys)  # again: kept, they would be there once a layer
        places = starts, key_starts, longest, longest_keys
        dq, dk, dv = attend_backward(grads[0], q, *seen, out, lse, *places, *options)
        return dq, _summed(dk, keys, k), _summed(dv, keys, v), *(None,) * 6


def _summed(copies: Tensor, keys: Tensor, like: Tensor) -> Tensor:
    """Of each token the sum over its copies, shape and dtype of `like`."""
    total = like.new_zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
    return total.index_add_(0, keys, copies.to(total.dtype)).to(like.dtype)
