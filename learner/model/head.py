"""The log-probability head: fp32 log-probabilities and entropies, never a [tokens, vocabulary] tensor.

`logprobs_and_entropy` recomputes logits in the backward pass; `chunked_loss` computes gradients while a chunk's logits
exist.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.schema import LearnerConfig
from learner.model.epilogue import Epilogue
from learner.model.top_tokens import TopGradient, TopTokens, divergence, top_gradient

ChunkLoss = Callable[[Tensor, Tensor, Any], Tensor]
"""(log-probabilities, entropies, slice or, where several samples train a token, int64 indices) -> loss [], by plain
autograd.
"""


class ChunkGradients(NamedTuple):
    norms: Tensor
    entropy: Tensor
    of_logprob: Tensor
    of_entropy: Tensor | None
    top: TopGradient | None = None


GradientsOfChunk = Callable[[Tensor, slice], ChunkGradients]


CHUNK_ON_CPU = 1024


def chunk_tokens(learner: LearnerConfig) -> int:
    """An undecided `auto` takes the smaller of its two values."""
    return CHUNK_ON_CPU if learner.head_chunk_tokens == "auto" else learner.head_chunk_tokens


class HeadOptions(NamedTuple):
    temperature: float = 1.0
    chunk_size: int = 1024
    """Tokens whose logits exist at a time."""
    entropy_gradient: bool = False
    """Whether the gradient goes through the entropies too."""
    epilogue: Epilogue = Epilogue()

    @property
    def divisor(self) -> float:
        """A softcap contains the scale already."""
        return self.temperature if self.epilogue.softcap else self.temperature / self.epilogue.scale


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[targets] and its entropy, with gradient.

    `hidden` [tokens, hidden_size], `weight` [vocabulary, hidden_size], `targets` [tokens] int64, `bias` [vocabulary];
    results [tokens] float32 or wider.
    """
    logprobs, entropy = _RecomputedLogits.apply(hidden, weight, bias, targets, options)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: ChunkLoss,
    options: HeadOptions,
    bias: Tensor | None = None,
    top: TopTokens | None = None,
) -> tuple[Tensor, ...]:
    """Log-probabilities and entropies without gradient, and the sum of `loss` with gradient: [].

    With `top` the sum includes weighted divergences from teachers; the divergences without weights, [tokens], are a
    fourth result.
    """
    inputs = hidden, weight, bias, targets
    results: tuple[Tensor, ...] = _ChunkedLoss.apply(*inputs, loss, options, top)  # type: ignore[no-untyped-call]
    return results[:3] if top is None else results


