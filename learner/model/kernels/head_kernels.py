"""The head's passes over logits, fused for GPUs: one read forward, one read and write backward.

Plain PyTorch makes twenty passes, a sixth of a training step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = -1e30
"""-inf - -inf would be NaN."""


@triton.jit
def _logprob_forward_kernel(  # type: ignore[no-untyped-def]
    logits, targets, logprobs, norms, entropy, vocabulary, inverse_temperature,
    BLOCK: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """One program per row. Each lane keeps a running maximum m, and sums of exp(z - m) and z exp(z - m)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        valid = start + lane < vocabulary
        z = tl.load(logits + start + lane, mask=valid, other=LOWEST) * inverse_temperature
        z = tl.where(valid, z, LOWEST)
        higher = tl.maximum(top, z)
        shrink = tl.exp(top - higher)
        e = tl.where(valid, tl.exp(z - higher), 0.0)
        total = total * shrink + e
        weighted = weighted * shrink + e * z
        top = higher
    highest = tl.max(top, 0)
    shrink = tl.exp(top - highest)
    mass = tl.sum(total * shrink, 0)
    norm = highest + tl.log(mass)
    target = tl.load(targets + row)
    tl.store(norms + row, norm)
    tl.store(entropy + row, norm - tl.sum(weighted * shrink, 0) / mass)
    tl.store(logprobs + row, tl.load(logits + target) * inverse_temperature - norm)


@triton.jit
def _logit_gradient_kernel(  # type: ignore[no-untyped-def]
    logits, gradient, targets, norms, entropy, grad_logprob, grad_entropy, vocabulary, inverse_temperature,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < vocabulary
    z = tl.load(logits + row * vocabulary + column, mask=valid, other=0.0) * inverse_temperature
    logp = z - tl.load(norms + row)
    p = tl.exp(logp)
    onehot = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    dz = tl.load(grad_logprob + row) * (onehot - p)
    if WITH_ENTROPY:
        dz -= tl.load(grad_entropy + row) * p * (logp + tl.load(entropy + row))
    tl.store(gradient + row * vocabulary + column, (dz * inverse_temperature).to(gradient.dtype.element_ty), mask=valid)


def logprob_forward(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of targets, log-normaliser and entropy: three [tokens] float32."""
    tokens, vocabulary = logits.shape
    logprobs, norms, entropy = logits.new_empty(3, tokens).unbind()
    if tokens:
        _logprob_forward_kernel[(tokens,)](
            logits, targets, logprobs, norms, entropy, vocabulary, 1 / temperature, BLOCK=BLOCK, LOWEST=LOWEST,
            num_warps=8,
        )  # fmt: skip
    return logprobs, norms, entropy


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    norms: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient at the logits: [tokens, vocabulary]."""
    tokens, vocabulary = logits.shape
    gradient = torch.empty_like(logits, dtype=dtype)
    if tokens:
        _logit_gradient_kernel[(tokens, triton.cdiv(vocabulary, BLOCK))](
            logits, gradient, targets, norms, entropy, grad_logprob,
            grad_logprob if grad_entropy is None else grad_entropy, vocabulary, 1 / temperature,
            WITH_ENTROPY=grad_entropy is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return gradient
