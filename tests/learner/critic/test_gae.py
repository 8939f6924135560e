"""GAE over turns against the definition, token by token in float64; the value loss against autograd and PPO's rules."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.gae import turn_targets, value_losses, whitened
from tests.harness.valued import by_definition

NUMBER = st.floats(-3, 3)
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SHARES = st.sampled_from([0.0, 0.3, 0.95, 1.0])


@st.composite
def episodes(draw) -> list[list[dict]]:
    """Tokens of several samples."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        truncated, tokens = draw(st.booleans()), []
        for _ in range(draw(st.integers(1, 4))):
            length = draw(st.integers(1, 4))
            for place in range(length):
                last = place == length - 1
                tokens.append({"value": draw(NUMBER), "after": draw(NUMBER), "ends": last, "truncated": truncated,
                               "reward": draw(NUMBER) if last else 0.0})  # fmt: skip
        found.append(tokens)
    return found


def turns_of(samples: list[list[dict]]) -> tuple[Columns, torch.Tensor]:
    """The arguments of `turn_targets`, and the turn of each token."""
    rows, begins, lengths = [], [], []
    for number, tokens in enumerate(samples):
        for first in (0, *(n + 1 for n, token in enumerate(tokens[:-1]) if token["ends"])):
            end = next(n for n in range(first, len(tokens)) if tokens[n]["ends"])
            rows.append((tokens[end]["reward"], number, tokens[end]["after"], tokens[end]["truncated"]))
            begins.append(tokens[first]["value"])
            lengths.append(end - first + 1)
    rewards, owners, ends, cut = zip(*rows, strict=True)
    wide = torch.float64
    columns = torch.tensor(rewards, dtype=wide), torch.tensor(owners), torch.tensor(begins, dtype=wide)
    turn = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    return (*columns, torch.tensor(ends, dtype=wide), torch.tensor(cut)), turn


@given(samples=episodes(), gamma=SHARES, gae_lambda=SHARES)
def test_advantages_are_the_definition_s(samples: list[list[dict]], gamma: float, gae_lambda: float) -> None:
    arguments, turn = turns_of(samples)
    targets = turn_targets(*arguments, gamma, gae_lambda)
    assert targets.dtype == torch.float64
    values = torch.tensor([token["value"] for tokens in samples for token in tokens], dtype=torch.float64)
    wanted = [advantage for tokens in samples for advantage in by_definition(tokens, gamma, gae_lambda)]
    torch.testing.assert_close(targets[turn] - values, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


def test_one_turn_and_lambda_1_is_the_reward_less_the_value() -> None:
    """Another value after the end changes nothing in a finished sample, and everything in a truncated one."""
    one = torch.ones(1, dtype=torch.float64)
    for cut, wanted in ((False, 0.5), (True, 0.5 + 7.0)):
        found = turn_targets(0.5 * one, torch.tensor([3]), 9 * one, 7 * one, torch.tensor([cut]), 1.0, 1.0)
        assert found.tolist() == [wanted]


def test_samples_do_not_reach_each_other() -> None:
    rewards, zeros = torch.tensor([1.0, 2.0, 4.0, 8.0]).double(), torch.zeros(4)
    owners, cut = torch.tensor([0, 0, 5, 5]), torch.zeros(4, dtype=torch.bool)
    assert turn_targets(rewards, owners, zeros, zeros, cut, 0.5, 1.0).tolist() == [2.0, 2.0, 8.0, 8.0]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_of_the_value_loss_is_autograd_s_of_the_formula(clip: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    before, targets = (torch.randn(200, dtype=torch.float64, generator=draw) for _ in range(2))
    values = (before + 0.5 * torch.randn(200, dtype=torch.float64, generator=draw)).requires_grad_()
    losses, outside = value_losses(values, before, targets, clip)
    (ours,) = torch.autograd.grad(losses.sum(), values)
    wanted, gone = [], []
    for value, old, target in zip(values.tolist(), before.tolist(), targets.tolist(), strict=True):
        free = value - target
        held = None if clip is None else min(max(value, old - clip), old + clip) - target
        stopped = held is not None and abs(value - old) > clip and held**2 > free**2
        wanted.append(0.0 if stopped else free)
        gone.append(stopped)
    torch.testing.assert_close(ours, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)
    assert outside.tolist() == gone and any(gone) is (clip is not None)
    assert (losses >= 0.5 * (values - targets) ** 2).all()


def test_whitened_has_mean_0_and_deviation_1() -> None:
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 5
    made = whitened(values, float(values.mean()), float(values.var()))
    assert float(made.mean()) == pytest.approx(0, abs=1e-12) and float(made.std()) == pytest.approx(1, abs=1e-8)
    assert not whitened(torch.full((3,), 2.0), 2.0, 0.0).any()  # equal ones teach nothing
