"""The policy losses. Each is a short function giving the loss of each token; `Loss` makes a batch's loss of it.

Consumes `LossInputs` of one part; waits for nothing; the learner calls `LOSSES[config.loss](inputs, config)` for each
microbatch. The loss is the sum over the part divided by counts of the whole batch, and the returned sums are of the
part: microbatches and ranks only add. Below, mu is the behaviour policy, pi the learner, rho = pi/mu, A the advantage,
and sg() stops the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from learner.algorithms.corrections import (
    behaviour_kl,
    behaviour_weight,
    log_linear_proximal,
    m2_limit,
    m2_squares,
    m2_tokens,
    off_policy_sequences,
    outside_trust_region,
    ratio,
    reference_kl,
    tapered_weight,
)
from learner.algorithms.diagnostics import limit_sums, mismatch_sums
from learner.algorithms.inputs import LossInputs, aggregation_weights


class Terms(NamedTuple):
    """What a loss says of each token: [tokens] each."""

    loss: Tensor
    masked: Tensor
    """bool: no gradient. Stays in every denominator."""
    capped: Tensor
    """bool: weight cut, gradient kept."""


def dppo(inputs: LossInputs, config: AlgorithmConfig) -> Terms:
    """-keep sg(min(rho, cap)) A log pi: CISPO in DPPO's one-sided total-variation trust region (arXiv:2602.04879)."""
    loss, _, capped = cispo(inputs, config)
    masked = outside_trust_region(
        inputs.policy_logprobs, inputs.behaviour, inputs.advantages, config.tv_low, config.tv_high
    )
    return Terms(torch.where(masked, 0, loss), masked, capped & ~masked)


def cispo(inputs: LossInputs, config: AlgorithmConfig) -> Terms:
    """-sg(min(rho, cap)) A log pi (MiniMax-M1, arXiv:2506.13585; no lower bound, as LlamaRL's AIPO and ScaleRL)."""
    rho = ratio(inputs.policy_logprobs, inputs.behaviour).detach()
    loss = -rho.clamp(max=config.is_cap) * inputs.advantages * inputs.policy_logprobs
    return Terms(loss, _none(loss), rho > config.is_cap)


def ppo(inputs: LossInputs, config: AlgorithmConfig) -> Terms:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)); `dual_clip` bounds it by -A c where A < 0.

    arXiv:1707.06347, dual clip arXiv:1912.09729. The behaviour policy is its old policy: right when data are fresh, the
    negative control when they are not.
    """
    return _clipped(ratio(inputs.policy_logprobs, inputs.behaviour), inputs.advantages, config)


def decoupled(inputs: LossInputs, config: AlgorithmConfig) -> Terms:
    """sg(prox/mu) times PPO's loss of pi/prox (Hilton, arXiv:2110.00641; AReaL, arXiv:2505.24298 eq. 5)."""
    if config.proximal == "loglinear":
        if inputs.versions is None:
            raise ValueError("algorithm.proximal is loglinear, but LossInputs has no versions: give them or recompute")
        proximal = log_linear_proximal(inputs.policy_logprobs, inputs.behaviour, inputs.versions, inputs.version)
    else:
        proximal = (inputs.policy_logprobs if inputs.proximal is None else inputs.proximal).detach()
    weight, beyond = behaviour_weight(proximal, inputs.behaviour, config.behaviour_mode, config.behaviour_cap)
    loss, masked, _ = _clipped(ratio(inputs.policy_logprobs, proximal), inputs.advantages, config)
    if config.behaviour_mode == "mask":
        return Terms(torch.where(beyond, 0, weight * loss), masked | beyond, _none(loss))
    return Terms(weight * loss, masked, beyond & ~masked)


def gspo(inputs: LossInputs, config: AlgorithmConfig) -> Terms:
    """PPO's loss of the geometric mean of a sample's rho, the same for all its tokens (arXiv:2507.18071, GSPO-token).

    A mean over samples whatever `aggregation` says. The gradient reaches each token through log pi - sg(log pi).
    """
    log_ratio = inputs.sequence_mean((inputs.policy_logprobs - inputs.behaviour).detach())
    sequence_ratio = (log_ratio + inputs.policy_logprobs - inputs.policy_logprobs.detach()).clamp(max=10).exp()
    return _clipped(sequence_ratio, inputs.advantages, config)


def m2po(inputs: LossInputs, config: AlgorithmConfig) -> Terms:
    """-keep A rho, without the largest (log rho)^2 until their mean is in budget (arXiv:2510.01161 Algorithm 1)."""
    limit = m2_limit(m2_squares(inputs), config.m2_budget) if inputs.m2_limit is None else inputs.m2_limit
    squares = (inputs.policy_logprobs - inputs.behaviour).detach() ** 2
    dropped = m2_tokens(inputs.policy_logprobs, inputs.behaviour, inputs.advantages) & (squares >= limit)
    loss = -inputs.advantages * ratio(inputs.policy_logprobs, inputs.behaviour)
    return Terms(torch.where(dropped, 0, loss), dropped, _none(loss))


