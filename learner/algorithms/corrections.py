"""Corrections for stale or mismatched tokens, on packed [tokens] tensors."""

import torch
from torch import Tensor

from learner.algorithms.inputs import LossInputs

MAX_LOG_RATIO = 20.0
"""Beyond it the square of exp overflows float32."""


def ratio(new: Tensor, old: Tensor) -> Tensor:
    """exp(new - old), with gradient to `new` where not clamped."""
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def outside_trust_region(inputs: LossInputs, low: float | None, high: float | None) -> Tensor:
    """Where pi - mu > high for A > 0, or mu - pi > low for A < 0 (DPPO, arXiv:2602.04879). None: no bound."""
    moved = inputs.policy_logprobs.detach().exp() - inputs.behaviour.exp()
    outside = torch.zeros_like(moved, dtype=torch.bool)
    if high is not None:
        outside = outside | ((inputs.advantages > 0) & (moved > high))
    if low is not None:
        outside = outside | ((inputs.advantages < 0) & (moved < -low))
    return outside


def off_policy_sequences(inputs: LossInputs, delta: float | None) -> Tensor:
    """Tokens of samples with A < 0 whose mean log mu - log pi exceeds `delta` (DeepSeek-V3.2, arXiv:2512.02556)."""
    if delta is None:
        return torch.zeros_like(inputs.sampled)
    return (inputs.advantages < 0) & (-inputs.mean_log_ratio() > delta)


def log_linear_proximal(inputs: LossInputs) -> Tensor:
    """Proximal log-probability between behaviour and learner, without a forward pass (A-3PO, arXiv:2512.06547).

    log prox = log mu + alpha (log pi - log mu), alpha = (v - 1 - v_mu) / (v - v_mu) in [0, 1]. Raises ValueError
    without versions.
    """
    if inputs.versions is None:
        raise ValueError("algorithm.proximal is loglinear, but LossInputs has no versions")
    age = (inputs.version - inputs.versions).clamp(min=1)
    alpha = (age - 1).to(inputs.behaviour.dtype) / age
    return inputs.behaviour + alpha * inputs.log_ratio.detach()


def behaviour_weight(proximal: Tensor, behaviour: Tensor, mode: str, cap: float | None) -> tuple[Tensor, Tensor]:
    """Weight prox/mu of decoupled PPO, detached, clamped to `cap` if `mode` is clamp; and where it exceeds `cap`."""
    weight = ratio(proximal, behaviour).detach()
    if cap is None:
        return weight, torch.zeros_like(weight, dtype=torch.bool)
    return (weight.clamp(max=cap) if mode == "clamp" else weight), weight > cap


def tapered_weight(inputs: LossInputs, positive: Tensor) -> tuple[Tensor, Tensor]:
    """1 for positive samples, else min(pi/mu of the sample, 1); and where it is capped (TOPR, arXiv:2503.14286)."""
    log_ratio = inputs.sample_log_ratio()
    return torch.where(positive, 1, log_ratio.clamp(max=0).exp()), ~positive & (log_ratio > 0)


def m2_squares(inputs: LossInputs) -> Tensor:
    """Squared log-ratios of the tokens that M2PO may drop: [tokens] float.

    These are tokens whose ratio moved in the advantage's direction; others get inf, because a boolean selection would
    synchronise with the GPU.
    """
    log_ratio = inputs.log_ratio.detach()
    return torch.where(inputs.advantages * log_ratio > 0, log_ratio**2, torch.inf)


def m2_limit(squares: Tensor, budget: float) -> Tensor:
    """Smallest squared log-ratio that is dropped, inf if none: [] float (M2PO, arXiv:2510.01161 Algorithm 1).

    Drops all of several equal values, so that their order does not matter.
    """
    ordered = squares.detach().sort().values
    means = ordered.double().cumsum(0) / torch.arange(1, ordered.numel() + 1, device=squares.device)
    padded = torch.cat([ordered, ordered.new_full((1,), torch.inf)])
    return padded.gather(0, (means <= budget).sum(0, keepdim=True)).squeeze(0)


def reference_kl(logprobs: Tensor, behaviour: Tensor, reference: Tensor, cap: float) -> Tensor:
    """min(pi/mu, cap) (log pi - log ref)^2 / 2: k2 as a loss (arXiv:2506.09477), importance-weighted."""
    return ratio(logprobs, behaviour).detach().clamp(max=cap) * (logprobs - reference) ** 2 / 2
