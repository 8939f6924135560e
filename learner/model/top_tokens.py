"""The teacher's k most probable tokens: a divergence of the policy from them, and its gradient at the logits.

With q the teacher's probabilities of its k tokens, p the policy's of the same tokens, and t the rest of the vocabulary
as one token: D = sum q log(q/p) + q_t log(q_t/p_t), the forward KL of Agarwal et al. (GKD, arXiv:2306.13649) over k + 1
outcomes; verl calls it `forward_kl_topk_tail`. At k = vocabulary it is the whole forward KL. Pure functions, used by
the head (`head.py`) while a chunk's logits exist; nothing here is as large as they are.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, cat, where

LEAST_TAIL = 1e-6
"""The policy's probability of all other tokens counts as this much at least, because 1 - sum p is rounded; below it the
tail has no gradient."""


@dataclass(frozen=True)
class TopTokens:
    """What the teachers gave for some trained tokens. No tuple: FSDP would cast what is in one to `model.dtype`.

    Example: one token, k = 2: `ids` [[7, 3]], `logprobs` [[-0.1, -2.5]], `weights` [0.01].
    """

    ids: Tensor
    """int64 [tokens, k]: the teacher's most probable tokens, all different; anything where the weight is 0."""
    logprobs: Tensor
    """float [tokens, k]: the teacher's log-probability of each."""
    weights: Tensor
    """float [tokens]: what the divergence is multiplied by in the loss; 0: the token has no teacher."""

    def select(self, tokens: slice) -> "TopTokens":
        """Of these tokens only."""
        return TopTokens(self.ids[tokens], self.logprobs[tokens], self.weights[tokens])


class Divergence(NamedTuple):
    """D of each token, and what its gradient needs: with respect to logit j of the k tokens it is `inside` p_j - q_j,
    with respect to that of any other `outside` p_j. All [tokens]."""

    value: Tensor
    inside: Tensor
    outside: Tensor


def divergence(teacher: Tensor, policy: Tensor) -> Divergence:
    """D of the log-probabilities of the same tokens, [tokens, k] each."""
    q, p = teacher.exp(), policy.exp()
    held = q.sum(-1)
    rest, own = (1 - held).clamp(min=0), 1 - p.sum(-1)
    value = (q * (teacher - policy)).sum(-1)
    logs = rest.clamp(min=1e-30).log() - own.clamp(min=LEAST_TAIL).log()
    fixed = (rest <= 0) | (own < LEAST_TAIL)
    inside = where(fixed, held, 1)
    return Divergence(value + rest * logs, inside, inside - where(fixed, 0, rest / own.clamp(min=LEAST_TAIL)))


class TopGradient(NamedTuple):
    """The gradient of the loss at a chunk's logits, where the teacher's tokens change it."""

    shift: Tensor
    """[tokens]: what is added to the gradient with respect to the sampled token's log-probability, for all logits that
    are not among these."""
    places: Tensor
    """int64 [tokens, k + 1]: the sampled token and the k."""
    values: Tensor
    """[tokens, k + 1]: the gradient at these logits, with the sampled token's own part."""

    def write(self, gradient: Tensor, divisor: float) -> Tensor:
        """Put the values in place: `gradient` [tokens, vocabulary], whose dtype they are rounded to once."""
        return gradient.scatter_(-1, self.places, (self.values / divisor).to(gradient.dtype))


def top_gradient(
    top: TopTokens,
    found: Divergence,
    policy: Tensor,
    target: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor | None],
    entropy: Tensor,
) -> TopGradient:
    """The gradient of weights x D and of the loss of the sampled token together.

    `policy` [tokens, k] log-probabilities of the teacher's tokens. `target`: the sampled tokens and their
    log-probabilities, `grads`: the gradients of the loss with respect to these and, if wanted, to `entropy`.
    """
    (ids, own), (slope, of_entropy), weights = target, grads, top.weights.to(policy.dtype)
    hits = top.ids == ids[:, None]
    outside = weights * found.outside
    values = weights[:, None] * (found.inside[:, None] * policy.exp() - top.logprobs.to(policy.dtype).exp())
    sampled = where(hits.any(-1), (values * hits).sum(-1), outside * own.exp())
    values = values + slope[:, None] * (hits.to(policy.dtype) - policy.exp())
    sampled = sampled + slope * (1 - own.exp())
    if of_entropy is not None:
        values = values - of_entropy[:, None] * policy.exp() * (policy + entropy[:, None])
        sampled = sampled - of_entropy * own.exp() * (own + entropy)
    places, both = cat([ids[:, None], top.ids], -1), cat([sampled[:, None], values], -1)
    return TopGradient(-outside, places, both)
