"""Generalised advantage estimation over turns (GAE, arXiv:1506.02438), and the loss of the critic behind it.

Gamma and lambda discount turns, never the tokens of one. With V(s) the critic's value of a state, s_k the state in
which turn k begins and r_k its reward, the return of turn k is

    G_k = r_k + gamma ((1 - lambda) V(s_(k+1)) + lambda G_(k+1))

and the advantage of each of its tokens is G_k - V(state before the token). The last turn of a finished sample has G =
r; that of a truncated sample has G = r + V(state after its last token).
"""

import math

import torch
from torch import Tensor

EPSILON = 1e-8


def turn_targets(
    rewards: Tensor, samples: Tensor, begins: Tensor, ends: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """G_k of each turn: [turns] float64. All arguments are [turns], in order.

    `samples` int64: the sample of each turn. `begins`, `ends` float: values before its first token and after its last.
    `truncated` bool: its sample was cut off.
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
    """Half the squared error of each value, and whether clipping took away its gradient: [tokens] each.

    `before`: values before the first update on this batch, from which `clip` limits the move (PPO2, as in
    arXiv:2005.12729 section 3).
    """
    losses = 0.5 * (values - targets) ** 2
    if clip is None:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    clipped = 0.5 * (before + (values - before).clamp(-clip, clip) - targets) ** 2
    outside = (values - before).abs() > clip
    return torch.maximum(losses, clipped), outside & (clipped > losses)


def whitened(advantages: Tensor, mean: float, variance: float) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8), over all sampled tokens of the batch."""
    return (advantages - mean) / math.sqrt(variance + EPSILON)
