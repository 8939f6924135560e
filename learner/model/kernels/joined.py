"""Attention over a row: one call of a kernel, or two whose softmaxes are joined where answers share a prompt.

A row is [prompts of shared groups | their answers, group by group | whole documents]. One causal call covers every
piece by itself. A second one lets the answers of a group, as one query sequence, see all of its prompt. With outputs
O, log-sum-exps L and s = sigmoid(L_prompt - L_own), an answer's token gets

    O = (1 - s) O_own + s O_prompt,    L = log(exp(L_own) + exp(L_prompt)).

In the backward pass each call gets O and L of the whole softmax: its probabilities exp(score - L) and the row sums
dO . O are then those of the whole, so both calls' gradients are exact and add up. torch.compile traces all of it.
For short prompts, whose keys are cheaper to copy: `copied.py`. Called by `learner/model/attention.py`; waits for
nothing.
"""

from typing import Any

import torch
from torch import Tensor

from learner.model.kernels.operators import attend, attend_backward
from learner.model.microbatch import SharedPrompts

Options = tuple[bool, float, int | None, str]
"""Whether causal, scale, sliding window, name of the kernel."""
NOTHING_SHARED = (None, None, 0, 0, 0, 0)


def attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, shared: SharedPrompts | None, options: Options
) -> Tensor:
    """Attention of query, key and value [tokens, heads, head_dim] over the pieces at `starts`, with gradient."""
    out: Tensor = _Attention.apply(q, k, v, starts, longest, options, *(shared or NOTHING_SHARED))  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        longest: int,
        options: Options,
        answers: Tensor | None,
        prompts: Tensor | None,
        longest_answers: int,
        longest_prompt: int,
        p: int,
        e: int,
    ) -> Tensor:
        out: Tensor
        out, lse = attend(q, k, v, starts, starts, longest, longest, *options)
        if answers is not None and prompts is not None:
            places = answers, prompts, longest_answers, longest_prompt
            prompt_out, prompt_lse = attend(q[p:e], k[:p], v[:p], *places, False, *options[1:])
            own_out, own_lse = out[p:e], lse[:, p:e]
            share = (prompt_lse - own_lse).sigmoid().T[..., None]
            merged = own_out.to(share.dtype).lerp(prompt_out.to(share.dtype), share).to(out.dtype)
            # Not in place: selective checkpointing keeps the operator's results as they are.
            out = torch.slice_scatter(out, merged, 0, p, e)
            lse = torch.slice_scatter(lse, torch.logaddexp(own_lse, prompt_lse), 1, p, e)
        ctx.save_for_backward(q, k, v, out, lse, starts, answers, prompts)
        ctx.rest = longest, longest_answers, longest_prompt, p, e, options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, k, v, out, lse, starts, answers, prompts = ctx.saved_tensors
        longest, longest_answers, longest_prompt, p, e, options = ctx.rest
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, starts, starts, longest, longest, *options)
        if answers is not None:
            of_answers = grad[p:e], q[p:e], k[:p], v[:p], out[p:e], lse[:, p:e]
            places = answers, prompts, longest_answers, longest_prompt
            more_q, more_k, more_v = attend_backward(*of_answers, *places, False, *options[1:])
            dq = dq.slice_scatter(dq[p:e] + more_q, 0, p, e)
            dk, dv = (x.slice_scatter(x[:p] + more, 0, 0, p) for x, more in ((dk, more_k), (dv, more_v)))
        return dq, dk, dv, *(None,) * 9