class _RecomputedLogits(torch.autograd.Function):
    """With z the logits over the temperature T, p = softmax(z) and H = logsumexp(z) - p.z:

    d logprob / dz = onehot - p, dH / dz = -p (log p + H), dz / dlogits = 1 / T.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        dtype = _precision(hidden)
        logprobs, entropy, norms = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        wide = _widened(weight, dtype)
        for chunk in _chunks(len(hidden), options.chunk_size):
            z = _logits(hidden[chunk], wide, bias, options.epilogue)
            logprobs[chunk], norms[chunk], entropy[chunk] = _logprob_forward(z, targets[chunk], options.divisor)
            del z  # before the next chunk's logits are allocated
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropy)
        ctx.options = options
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy = (grad.contiguous() for grad in grads)
        options: HeadOptions = ctx.options

        def of_chunk(z: Tensor, chunk: slice) -> ChunkGradients:
            wanted = grad_entropy[chunk] if options.entropy_gradient else None
            return ChunkGradients(norms[chunk], entropy[chunk], grad_logprob[chunk], wanted)

        wanted = ctx.needs_input_grad[1:3]
        return *_input_gradients(hidden, weight, bias, targets, options, of_chunk, wanted), None, None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        loss: ChunkLoss,
        options: HeadOptions,
        top: TopTokens | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = _precision(hidden)
        logprobs, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2))
        total, distances = logprobs.new_zeros(()), torch.zeros_like(logprobs)

        def of_chunk(z: Tensor, chunk: slice) -> ChunkGradients:
            logprobs[chunk], norms, entropy[chunk] = _logprob_forward(z, targets[chunk], options.divisor)
            value, grads = _loss_gradient(loss, logprobs[chunk], entropy[chunk], chunk, options.entropy_gradient)
            total.add_(value)
            found = None
            if top is not None:
                given, target = top.select(chunk), (targets[chunk], logprobs[chunk])
                policy = z.gather(-1, given.ids) / options.divisor - norms[:, None]
                distance = divergence(given.logprobs.to(dtype), policy)
                distances[chunk] = distance.value
                total.add_((given.weights * distance.value).sum())
                found = top_gradient(given, distance, policy, target, grads, entropy[chunk])
            return ChunkGradients(norms, entropy[chunk], *grads, found)

        wanted = ctx.needs_input_grad[1:3]
        ctx.save_for_backward(*_input_gradients(hidden, weight, bias, targets, options, of_chunk, wanted))
        ctx.mark_non_differentiable(logprobs, entropy, distances)
        return logprobs, entropy, total, distances

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if x is None else x * grads[2] for x in ctx.saved_tensors), None, None, None, None


def _input_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: HeadOptions,
    of_chunk: GradientsOfChunk,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dtype = _precision(hidden)
    wide = _widened(weight, dtype)
    grad_hidden = torch.empty_like(hidden)
    grad_weight, grad_bias = (
        torch.zeros(x.shape, dtype=dtype, device=x.device) if x is not None and needed else None
        for x, needed in zip((weight, bias), wanted, strict=True)
    )
    for chunk in _chunks(len(hidden), options.chunk_size):
        z = _logits(hidden[chunk], wide, bias, options.epilogue)
        slope = _slope(z, options.epilogue)
        dz = _logit_gradient(z, targets[chunk], of_chunk(z, chunk), options.divisor, wide.dtype)
        del z
        dz = dz if slope is None else dz.mul_(slope)
        grad_hidden[chunk] = dz @ wide
        if grad_weight is not None:
            _add_matmul(grad_weight, dz.T, hidden[chunk])
        if grad_bias is not None:
            grad_bias += dz.sum(0, dtype=dtype)
        del dz
    found = ((grad_weight, weight), (grad_bias, bias))
    of_weight, of_bias = (None if grad is None or x is None else grad.to(x.dtype) for grad, x in found)
    return grad_hidden, of_weight, of_bias


def _logits(hidden: Tensor, wide: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    z = _matmul(hidden, wide.T, _precision(hidden))
    if bias is not None:
        z += bias
    if epilogue.softcap:
        z.mul_(epilogue.scale / epilogue.softcap).tanh_().mul_(epilogue.softcap)
    return z


def _slope(z: Tensor, epilogue: Epilogue) -> Tensor | None:
    return z.div(epilogue.softcap).square_().neg_().add_(1).mul_(epilogue.scale) if epilogue.softcap else None


def _loss_gradient(
    loss: ChunkLoss, logprobs: Tensor, entropy: Tensor, chunk: slice, entropy_gradient: bool
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    leaves = [logprobs.detach().requires_grad_(), entropy.detach().requires_grad_(entropy_gradient)]
    with torch.enable_grad():
        value = loss(leaves[0], leaves[1], chunk)
    wanted = leaves if entropy_gradient else leaves[:1]
    grads = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    grad_logprob, *grad_entropy = (grad.contiguous() for grad in grads)  # kernels ignore strides
    return value.detach(), (grad_logprob, grad_entropy[0] if grad_entropy else None)


def _logprob_forward(z: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    if _fused(z):
        from learner.model.kernels import head_kernels  # triton is installed where CUDA is

        return head_kernels.logprob_forward(z, targets, temperature)
    z = z / temperature
    norms = z.logsumexp(-1)
    logprobs = z.gather(-1, targets[:, None]).squeeze(-1) - norms
    p = (z - norms[:, None]).exp_()
    return logprobs, norms, norms - p.mul_(z).sum(-1)


def _logit_gradient(
    z: Tensor, targets: Tensor, known: ChunkGradients, temperature: float, dtype: torch.dtype
) -> Tensor:
    """It may overwrite `z`."""
    norms, entropy, grad_logprob, grad_entropy, top = known
    if top is not None:
        shifted = known._replace(of_logprob=grad_logprob + top.shift, top=None)
        return top.write(_logit_gradient(z, targets, shifted, temperature, dtype), temperature)
    if _fused(z):
        from learner.model.kernels import head_kernels

        return head_kernels.logit_gradient(z, targets, norms, entropy, grad_logprob, grad_entropy, temperature, dtype)
    logp = z.div_(temperature).sub_(norms[:, None])
    p = logp.exp()
    if grad_entropy is None:
        dz = torch.zeros_like(p)
    else:
        dz = logp.add_(entropy[:, None]).mul_(p).mul_(-grad_entropy[:, None])
    dz.addcmul_(p, grad_logprob[:, None], value=-1)
    dz.scatter_add_(-1, targets[:, None], grad_logprob[:, None])
    return dz.div_(temperature).to(dtype)


def _fused(z: Tensor) -> bool:
    return z.is_cuda and z.dtype == torch.float32


def _chunks(tokens: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, tokens)) for start in range(0, tokens, chunk_size)]


def _precision(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _widened(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """On GPU bf16 kernels accumulate and return fp32."""
    return weight if weight.is_cuda else weight.to(dtype)


def _matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left.to(total.dtype) @ right.to(total.dtype)
