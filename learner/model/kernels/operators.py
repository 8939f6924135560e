"""Variable-length attention as operators that torch.compile does not look into.

`joined.py` differentiates: an operator would silently drop the gradient of its log-sum-exp. With `copied`, int64
indices, sequence i sees k[copied[k_starts[i] : k_starts[i + 1]]], likewise v. The operators make these copies, which
the compiler would keep for each layer's backward pass.
"""

import torch
from torch import Tensor

from learner.model.kernels.implementations import KERNELS, empty_results
from learner.model.kernels.sequences import Sequences


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
    copied: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [queries, heads, head_dim], log-sum-exp [heads, queries] float32; see `Sequences`."""
    at = Sequences(q_starts, k_starts, q_longest, k_longest, causal, scale, window, softcap)
    out, lse = KERNELS[kernel].forward(q, *_copies(k, v, copied), at)
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
    copied: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `grad` is that of `out`."""
    at = Sequences(q_starts, k_starts, q_longest, k_longest, causal, scale, window, softcap)
    dq, dk, dv = KERNELS[kernel].backward(grad.contiguous(), q, *_copies(k, v, copied), out, lse.contiguous(), at)
    if copied is not None:
        dk, dv = _added_up(dk, copied, k), _added_up(dv, copied, v)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attend_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _copies(k: Tensor, v: Tensor, copied: Tensor | None) -> tuple[Tensor, Tensor]:
    return (k, v) if copied is None else (k.index_select(0, copied), v.index_select(0, copied))


def _added_up(gradients: Tensor, copied: Tensor, like: Tensor) -> Tensor:
    total = like.new_zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
    return total.index_add_(0, copied, gradients.to(total.dtype)).to(like.dtype)


ATTEND, ATTEND_BACKWARD = torch.ops.headrace.attend.default, torch.ops.headrace.attend_backward.default


def schemas() -> str:
    """Schemas of all operators of Headrace.

    They belong to the key of compiled code that torch keeps: it calls an operator with all arguments, but a graph that
    leaves one at its default has the same key as a graph of a release without that argument.
    """
    every = torch._C._jit_get_all_schemas()
    return "; ".join(sorted(str(schema) for schema in every if schema.name.startswith("headrace::")))
