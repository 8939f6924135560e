"""Advantages from rewards, and the treatment of truncated answers."""

from typing import Protocol

import torch
from torch import Tensor


class Advantage(Protocol):
    """An entry of `ADVANTAGES`; takes the whole batch.

    `rewards` [samples] float; `groups` [samples] int64; `lengths` [samples]: sampled tokens, None if all are equal.
    Returns [samples], detached.
    """

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor: ...


def group_mean(rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
    """R - mean of the group (Dr. GRPO, arXiv:2503.20783)."""
    return _centred(rewards, groups)[0].to(rewards.dtype)


def group_std(rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
    """`group_mean` / (unbiased standard deviation of the group + 1e-6) (GRPO, arXiv:2402.03300)."""
    centred, inverse, counts = _centred(rewards, groups)
    variance = _sums(centred**2, inverse, counts) / (counts - 1).clamp(min=1)
    return (centred / (variance.sqrt() + 1e-6)[inverse]).to(rewards.dtype)


def leave_one_out(rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
    """R - mean of the others in the group (RLOO, arXiv:2402.14740)."""
    centred, inverse, counts = _centred(rewards, groups)
    return (centred * (counts / (counts - 1).clamp(min=1))[inverse]).to(rewards.dtype)


def batch_std(rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
    """`group_mean` / (unbiased standard deviation of the batch's rewards + 1e-4) (arXiv:2508.08221; TRL)."""
    values = rewards.detach().double()
    _, variance = _mean_and_variance(values, torch.ones_like(values))
    return (_centred(rewards, groups)[0] / (variance.sqrt() + 1e-4)).to(rewards.dtype)


def reinforce_baseline(rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
    """`group_mean`, whitened over the batch's sampled tokens (REINFORCE++-baseline, arXiv:2501.03262)."""
    centred = _centred(rewards, groups)[0]
    mean, variance = _mean_and_variance(centred, torch.ones_like(centred) if lengths is None else lengths.double())
    return ((centred - mean) * (variance + 1e-8).rsqrt()).to(rewards.dtype)


ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "group_std": group_std,
    "batch_std": batch_std,
    "leave_one_out": leave_one_out,
    "reinforce_baseline": reinforce_baseline,
}


def turn_returns(rewards: Tensor, samples: Tensor, discount: float) -> Tensor:
    """Returns G_t = r_t + discount G_(t+1) within each sample: [turns] float64.

    `rewards` [turns]; `samples` [turns] int64, in order.
    """
    returns, behind = list[float](), (-1, 0.0)
    for reward, sample in zip(reversed(rewards.tolist()), reversed(samples.tolist()), strict=True):
        behind = sample, reward + (discount * behind[1] if behind[0] == sample else 0.0)
        returns.append(behind[1])
    return torch.tensor(returns[::-1], dtype=torch.float64)


def soft_overlong(rewards: Tensor, lengths: Tensor, max_tokens: int, buffer: int, factor: float) -> Tensor:
    """Rewards minus a penalty that grows to `factor` over the last `buffer` tokens (DAPO, arXiv:2503.14476).

    `lengths` [samples], of whole groups: penalties enter the group's baseline.
    """
    excess = (lengths.to(rewards.dtype) - (max_tokens - buffer)) / buffer
    return rewards - factor * excess.clamp(0, 1)


def mask_overlong(advantages: Tensor, truncated: Tensor) -> Tensor:
    """0 for `truncated` [samples] bool, which stay in the baseline and all denominators (DAPO)."""
    return torch.where(truncated, 0, advantages)


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R - mean of the group in float64, group index of each sample, group sizes.

    Exactly 0 where rewards are equal: rounding errors must not be trained on.
    """
    values = rewards.detach().double()
    _, inverse, counts = groups.unique(return_inverse=True, return_counts=True)
    means = _sums(values, inverse, counts) / counts
    low = values.new_full(counts.shape, torch.inf).scatter_reduce(0, inverse, values, "amin")
    high = values.new_full(counts.shape, -torch.inf).scatter_reduce(0, inverse, values, "amax")
    return torch.where((low == high)[inverse], 0, values - means[inverse]), inverse, counts


def _sums(values: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(counts.shape).index_add(0, inverse, values)


def _mean_and_variance(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    count = counts.sum()
    mean = (counts * values).sum() / count.clamp(min=1)
    return mean, (counts * (values - mean) ** 2).sum() / (count - 1).clamp(min=1)
