"""Generalised advantage estimation over turns (GAE, arXiv:1506.02438; docs/critic.md), and the critic's loss.

Gamma and lambda discount turns, never the tokens of one. With V(s) the critic's value, s_k the state in which turn k
begins and r_k its reward, the return of turn k is

    G_k = r_k + gamma ((1 - lambda) V(s_(k+1)) + lambda G_(k+1))

and the advantage of each of its tokens is G_k - V(state before the token). The last turn has G = r, or r + V(state
after its last token) if the sample is truncated.
"""

import math

import torch
from torch import Tensor

EPSILON = 1e-8


def turn_targets(
    rewards: Tensor, samples: Tensor, begins: Tensor, ends: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """G_k of each turn: [turns] float64. Arguments are [turns], in order.

    `samples` int64: the sample of each turn. `begins`, `ends` float: values before a turn's first token and after its
    last. `truncated` bool: its sample was cut off.
    """
    targets, sample, behind = list[float](), -1, 0.0
    columns = (column.tolist() for column in (rewards, samples, begins.double(), ends.double(), truncated))
    for reward, own, begin, end, cut in reversed(list(zip(*columns, strict=True))):
        later = gamma * behind if own == sample else end if cut else 0.0
        target = reward + later
        sample, behind = own, (1 - gae_lambda) * begin + gae_lambda * target
        targets.append(target)
    return torch.tensor(targets[::-1], dtype=torch.float64)


def value_losses(values: Tensor, before: Tensor, targets: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error, and whether clipping removed its gradient: [tokens] each.

    `clip` limits the distance from `before`, the values before the batch's first update (PPO2; arXiv:2005.12729 section
    3).
    """
    losses = 0.5 * (values - targets) ** 2
    if clip is None:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    clipped = 0.5 * (before + (values - before).clamp(-clip, clip) - targets) ** 2
    outside = (values - before).abs() > clip
    return torch.maximum(losses, clipped), outside & (clipped > losses)


def whitened(advantages: Tensor, mean: float, variance: float) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8), over the batch's sampled tokens."""
    return (advantages - mean) / math.sqrt(variance + EPSILON)
