"""Variable-length attention as two operators that torch.compile does not look into: `attend` and `attend_backward`.

Their signature is the same for every kernel of `implementations.py`, which the last argument names, so a compiled block
is one graph with any of them. Neither has a gradient of its own: `joined.py` differentiates, because an operator that
also answers a log-sum-exp would drop that one's gradient without a word. Results are contiguous, as the fakes say.
"""

import torch
from torch import Tensor

from learner.model.kernels.implementations import KERNELS, Sequences, empty_results


@torch.library.custom_op("headrace::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    q_longest: int,
    k_longest: int,
    causal: bool,
    scale: float,
    window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Output [queries, heads, head_dim] and float32 log-sum-exp [heads, queries]; see `Sequences`."""
    at = Sequences(q_starts, k_starts, q_longest, k_longest, causal, scale, window)
    out, lse = KERNELS[kernel].forward(q, k, v, at)
    return out.contiguous(), lse.contiguous()


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)


@torch.library.custom_op("headrace::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    q_longest: int,
    k_longest: int,
    causal: bool,
    scale: float,
    window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `grad` is that of `out`."""
    at = Sequences(q_starts, k_starts, q_longest, k_longest, causal, scale, window)
    dq, dk, dv = KERNELS[kernel].backward(grad.contiguous(), q, k, v, out, lse.contiguous(), at)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attend_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
