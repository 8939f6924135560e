"""pass@k and pass^k against enumeration of all draws, and the figures of a set."""

from itertools import combinations
from math import nan, sqrt
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.evaluation.statistics import Attempt, figures, pass_at, pass_hat

GOOD, BAD = Attempt(1.0, 10, False), Attempt(0.1, 30, True)


@pytest.mark.parametrize("attempts", range(1, 8))
def test_the_estimates_are_the_means_over_all_draws(attempts: int):
    for solved in range(attempts + 1):
        outcomes = [True] * solved + [False] * (attempts - solved)
        for k in range(1, attempts + 1):
            draws = list(combinations(outcomes, k))
            assert pass_at(k, attempts, solved) == pytest.approx(fmean(any(draw) for draw in draws))
            assert pass_hat(k, attempts, solved) == pytest.approx(fmean(all(draw) for draw in draws))


@given(st.integers(1, 6), st.integers(1, 6), st.fractions(0, 1, max_denominator=5))
def test_the_estimates_are_unbiased(attempts: int, k: int, chance):
    """Their expectation over attempts, each solved with `chance`, is the probability itself."""
    k = min(k, attempts)
    at = hat = 0.0
    for bits in range(2**attempts):
        solved = bits.bit_count()
        weight = float(chance**solved * (1 - chance) ** (attempts - solved))
        at += weight * pass_at(k, attempts, solved)
        hat += weight * pass_hat(k, attempts, solved)
    assert at == pytest.approx(float(1 - (1 - chance) ** k)) and hat == pytest.approx(float(chance**k))


@pytest.mark.parametrize("k", [0, 3])
def test_no_estimate_for_more_attempts_than_there_are(k: int):
    for estimate in (pass_at, pass_hat):
        with pytest.raises(ValueError, match=f"{k} of 2 attempts"):
            estimate(k, 2, 1)


def test_the_figures_of_a_set():
    found = figures([[GOOD, GOOD], [GOOD, BAD], [BAD, BAD]], 2, [1, 2])
    assert found["mean@2"] == found["pass@1"] == pytest.approx(0.5) and "pass^1" not in found
    assert found["pass@2"] == pytest.approx(2 / 3) and found["pass^2"] == pytest.approx(1 / 3)
    assert found["reward"] == pytest.approx(3.3 / 6) and found["length"] == 20.0 and found["truncated"] == 0.5
    assert found["error"] == pytest.approx(sqrt(0.25 / 3))  # of the shares 1, 0.5, 0
    assert (found["problems"], found["failed"]) == (3.0, 0.0) and not any(key.startswith("left_out") for key in found)


def test_failed_attempts_count_as_neither_solved_nor_unsolved():
    found = figures([[GOOD, GOOD, BAD], [GOOD], []], 3, [1, 2])
    assert (found["problems"], found["failed"]) == (3.0, 5.0)
    assert found["mean@3"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["pass@2"] == 1.0 and found["pass^2"] == pytest.approx(1 / 3), "only the first problem has two"
    assert (found["left_out@1"], found["left_out@2"]) == (1.0, 2.0)


def test_a_set_of_failures_has_no_figures():
    assert figures([[], []], 4, [2]) == {"problems": 2.0, "failed": 8.0}
    assert "error" not in figures([[GOOD]], 1, []), "one problem has no error"


def test_solved_is_a_reward_of_1_or_more():
    rewards = [1.0, 1.5, 0.999, -1.0, 0.0]
    assert [Attempt(reward, 1, False).solved for reward in rewards] == [True, True, False, False, False]
    assert not Attempt(nan, 1, False).solved
