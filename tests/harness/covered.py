"""Parameters of a test over several axes: few rows in the fast tests, the rest of the full product in the long ones.

@pytest.mark.parametrize(("saving", "loss"), covered(["none", "block"], ["dppo", "gspo"], strength=1))
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covered(*axes: Sequence[Any], strength: int = 2, ids: Callable[[Any], str] = str) -> list[Any]:
    """Every row of the product of `axes`; rows that `cover` leaves out are marked long. `ids` names a value."""
    fast = {*cover(tuple(map(len, axes)), strength)}
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, row, strict=True)),
            marks=() if row in fast else pytest.mark.long,
            id="-".join(ids(axis[index]) for axis, index in zip(axes, row, strict=True)),
        )
        for row in rows_of(tuple(map(len, axes)))
    ]


def cover(sizes: Sequence[int], strength: int) -> list[tuple[int, ...]]:
    """Choose rows of indices that cover all combinations of `strength` axes: with 1 every value is in some row, with 2
    every pair. Greedy: few rows, but not always the fewest.

    Example: `cover((2, 3), 1)` is `[(0, 0), (1, 1), (0, 2)]`.
    """
    left = {met for row in rows_of(sizes) for met in meetings(row, strength)}
    chosen, used = [], [[0] * size for size in sizes]
    while left:
        row = min(rows_of(sizes), key=lambda row: (-len(left & {*meetings(row, strength)}), uses(row, used), row))
        chosen.append(row)
        left -= {*meetings(row, strength)}
        for axis, index in enumerate(row):
            used[axis][index] += 1
    return chosen


def rows_of(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return product(*map(range, sizes))


def meetings(row: tuple[int, ...], strength: int) -> list[tuple[tuple[int, int], ...]]:
    """The combinations of values, as axis and index, in a row."""
    return list(combinations(enumerate(row), strength))


def uses(row: tuple[int, ...], used: list[list[int]]) -> int:
    """How often the values of a row were chosen before, so that rows spread over the axes."""
    return sum(used[axis][index] for axis, index in enumerate(row))
