"""The head's two passes over a chunk of logits on GPU, fused: a read for the scores, a read and a write for the slope.

Logits of a chunk are hundreds of megabytes: what plain PyTorch does in twenty passes costs a sixth of a training step.
The mathematics, and its plain form for CPU, are in `learner.head`. Imported by it on GPU only; waits for nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = -1e30
"""Stands for -inf where the difference of two must not be NaN."""


@triton.jit
def _scores_of(  # type: ignore[no-untyped-def]
    logits, targets, logprobs, norms, entropy, vocabulary, inverse_temperature,
    BLOCK: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """One row a program: running maximum m, sum of exp(z - m) and of z exp(z - m) in each lane, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        there = start + lane < vocabulary
        z = tl.load(logits + start + lane, mask=there, other=LOWEST) * inverse_temperature
        z = tl.where(there, z, LOWEST)
        higher = tl.maximum(top, z)
        shrink = tl.exp(top - higher)
        e = tl.where(there, tl.exp(z - higher), 0.0)
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
def _slope_of(  # type: ignore[no-untyped-def]
    logits, slope, targets, norms, entropy, by_logprob, by_entropy, vocabulary, inverse_temperature,
    WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < vocabulary
    z = tl.load(logits + row * vocabulary + place, mask=there, other=0.0) * inverse_temperature
    logp = z - tl.load(norms + row)
    p = tl.exp(logp)
    right = tl.where(place == tl.load(targets + row), 1.0, 0.0)
    by_z = tl.load(by_logprob + row) * (right - p)
    if WITH_ENTROPY:
        by_z -= tl.load(by_entropy + row) * p * (logp + tl.load(entropy + row))
    by_logit = (by_z * inverse_temperature).to(slope.dtype.element_ty)
    tl.store(slope + row * vocabulary + place, by_logit, mask=there)


def scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, log-normaliser and entropy: three [tokens] float32.

    `logits` [tokens, vocabulary] float32, `targets` [tokens] int64.
    """
    tokens, vocabulary = logits.shape
    logprobs, norms, entropy = logits.new_empty(3, tokens).unbind()
    if tokens:
        _scores_of[(tokens,)](
            logits, targets, logprobs, norms, entropy, vocabulary, 1 / temperature, BLOCK=BLOCK, LOWEST=LOWEST,
            num_warps=8,
        )  # fmt: skip
    return logprobs, norms, entropy


def slope(
    logits: Tensor,
    targets: Tensor,
    norms: Tensor,
    entropy: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient by the logits, [tokens, vocabulary] in `dtype`; the rest as `scores` gives it, `by_` are of the loss."""
    tokens, vocabulary = logits.shape
    answer = torch.empty_like(logits, dtype=dtype)
    if tokens:
        _slope_of[(tokens, triton.cdiv(vocabulary, BLOCK))](
            logits, answer, targets, norms, entropy, by_logprob, by_logprob if by_entropy is None else by_entropy,
            vocabulary, 1 / temperature, WITH_ENTROPY=by_entropy is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return answer
