"""The benchmark of drawing by difficulty, on one seed: the fit problems are learned with the share of tokens wanted."""

import pytest

from benchmarks.difficulty import GOAL, MIXTURES, TARGET, Simulation


@pytest.mark.parametrize("staleness", [0, 4])
def test_the_fit_problems_of_a_mixture_are_learned_with_fewer_tokens(staleness: int) -> None:
    tokens = {}
    for chosen in (False, True):
        it = Simulation(1, staleness, chosen, MIXTURES["40/20/40"], problems=600, groups=16)
        tokens[chosen] = it.tokens_to_goal()
        assert it.solved >= GOAL
        assert max(it.ledger.view.ages()) <= staleness
    assert tokens[True] <= TARGET * tokens[False]
