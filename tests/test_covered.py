"""The rows that `covered` leaves in the fast tests include every value, or every pair."""

from itertools import combinations, product

import pytest

from tests.harness.covered import cover, covered


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 4), (2, 2, 2, 2), (5,)])
def test_every_combination_of_the_strength_is_covered(sizes: tuple[int, ...]) -> None:
    for strength in range(1, min(len(sizes), 3) + 1):
        rows = cover(sizes, strength)
        assert len({*rows}) == len(rows) <= len(list(product(*map(range, sizes))))
        for axes in combinations(range(len(sizes)), strength):
            met = {tuple(row[axis] for axis in axes) for row in rows}
            assert met == {*product(*(range(sizes[axis]) for axis in axes))}


def test_few_rows_are_enough() -> None:
    assert len(cover((5, 3), 1)) == 5 and len(cover((4, 4, 4), 2)) < 32 and len(cover((2, 2), 2)) == 4


def test_the_rest_of_the_product_is_long() -> None:
    rows = covered(["none", "block"], [1, 2, 3], strength=1)
    assert [row.id for row in rows] == ["none-1", "none-2", "none-3", "block-1", "block-2", "block-3"]
    fast = [row.values for row in rows if not row.marks]
    assert fast == [("none", 1), ("none", 3), ("block", 2)]
    assert all(row.marks == (pytest.mark.long.mark,) or row.marks == (pytest.mark.long,) for row in rows if row.marks)
