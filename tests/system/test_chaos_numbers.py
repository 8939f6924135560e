"""The chaos audit's rule of numbers: each has an item, but for places of rows that are left out."""

from typing import Any

import pytest

from tests.system.chaos_audit import Finding, _numbers

ROWS = 3


def ledger(epochs: int, without: set[int]) -> dict[int, dict[str, Any]]:
    """Items of some epochs; row 1 is dropped in the first."""
    found = {number: {"row": number % ROWS, "state": "trained", "reason": ""} for number in range(ROWS * epochs)}
    found[1] |= {"state": "dropped", "reason": "prompt too long"}
    return {number: item for number, item in found.items() if number not in without}


@pytest.mark.parametrize("without", [set(), {4}, {4, 7}])
def test_a_row_that_is_left_out_has_no_item(without: set[int]) -> None:
    _numbers(ledger(3, without), ROWS, 3)


@pytest.mark.parametrize(("without", "first"), [({0}, 0), ({3}, 3), ({4, 5}, 3), ({8}, 6)])
def test_an_item_that_is_lost_is_found(without: set[int], first: int) -> None:
    with pytest.raises(Finding, match=f"without gaps: . lack from number {first} on"):
        _numbers(ledger(3, without), ROWS, 3)
