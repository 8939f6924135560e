"""Bytes alive on the meta device: levels of a computation, and the lines that are highest for some number of tokens."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.model.alive import Alive, Line, highest, lines


def levels_of(tokens: int) -> list[int]:
    """A product of [tokens, 100, 100] that no backward pass needs is there while its sum is computed."""
    x = torch.empty(tokens, 100, device="meta")
    with Alive([x]) as alive:
        total = (x[:, :, None] * x[:, None]).sum(-1)
        del total
    return alive.levels


def test_a_product_that_is_not_saved_counts_while_it_lives() -> None:
    assert levels_of(8) == [0, 4 * 8 * 10_000, 4 * 8 * 10_100, 4 * 8 * 100, 0]
    assert lines(levels_of(8), levels_of(16), 8)[-1] == Line(0, 4 * 10_100)


def test_views_and_results_in_place_make_no_storage() -> None:
    with Alive() as alive:
        x = torch.zeros(10, device="meta")
        x.view(2, 5).add_(1)
    assert alive.levels == [0, 40]


def test_a_gradient_that_is_written_into_zeros_counts_once() -> None:
    """As on a GPU, where no dispatch mode has autograd copy it."""
    x, index = torch.zeros(8, 4, device="meta", requires_grad=True), torch.zeros(8, dtype=torch.int64, device="meta")
    with Alive([x, index]) as alive:
        x[index].sum().backward()
    assert max(alive.levels) <= 2 * x.nbytes + 8


def test_rows_whose_moments_differ_are_compared_by_their_highest() -> None:
    assert lines([0, 10, 0], [0, 10, 30, 0], 10) == [Line(-10, 2)]


LINES = st.builds(Line, st.integers(0, 1000), st.integers(0, 50))


@given(st.lists(LINES, min_size=1), st.integers(0, 1000))
def test_the_highest_lines_are_as_high_as_all(found: list[Line], tokens: int) -> None:
    assert max(line.at(tokens) for line in highest(found)) == max(line.at(tokens) for line in found)


@given(st.lists(LINES, min_size=1))
def test_each_of_the_highest_lines_is_needed(found: list[Line]) -> None:
    """Slopes rise, and what is there without tokens falls."""
    envelope = highest(found)
    assert all(a.per_token < b.per_token and a.fixed > b.fixed for a, b in pairwise(envelope))


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_of_attention_take_room_in_float32(shared: bool) -> None:
    tokens, starts = 16, torch.zeros(2, dtype=torch.int32, device="meta")
    q, k = (torch.empty(tokens, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2 if shared else 4))
    lse = torch.empty(4, tokens, device="meta")
    with Alive([q, k, lse, starts]) as alive:
        torch.ops.headrace.attend_backward(
            q, q, k, k, q, lse, starts, starts, tokens, tokens, True, 1.0, None, "varlen"
        )
    assert max(alive.levels) - (q.nbytes + 2 * k.nbytes) == (4 if shared else 2) * q.nbytes
