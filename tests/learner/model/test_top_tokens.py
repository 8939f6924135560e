"""The teacher's most probable tokens: the divergence and its gradient through the head, against autograd over the whole
vocabulary in float64."""

import pytest
import torch
from torch import Tensor

from learner.model.head import HeadOptions, chunked_loss
from learner.model.top_tokens import TopTokens, divergence

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, sampled tokens, and a teacher's log-probabilities of the whole vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) for n in (TOKENS, VOCABULARY))
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    teacher = (2 * torch.randn(TOKENS, VOCABULARY, generator=draw, dtype=torch.float64)).log_softmax(-1)
    return hidden, weight, targets, teacher


def buckets(policy: Tensor, teacher: Tensor, ids: Tensor) -> Tensor:
    """The reverse KL over the tokens `ids` and all others as one, by its definition."""
    inside = torch.zeros_like(policy, dtype=torch.bool).scatter_(-1, ids, True)
    total = torch.where(inside, policy.exp() * (policy - teacher), 0).sum(-1)
    if ids.shape[-1] == policy.shape[-1]:
        return total
    q, p = (torch.where(inside, 0, each.exp()).sum(-1) for each in (teacher, policy))
    return total + p * (p / q).log()


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
def test_loss_and_gradient_are_those_of_the_definition(k: int, bonus: bool) -> None:
    """With another loss of the sampled token, tokens of weight 0, a temperature, chunks of 3; at k = vocabulary it is
    the whole reverse KL."""
    hidden, weight, targets, teacher = case()
    logprobs, ids = teacher.topk(k)
    targets[0] = ids[0, 0]
    weights = torch.tensor([0.5, 0.0, 1.0, 2.0, 0.1, 0.0, 3.0]).double()
    slopes = torch.linspace(-1, 1, TOKENS).double()
    ids = torch.where(weights[:, None] == 0, 0, ids)  # anything may be there
    options = HeadOptions(0.7, 3, bonus)

    def own(logp: Tensor, entropy: Tensor, chunk: slice) -> Tensor:
        return (slopes[chunk] * logp).sum() + (0.3 * (entropy * slopes[chunk]).sum() if bonus else 0)

    x, w = (each.clone().requires_grad_() for each in (hidden, weight))
    _, _, total, distances = chunked_loss(x, w, targets, own, options, top=TopTokens(ids, logprobs, weights))
    found = torch.autograd.grad(total, [x, w])
    plain = [each.clone().requires_grad_() for each in (hidden, weight)]
    policy = (plain[0] @ plain[1].T / 0.7).log_softmax(-1)
    entropy = -(policy.exp() * policy).sum(-1)
    expected = buckets(policy, teacher, teacher.topk(k).indices)
    whole = (weights * expected).sum() + own(policy.gather(-1, targets[:, None])[:, 0], entropy, slice(None))
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(distances[weights != 0], expected[weights != 0].detach(), rtol=1e-9, atol=1e-12)
    if k == VOCABULARY:
        of_all = torch.nn.functional.kl_div(teacher, policy, reduction="none", log_target=True).sum(-1)
        torch.testing.assert_close(distances[weights != 0], of_all[weights != 0].detach(), rtol=1e-12, atol=1e-12)
    for one, other in zip(found, torch.autograd.grad(whole, plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def gradient_of(logits: Tensor, teacher: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """D of one token in float32 through the head, and its gradient at the logits."""
    leaf = logits[None].clone().requires_grad_()
    top, width = TopTokens(ids[None], teacher[None], torch.ones(1)), len(logits)
    zero = lambda logp, entropy, chunk: 0 * logp.sum()  # noqa: E731
    last = torch.tensor([width - 1])
    *_, total, distances = chunked_loss(leaf, torch.eye(width), last, zero, HeadOptions(), top=top)
    return distances[0], torch.autograd.grad(total, leaf)[0][0]


def test_a_policy_with_nothing_left_for_other_tokens_has_a_finite_gradient() -> None:
    """In float32 1 - sum p is a rounding error, larger as logits are."""
    teacher = torch.tensor([-0.1, -2.5])
    value, gradient = gradient_of(torch.tensor([60.0, 59.0, 0.0]), teacher, torch.tensor([0, 1]))
    p = torch.tensor([60.0, 59.0]).log_softmax(-1)
    expected = (p.exp() * (p - teacher)).sum()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(gradient[:2], p.exp() * (p - teacher - expected), rtol=0, atol=1e-4)
    assert gradient[2].abs() < 1e-20


@pytest.mark.parametrize("excess", [0.0, 1e-7])
def test_a_teacher_with_nothing_left_for_other_tokens_pulls_the_policy_from_them(excess: float) -> None:
    """Their rounded probability may be below 0: it counts as the least one, and no gradient exceeds its logarithm."""
    teacher = torch.tensor([0.7, 0.3 + excess]).log()
    value, gradient = gradient_of(torch.tensor([1.0, 0.0, 2.0, 2.0]), teacher, torch.tensor([0, 1]))
    assert 0 < value < 13.9 and gradient.isfinite().all()
    assert (gradient[2:] > 1).all() and (gradient[:2] < 0).all()
    torch.testing.assert_close(gradient.sum(), torch.zeros(()), atol=1e-5, rtol=0)


def test_a_policy_that_is_its_teacher_has_no_divergence_and_no_gradient() -> None:
    _, _, _, teacher = case()
    top = teacher.topk(4).values
    found = divergence(top, top)
    torch.testing.assert_close(found.value, torch.zeros(TOKENS).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.outside, torch.zeros(TOKENS).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.inside, torch.zeros(TOKENS, 4).double(), atol=1e-12, rtol=0)
