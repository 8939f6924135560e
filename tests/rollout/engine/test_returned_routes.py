"""Rows that vLLM returns: kept until the end, and refused where they cannot be what the model did."""

import numpy as np
import pytest

from rollout.engine.experts.returned_routes import ReturnedRoutes, RowsKept
from rollout.errors import EngineDead

CONFIG = {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_local_experts": 8, "num_experts_per_tok": 2}
ROUTES = ReturnedRoutes(CONFIG)


def rows(tokens: int, experts: int = 8, k: int = 2, layers: int = 3, dtype: str = "uint8") -> np.ndarray:
    draw = np.random.default_rng(0)
    chosen = [draw.permutation(experts)[:k] for _ in range(tokens * layers)]
    made = np.array(chosen).reshape(tokens, layers, k).astype(dtype)
    made[:, 1] = 0  # no experts in that layer
    return made


def test_rows_are_those_of_the_layers_with_experts():
    given = rows(300)
    assert np.array_equal(ROUTES.checked(given, 300), given[:, [0, 2]])
    many = ReturnedRoutes(CONFIG | {"num_local_experts": 300})
    assert many.checked(rows(5, 300, dtype="uint16"), 5).dtype == np.uint16
    one = ReturnedRoutes(CONFIG | {"num_experts_per_tok": 1})
    assert not one.checked(rows(50, k=1), 50).all(), "expert 0 alone is a choice where k is 1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "no routes with 100 tokens"),
        (rows(99), r"routes uint8\[99, 3, 2\] instead of uint8\[100, 3, 2\]"),
        (rows(100, k=3), r"routes uint8\[100, 3, 3\]"),
        (rows(100, dtype="int32"), r"routes int32\[100, 3, 2\] instead of uint8"),
        (np.zeros_like(rows(100)), "zeros as the routes of token 0 of 100"),
        (np.concatenate([rows(70), np.zeros_like(rows(30))]), "zeros as the routes of token 70 of 100"),
        (np.full_like(rows(100), 3), "routes that are no 2 of 8 experts"),
        (rows(100, experts=20), "routes that are no 2 of 8 experts"),
        (rows(100) * np.array([1, 1, 0], np.uint8)[:, None], "routes that are no 2 of 8 experts"),
    ],
)
def test_routes_that_cannot_be_end_the_server_in_words(given, words):
    match = f"^rollout.routing_replay: vLLM returned {words}.* set rollout.routing_replay to false$"
    with pytest.raises(EngineDead, match=match):
        ROUTES.checked(given, 100)


def test_a_mixture_whose_tokens_take_one_expert_is_not_all_zeros():
    one = ReturnedRoutes(CONFIG | {"num_experts_per_tok": 1})
    with pytest.raises(EngineDead, match="zeros"):
        one.checked(np.zeros_like(rows(50, k=1)), 50)


def test_rows_are_kept_by_themselves():
    kept, step = RowsKept(), rows(40)
    assert kept.joined() is None
    for part in (step[:7], step[7:8], step[8:20]):
        kept.add(part)
    joined = kept.joined()
    assert np.array_equal(joined, step[:20]) and not np.shares_memory(joined, step)
