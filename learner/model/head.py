"""The log-probability head: fp32 log-probabilities and entropies of given tokens, never a [tokens, vocabulary] tensor.

Logits exist for `chunk` tokens at a time. `logprobs_and_entropy` computes them again in the backward pass, a fourth
matrix product of the vocabulary's size; `chunked_loss`, for a loss that can be had chunk by chunk, makes all gradients
while the logits are there. Consumes hidden states and the output embedding, gathered by FSDP; waits for nothing. Used
by `learner.policy`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ChunkLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""(log-probabilities, entropies, which of the tokens they are) -> their share of the loss: [], by plain autograd."""


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[targets] and the entropy of that softmax.

    `hidden` [tokens, width], `weight` [vocabulary, width], `targets` [tokens] int64; both answers [tokens] float32
    (float64 for float64 input). The gradient goes through the log-probabilities, and through the entropies with
    `entropy_gradient`.
    """
    logprobs, entropy = _Head.apply(hidden, weight, targets, temperature, chunk, entropy_gradient)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: ChunkLoss,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies, without gradient; and the sum of `loss` over the chunks, its gradient made here.

    Arguments and answers otherwise as of `logprobs_and_entropy`; with `entropy_gradient` the gradient goes through the
    entropies that `loss` is given as well.
    """
    logprobs, entropy, total = _Loss.apply(hidden, weight, targets, loss, temperature, chunk, entropy_gradient)  # type: ignore[no-untyped-call]
    return logprobs, entropy, total


class _Head(torch.autograd.Function):
    """With z the logits over the temperature T, p = softmax(z), H = logsumexp(z) - p.z:

    d logprob / dz = onehot - p,   dH / dz = -p (log p + H),   dz / dlogits = 1 / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _precision(hidden)
        logprobs, entropy, norms = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        wide = _widened(weight, dtype)
        for part in _chunks(len(hidden), chunk):
            z = _matmul(hidden[part], wide.T, dtype)
            logprobs[part], norms[part], entropy[part] = _scores(z, targets[part], temperature)
            del z  # before the next one is made
        ctx.save_for_backward(hidden, weight, targets, norms, entropy)
        ctx.temperature, ctx.chunk, ctx.entropy_gradient = temperature, chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, norms, entropy = ctx.saved_tensors
        by_logprob, by_entropy = (grad.contiguous() for grad in grads)
        dtype = _precision(hidden)
        wide = _widened(weight, dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        for part in _chunks(len(hidden), ctx.chunk):
            z = _matmul(hidden[part], wide.T, dtype)
            by = by_logprob[part], by_entropy[part] if ctx.entropy_gradient else None
            dz = _slope(z, targets[part], norms[part], entropy[part], *by, ctx.temperature, wide.dtype)
            del z
            grad_hidden[part] = dz @ wide
            _add_matmul(grad_weight, dz.T, hidden[part])
            del dz
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


class _Loss(torch.autograd.Function):
    """`_Head` and the loss behind it in one: what is kept for the backward pass are the gradients themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss: ChunkLoss,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = _precision(hidden)
        logprobs, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2))
        total = logprobs.new_zeros(())
        wide = _widened(weight, dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        for part in _chunks(len(hidden), chunk):
            z = _matmul(hidden[part], wide.T, dtype)
            logprobs[part], norms, entropy[part] = _scores(z, targets[part], temperature)
            value, by = _differentiated(loss, logprobs[part], entropy[part], part, entropy_gradient)
            total += value
            dz = _slope(z, targets[part], norms, entropy[part], *by, temperature, wide.dtype)
            del z
            grad_hidden[part] = dz @ wide
            _add_matmul(grad_weight, dz.T, hidden[part])
            del dz
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(logprobs, entropy)
        return logprobs, entropy, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[2], grad_weight * grads[2], None, None, None, None, None


def _differentiated(
    loss: ChunkLoss, logprobs: Tensor, entropy: Tensor, part: slice, entropy_gradient: bool
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The loss of `part`, and its gradient by the log-probabilities and, if wanted, by the entropies."""
    leaves = [logprobs.detach().requires_grad_(), entropy.detach().requires_grad_(entropy_gradient)]
    with torch.enable_grad():
        value = loss(leaves[0], leaves[1], part)
    wanted = leaves if entropy_gradient else leaves[:1]
    grads = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    by_logprob, *by_entropy = (grad.contiguous() for grad in grads)  # kernels read them by place
    return value.detach(), (by_logprob, by_entropy[0] if by_entropy else None)


def _scores(z: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, log-normalisers, entropies of `z`, [tokens, vocabulary], which it leaves."""
    if _fused(z):
        from learner.model import head_kernels  # triton is there where CUDA is

        return head_kernels.scores(z, targets, temperature)
    z = z / temperature
    norms = z.logsumexp(-1)
    logprobs = z.gather(-1, targets[:, None]).squeeze(-1) - norms
    p = (z - norms[:, None]).exp_()
    return logprobs, norms, norms - p.mul_(z).sum(-1)


def _slope(
    z: Tensor,
    targets: Tensor,
    norms: Tensor,
    entropy: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the loss by `z` before temperature, which it uses up; in `dtype` at once where that saves a pass."""
    if _fused(z):
        from learner.model import head_kernels

        return head_kernels.slope(z, targets, norms, entropy, by_logprob, by_entropy, temperature, dtype)
    logp = z.div_(temperature).sub_(norms[:, None])
    p = logp.exp()
    dz = torch.zeros_like(p) if by_entropy is None else logp.add_(entropy[:, None]).mul_(p).mul_(-by_entropy[:, None])
    dz.addcmul_(p, by_logprob[:, None], value=-1)
    dz.scatter_add_(-1, targets[:, None], by_logprob[:, None])
    return dz.div_(temperature).to(dtype)


def _fused(z: Tensor) -> bool:
    """Whether `learner.kernels` takes it."""
    return z.is_cuda and z.dtype == torch.float32


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _precision(hidden: Tensor) -> torch.dtype:
    """Logits are float32 whatever the model computes in, and float64 in float64 tests."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _widened(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as `_matmul` wants it: on GPU as it is, for bf16 kernels accumulate and answer in fp32."""
    return weight if weight.is_cuda else weight.to(dtype)


def _matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left @ right` in `dtype`, products and sums in that precision."""
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` in the precision of `total`, without a copy of its size on GPU."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left.to(total.dtype) @ right.to(total.dtype)
