"""The policy's divergence from a teacher's k most probable tokens, and its gradient at the logits (docs/teachers.md).

With p the policy's probabilities of the k tokens, q the teacher's, and t all other tokens as one: D = sum p log(p/q) +
p_t log(p_t/q_t), the reverse KL over k + 1 outcomes (MiniLLM, arXiv:2306.08543), with one outcome for all other tokens
as in verl's `forward_kl_topk_tail`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, cat, where

LEAST_TAIL = 1e-6
"""Least p_t and q_t in logarithms: 1 - sum is rounded in float32."""


@dataclass(frozen=True)
class TopTokens:
    """What teachers gave for some tokens. No tuple: FSDP would cast its tensors to `model.dtype`.

    Example: one token, k = 2: `ids` [[7, 3]], `logprobs` [[-0.1, -2.5]], `weights` [0.01].
    """

    ids: Tensor
    logprobs: Tensor
    weights: Tensor
    """Factor of the divergence; 0 without a teacher."""

    def select(self, tokens: slice) -> "TopTokens":
        return TopTokens(self.ids[tokens], self.logprobs[tokens], self.weights[tokens])


class Divergence(NamedTuple):
    """D of each token, and its gradient at the logits."""

    value: Tensor
    inside: Tensor
    """[tokens, k]: p (log(p/q) - D), the gradient at the k tokens' logits."""
    outside: Tensor
    """[tokens]: log(p_t/q_t) - D; times its probability, the gradient at another token's logit."""


def divergence(teacher: Tensor, policy: Tensor) -> Divergence:
    """D of log-probabilities of the same tokens, [tokens, k] each."""
    p, ratios = policy.exp(), policy - teacher
    rest, own = ((1 - each.exp().sum(-1)).clamp(min=0) for each in (teacher, policy))
    of_tail = own.clamp(min=LEAST_TAIL).log() - rest.clamp(min=LEAST_TAIL).log()
    value = (p * ratios).sum(-1) + own * of_tail
    return Divergence(value, p * (ratios - value[:, None]), of_tail - value)


class TopGradient(NamedTuple):
    """The gradient that the teacher's tokens change."""

    shift: Tensor
    """[tokens]: added to the gradient at the sampled token's log-probability, for all other logits."""
    places: Tensor
    """int64 [tokens, k + 1]: the sampled token and the k."""
    values: Tensor
    """[tokens, k + 1]: the gradient at these logits."""

    def write(self, gradient: Tensor, divisor: float) -> Tensor:
        return gradient.scatter_(-1, self.places, (self.values / divisor).to(gradient.dtype))


def top_gradient(
    top: TopTokens,
    found: Divergence,
    policy: Tensor,
    target: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    entropy: Tensor,
) -> TopGradient:
    """The joint gradient of weighted D and of the sampled token's loss."""
    (ids, own), (slope, of_entropy), weights = target, grads, top.weights.to(policy.dtype)
    hits = top.ids == ids[:, None]
    outside = weights * found.outside
    values = weights[:, None] * found.inside
    sampled = where(hits.any(-1), (values * hits).sum(-1), outside * own.exp())
    values = values + slope[:, None] * (hits.to(policy.dtype) - policy.exp())
    sampled = sampled + slope * (1 - own.exp())
    if of_entropy is not None:
        values = values - of_entropy[:, None] * policy.exp() * (policy + entropy[:, None])
        sampled = sampled - of_entropy * own.exp() * (own + entropy)
    places, both = cat([ids[:, None], top.ids], -1), cat([sampled[:, None], values], -1)
    return TopGradient(-outside, places, both)