def topr(inputs: LossInputs, config: AlgorithmConfig) -> Terms:
    """-sg(weight) A log pi, weight 1 for A > 0 and min(pi/mu of the sample, 1) for others (arXiv:2503.14286)."""
    weight, capped = tapered_weight(inputs, inputs.advantages > 0)
    loss = -weight * inputs.advantages * inputs.policy_logprobs
    return Terms(loss, _none(loss), capped)


def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> Terms:
    """-A log pi: right on fresh data only."""
    loss = -inputs.advantages * inputs.policy_logprobs
    return Terms(loss, _none(loss), _none(loss))


def _clipped(rho: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Terms:
    """PPO's pessimistic surrogate of the ratio `rho`, and where its gradient is 0."""
    loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(1 - config.clip_low, 1 + config.clip_high))
    masked = ((advantages > 0) & (rho > 1 + config.clip_high)) | ((advantages < 0) & (rho < 1 - config.clip_low))
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, masked = torch.where(beyond, bound, loss), masked | beyond
    return Terms(loss, masked, _none(loss))


def _none(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def _penalties(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """What is added to the policy loss of each token, masked or not. Raises ValueError for a missing input."""
    parts: dict[str, Tensor] = {}
    if config.behaviour_kl > 0:
        parts["behaviour_kl"] = config.behaviour_kl * behaviour_kl(inputs.policy_logprobs, inputs.behaviour)
    if config.reference_kl > 0:
        if inputs.reference is None:
            raise ValueError(f"algorithm.reference_kl is {config.reference_kl}, but LossInputs has no reference")
        divergence = reference_kl(inputs.policy_logprobs, inputs.behaviour, inputs.reference, config.is_cap)
        parts["reference_kl"] = config.reference_kl * divergence
    if config.entropy_bonus > 0:
        if inputs.entropy is None:
            raise ValueError(f"algorithm.entropy_bonus is {config.entropy_bonus}, but LossInputs has no entropy")
        parts["entropy"] = -config.entropy_bonus * inputs.entropy
    return parts


@dataclass(frozen=True)
class Loss:
    """The loss of a part from that of its tokens: OPSM, penalties and bonus, aggregation; with the part's sums."""

    policy: Callable[[LossInputs, AlgorithmConfig], Terms]
    aggregation: str | None = None
    """What is put in the place of `config.aggregation`."""
    tokenwise: bool = True
    """Whether a token's term has to do with no other token's log-probability; see `is_tokenwise`."""

    def __call__(self, inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of the part: [], and [] float64 each."""
        inputs = inputs.clean()
        terms = self.policy(inputs, config)
        dropped = off_policy_sequences(inputs, config.opsm_delta)
        parts = {"policy": torch.where(dropped, 0, terms.loss)} | _penalties(inputs, config)
        weights = aggregation_weights(inputs, self.aggregation or config.aggregation, config.constant_length)
        losses = {f"loss/{name}": (weights * part).sum() for name, part in parts.items()}
        sums = {name: value.detach().double() for name, value in losses.items()}
        sums |= mismatch_sums(inputs) | limit_sums(inputs, terms.masked | dropped, terms.capped & ~dropped)
        return torch.stack(list(losses.values())).sum(), sums

    def of_tokens(self, inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
        """The share of the loss that some of the part's tokens have, all of them sampled: []. For `is_tokenwise` only.

        Wants counts and `m2_limit` in `inputs` where they are used, for the tokens at hand do not tell them.
        """
        terms = sum(_penalties(inputs, config).values(), self.policy(inputs, config).loss)
        weights = aggregation_weights(inputs, self.aggregation or config.aggregation, config.constant_length)
        return (weights * terms).sum()


LOSSES: dict[str, Loss] = {
    "dppo": Loss(dppo),
    "cispo": Loss(cispo),
    "ppo": Loss(ppo),
    "decoupled": Loss(decoupled),
    "gspo": Loss(gspo, aggregation="sequence", tokenwise=False),
    "m2po": Loss(m2po),
    "topr": Loss(topr, tokenwise=False),
    "reinforce": Loss(reinforce),
}


def is_tokenwise(config: AlgorithmConfig) -> bool:
    """Whether the gradient by a token's log-probability follows from that token and what is known before the pass.

    Known are advantages, behaviour, reference, versions, counts of sample, group and batch (any aggregation will do),
    and the limit of `m2po`. The ratios of `gspo` and `topr` and the drift of `opsm_delta` are of whole samples.
    """
    return LOSSES[config.loss].tokenwise and config.opsm_delta is None


def needs_first_pass(config: AlgorithmConfig) -> bool:
    """Whether the loss needs log-probabilities of the whole batch before those that it differentiates.

    `m2po` does, for its budget is the batch's. `decoupled` does not: a batch is one optimizer step, so that the weights
    at its start, whose the recomputed proximal policy is, are those that `LossInputs.policy_logprobs` come from.
    """
    return config.loss == "m2po"


def needs_reference(config: AlgorithmConfig) -> bool:
    """Whether the loss needs a frozen copy of the initial model."""
    return config.reference_kl > 0


def needs_entropy_gradient(config: AlgorithmConfig) -> bool:
    """Whether `LossInputs.entropy` must carry a gradient."""
    return config.entropy_bonus > 0
