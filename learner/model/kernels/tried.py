"""Compares a fused kernel of attention with plain arithmetic on its own GPU, before it trains anything.

A kernel may raise no error and compute wrong gradients: FlashAttention 4 did for heads of some widths. 512 tokens are
compared. A kernel that compiles itself does so here, and not in the first step.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from learner.model.kernels.joined import attention

LENGTHS = (130, 1, 300, 64, 17)
"""Tokens of the documents: more and fewer than a kernel's blocks."""
WINDOW = 64
"""The longest sliding window that is tried: a longer one would hide nothing from these documents."""
LIMIT = 0.02
"""Largest difference, as a share of the norm of plain arithmetic's result. Rounding to bfloat16 makes .005."""


class Heads(NamedTuple):
    """The heads of a layer of attention."""

    queries: int
    keys: int
    width: int
    """Numbers of one head."""
    window: int | None = None
    """Tokens of the sliding window."""


@cache
def fault(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> str:
    """Say what the kernel `name` does wrong, or ""."""
    what = f"heads of {heads.width} numbers" + (f" in a window of {heads.window}" if heads.window else "")
    try:
        error = largest_error(name, device, dtype, heads)
    except Exception as problem:  # each kernel raises errors of its own; the message names this one
        words = " ".join(str(problem).split())[:200]
        return f"fails on {what} on this GPU ({type(problem).__name__}: {words})"
    return "" if error < LIMIT else f"is {error:.0%} off on {what} on this GPU, compared with plain arithmetic"


def largest_error(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> float:
    """Of output and gradients. Infinite if a number is not finite."""
    draw, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = [(tokens, number, heads.width) for number in (heads.queries, heads.keys, heads.keys, heads.queries)]
    given = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    found = _results(name, heads, given)
    exact = _results("plain", heads, [x.float() for x in given])
    if not all(bool(x.isfinite().all()) for x in found):
        return float("inf")
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, exact, strict=True))


@torch.enable_grad()
def _results(name: str, heads: Heads, given: list[Tensor]) -> list[Tensor]:
    """Output and gradients of queries, keys and values in float32."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(given[0].device)
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    options = (True, heads.width**-0.5, heads.window, name)
    out = attention(q, k, v, starts, max(LENGTHS), None, options)
    return [x.detach().float() for x in (out, *torch.autograd.grad(out, (q, k, v), given[3]))]
