"""The policy losses, of each token; `Loss` aggregates them.

Divisors count the whole batch, so microbatches and ranks add up. mu is the behaviour policy, pi the learner, rho =
pi/mu, A the advantage; sg() stops gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from learner.algorithms import corrections
from learner.algorithms.diagnostics import limit_sums, mismatch_sums
from learner.algorithms.inputs import LossInputs, aggregation_weights


class TokenLosses(NamedTuple):
    """A loss before aggregation: [tokens] each."""

    loss: Tensor
    masked: Tensor
    """bool: no gradient, but still in every denominator."""
    capped: Tensor
    """bool: the gradient remains."""


def dppo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """-keep sg(min(rho, cap)) A log pi: CISPO in DPPO's one-sided total-variation trust region (arXiv:2602.04879)."""
    loss, _, capped = cispo(inputs, config)
    masked = corrections.outside_trust_region(inputs, config.tv_low, config.tv_high)
    return TokenLosses(torch.where(masked, 0, loss), masked, capped & ~masked)


def cispo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """-sg(min(rho, cap)) A log pi (MiniMax-M1, arXiv:2506.13585; no lower bound, as LlamaRL's AIPO and ScaleRL)."""
    rho = corrections.ratio(inputs.policy_logprobs, inputs.behaviour).detach()
    loss = -rho.clamp(max=config.is_cap) * inputs.advantages * inputs.policy_logprobs
    return TokenLosses(loss, _none(loss), rho > config.is_cap)


def ppo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)), at most -A c for A < 0 if `dual_clip` is c.

    arXiv:1707.06347; dual clip arXiv:1912.09729. Correct on fresh data only.
    """
    return _clipped(corrections.ratio(inputs.policy_logprobs, inputs.behaviour), inputs.advantages, config)


def decoupled(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """sg(prox/mu) times PPO's loss with ratio pi/prox (Hilton, arXiv:2110.00641; AReaL, arXiv:2505.24298 eq. 5)."""
    if config.proximal == "loglinear":
        proximal = corrections.log_linear_proximal(inputs)
    else:
        proximal = (inputs.policy_logprobs if inputs.proximal is None else inputs.proximal).detach()
    mode, cap = config.behaviour_mode, config.behaviour_cap
    weight, beyond = corrections.behaviour_weight(proximal, inputs.behaviour, mode, cap)
    loss, masked, _ = _clipped(corrections.ratio(inputs.policy_logprobs, proximal), inputs.advantages, config)
    if mode == "mask":
        return TokenLosses(torch.where(beyond, 0, weight * loss), masked | beyond, _none(loss))
    return TokenLosses(weight * loss, masked, beyond & ~masked)


def gspo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """PPO's loss with the geometric mean of a sample's rho for all its tokens (GSPO-token, arXiv:2507.18071).

    The gradient reaches tokens through log pi - sg(log pi).
    """
    log_ratio = inputs.mean_log_ratio()
    sequence_ratio = (log_ratio + inputs.policy_logprobs - inputs.policy_logprobs.detach()).clamp(max=10).exp()
    return _clipped(sequence_ratio, inputs.advantages, config)


def m2po(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """-keep A rho; drops the largest (log rho)^2 until their mean is in budget (arXiv:2510.01161 Algorithm 1)."""
    squares = corrections.m2_squares(inputs)
    limit = corrections.m2_limit(squares, config.m2_budget) if inputs.m2_limit is None else inputs.m2_limit
    dropped = (squares >= limit) & squares.isfinite()
    loss = -inputs.advantages * corrections.ratio(inputs.policy_logprobs, inputs.behaviour)
    return TokenLosses(torch.where(dropped, 0, loss), dropped, _none(loss))


def topr(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """-sg(weight) A log pi, weight 1 for A > 0 and min(pi/mu of the sample, 1) for others (arXiv:2503.14286)."""
    weight, capped = corrections.tapered_weight(inputs, inputs.advantages > 0)
    loss = -weight * inputs.advantages * inputs.policy_logprobs
    return TokenLosses(loss, _none(loss), capped)


def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
    """-A log pi; correct on fresh data only."""
    loss = -inputs.advantages * inputs.policy_logprobs
    return TokenLosses(loss, _none(loss), _none(loss))


def _clipped(rho: Tensor, advantages: Tensor, config: AlgorithmConfig) -> TokenLosses:
    """PPO's surrogate, and where its gradient is 0."""
    loss = torch.maximum(-advantages * rho, -advantages * rho.clamp(1 - config.clip_low, 1 + config.clip_high))
    masked = ((advantages > 0) & (rho > 1 + config.clip_high)) | ((advantages < 0) & (rho < 1 - config.clip_low))
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, masked = torch.where(beyond, bound, loss), masked | beyond
    return TokenLosses(loss, masked, _none(loss))


def _none(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def _penalties(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Terms of each token's loss, masked or not: [tokens] each. Raises ValueError for a missing input."""
    terms: dict[str, Tensor] = {}
    if config.behaviour_kl > 0:
        terms["behaviour_kl"] = config.behaviour_kl * inputs.log_ratio**2  # pulls towards the data (prime-rl)
    if config.reference_kl > 0:
        if inputs.reference is None:
            raise ValueError(f"algorithm.reference_kl is {config.reference_kl}, but LossInputs has no reference")
        divergence = corrections.reference_kl(inputs.policy_logprobs, inputs.behaviour, inputs.reference, config.is_cap)
        terms["reference_kl"] = config.reference_kl * divergence
    if config.entropy_bonus > 0:
        if inputs.entropy is None:
            raise ValueError(f"algorithm.entropy_bonus is {config.entropy_bonus}, but LossInputs has no entropy")
        terms["entropy"] = -config.entropy_bonus * inputs.entropy
    return terms


@dataclass(frozen=True)
class Loss:
    """The loss of a microbatch with OPSM, penalties and bonus: []; and its sums, [] float64 each."""

    policy: Callable[[LossInputs, AlgorithmConfig], TokenLosses]
    aggregation: str | None = None
    tokenwise: bool = True

    def __call__(self, inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = inputs.clean()
        tokens = self.policy(inputs, config)
        dropped = corrections.off_policy_sequences(inputs, config.opsm_delta)
        terms = {"policy": torch.where(dropped, 0, tokens.loss)} | _penalties(inputs, config)
        weights = aggregation_weights(inputs, self.aggregation or config.aggregation, config.constant_length)
        losses = {f"loss/{name}": (weights * term).sum() for name, term in terms.items()}
        sums = {name: value.detach().double() for name, value in losses.items()}
        sums |= mismatch_sums(inputs) | limit_sums(inputs, tokens.masked | dropped, tokens.capped & ~dropped)
        return torch.stack(list(losses.values())).sum(), sums

    def of_tokens(self, inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
        """An `is_tokenwise` loss of some sampled tokens: []. `inputs` needs counts and `m2_limit`."""
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
    """Whether a token's gradient depends on no other token's log-probability in the same pass."""
    return config.loss in LOSSES and LOSSES[config.loss].tokenwise and config.opsm_delta is None


def needs_first_pass(config: AlgorithmConfig) -> bool:
    """Whether the loss needs log-probabilities of the whole batch before the pass that it differentiates."""
    return config.loss == "m2po"


def needs_reference(config: AlgorithmConfig) -> bool:
    return config.reference_kl > 0


def needs_entropy_gradient(config: AlgorithmConfig) -> bool:
    """Whether `LossInputs.entropy` must carry a gradient."""
    return config.entropy_bonus > 0
