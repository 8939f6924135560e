"""What a teacher adds to advantages, and the estimate of the reverse KL: against loops over Python's own float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import AlgorithmConfig
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES
from learner.algorithms.teachers import kl_metrics, kl_sums, with_teacher

LOGPROBS = st.floats(-30, 0)
TOKENS = st.lists(
    st.tuples(st.floats(-5, 5), LOGPROBS, LOGPROBS, st.sampled_from([0.0, 0.3, 1.0, 7.0])), min_size=1, max_size=20
)


@given(TOKENS)
def test_an_advantage_gains_weight_times_teacher_less_behaviour(
    tokens: list[tuple[float, float, float, float]],
) -> None:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    found = with_teacher(*columns).tolist()
    expected = [advantage + weight * (teacher - own) for advantage, teacher, own, weight in tokens]
    assert found == pytest.approx(expected, rel=1e-15, abs=1e-15)


@pytest.mark.parametrize("loss", ["dppo", "cispo", "ppo", "decoupled", "m2po", "reinforce"])
def test_the_gradient_of_a_loss_is_its_own_at_the_sum_of_both_advantages(loss: str) -> None:
    """On its own policy, in float64: -d loss / d log pi of a token is (A + w (log q - log mu)) / N."""
    draw = torch.Generator().manual_seed(1)
    advantages, teacher, behaviour = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(3))
    weights = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    both = with_teacher(advantages, teacher, behaviour, weights)
    config = AlgorithmConfig(loss=loss)

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        sampled, sequence = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int64)
        versions = torch.zeros(6, dtype=torch.int64)
        given = LossInputs(logprobs, behaviour, both, sampled, sequence, 1, 6, versions=versions)
        return LOSSES[loss](given, config)[0]

    own = behaviour.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(own), own)
    for token in range(6):
        expected = -(float(advantages[token]) + float(weights[token]) * float(teacher[token] - behaviour[token])) / 6
        assert float(gradient[token]) == pytest.approx(expected, rel=1e-12)


def test_in_expectation_the_term_is_minus_the_gradient_of_the_reverse_kl() -> None:
    """Summed over the whole vocabulary, in float64, against the derivative that autograd has of KL(pi | q)."""
    draw = torch.Generator().manual_seed(2)
    logits, other = (torch.randn(9, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    policy, teacher = logits.log_softmax(0), other.log_softmax(0)
    (of_kl,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    advantages = with_teacher(torch.zeros(9).double(), teacher, policy.detach(), torch.ones(9).double())
    expected = -(policy.detach().exp() * advantages * policy).sum()
    (of_term,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(of_term, of_kl, rtol=1e-12, atol=1e-14)


def test_the_reverse_kl_is_a_mean_over_tokens_of_all_ranks_in_all_and_by_source() -> None:
    ranks = [{"math": (3.0, 4), "": (1.0, 1)}, {"math": (1.0, 4)}, {}]
    sums = [kl_sums(each, ["", "math", "code"]) for each in ranks]
    assert sums[0].keys() == sums[2].keys(), "collectives need the same keys on all ranks"
    totals = {key: math.fsum(each[key] for each in sums) for key in sums[0]}
    assert kl_metrics(totals, ["", "math", "code"], 18.0) == {
        "teacher/share": 0.5,
        "teacher/reverse_kl": 5.0 / 9,
        "teacher/math/reverse_kl": 0.5,
        "teacher/other/reverse_kl": 1.0,
    }
    assert kl_metrics(kl_sums({}, [""]), [""], 5.0) == {"teacher/share": 0.0}
    assert kl_metrics({}, [], 5.0) == {}
