"""Attention over a row: one kernel call, or two whose softmaxes are joined where answers share a long prompt.

The second call lets the answers, as one query sequence, see all of the prompt. With outputs O, log-sum-exps L and s =
sigmoid(L_prompt - L_own), an answer's token gets

    O = (1 - s) O_own + s O_prompt,    L = log(exp(L_own) + exp(L_prompt)).

In the backward pass each call gets the whole softmax's O and L, so that exp(score - L) and dO . O are the whole's, and
gradients add up exactly.

A sink is one more score z of each head, with value zero: O becomes O sigmoid(L - z), L becomes log(exp(L) + exp(z)),
and the gradient of z is the sum of -exp(z - L) dO . O over tokens.
"""

from typing import Any

import torch
from torch import Tensor

from learner.model.kernels.operators import attend, attend_backward
from learner.model.microbatch import CopiedPrompts, SharedPrompts

Options = tuple[bool, float, int | None, str]
NOTHING_COPIED = (None, None, 0)
NOTHING_SHARED = (None, None, 0, 0, 0, 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    shared: SharedPrompts | CopiedPrompts | None,
    options: Options,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over the pieces at `starts`: [tokens, heads, head_dim].

    `options`: whether causal, scale, sliding window, kernel; `plain` alone has a `softcap`.
    """
    copied = shared if isinstance(shared, CopiedPrompts) else NOTHING_COPIED
    prompts = shared if isinstance(shared, SharedPrompts) else NOTHING_SHARED
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, softcap, starts, longest, options, *copied, *prompts
    )
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        softcap: float | None,
        starts: Tensor,
        longest: int,
        options: Options,
        copied: Tensor | None,
        key_starts: Tensor | None,
        longest_keys: int,
        answers: Tensor | None,
        prompts: Tensor | None,
        longest_answers: int,
        longest_prompt: int,
        p: int,
        e: int,
    ) -> Tensor:
        out: Tensor
        keys = (starts, longest) if key_starts is None else (key_starts, longest_keys)
        out, lse = attend(q, k, v, starts, keys[0], longest, keys[1], *options, copied, softcap)
        if answers is not None and prompts is not None:
            places = answers, prompts, longest_answers, longest_prompt
            prompt_out, prompt_lse = attend(q[p:e], k[:p], v[:p], *places, False, *options[1:], None, softcap)
            own_out, own_lse = out[p:e], lse[:, p:e]
            share = (prompt_lse - own_lse).sigmoid().T[..., None]
            merged = own_out.to(share.dtype).lerp(prompt_out.to(share.dtype), share).to(out.dtype)
            # Not in place: selective checkpointing keeps the operator's results.
            out = torch.slice_scatter(out, merged, 0, p, e)
            lse = torch.slice_scatter(lse, torch.logaddexp(own_lse, prompt_lse), 1, p, e)
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, starts, copied, key_starts, answers, prompts, sinks)
        ctx.rest = longest, longest_keys, longest_answers, longest_prompt, p, e, options, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, k, v, out, lse, starts, copied, key_starts, answers, prompts, sinks = ctx.saved_tensors
        longest, longest_keys, longest_answers, longest_prompt, p, e, options, softcap = ctx.rest
        keys = (starts, longest) if key_starts is None else (key_starts, longest_keys)
        places = starts, keys[0], longest, keys[1]
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, *places, *options, copied, softcap)
        if answers is not None:
            of_answers = grad[p:e], q[p:e], k[:p], v[:p], out[p:e], lse[:, p:e]
            places = answers, prompts, longest_answers, longest_prompt
            more_q, more_k, more_v = attend_backward(*of_answers, *places, False, *options[1:], None, softcap)
            dq = dq.slice_scatter(dq[p:e] + more_q, 0, p, e)
            dk, dv = (x.slice_scatter(x[:p] + more, 0, 0, p) for x, more in ((dk, more_k), (dv, more_v)))
        dsinks = None if sinks is None else _gradient_of_sinks(grad, out, lse, sinks)
        return dq, dk, dv, dsinks, *(None,) * 13


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    z = sinks.to(lse.dtype)[:, None]
    share = (lse - z).sigmoid().T[..., None]
    return (out.to(share.dtype) * share).to(out.dtype), torch.logaddexp(lse, z)


def _gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    products = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T
    return -((sinks.to(lse.dtype)[:, None] - lse).exp() * products).sum(-1).to(sinks.dtype)
