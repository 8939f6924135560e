"""The order of the problems of several sources: shares hold in any stretch, each source runs through all its rows, and
the order depends on seed, epoch and weights only."""

import heapq
from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.ledger.rules import Ledger
from buffer.ledger.schedule import drawn_before, mixed, order

PARTS = st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 100)), min_size=1, max_size=5)


def sources(parts: list[tuple[int, float]], rows: list[int]) -> list[int]:
    ends = list(accumulate(number for number, _ in parts))
    return [next(part for part, end in enumerate(ends) if row < end) for row in rows]


@given(PARTS, st.integers(0, 4), st.booleans())
def test_epochs_follow_each_other_as_one_sequence(parts: list[tuple[int, float]], epochs: int, shuffle: bool) -> None:
    """Against a plain simulation from the first problem on."""
    heap = [(0.5 / weight, part) for part, (_, weight) in enumerate(parts)]
    heapq.heapify(heap)
    expected: list[int] = []
    total = sum(number for number, _ in parts)
    drawn = [0] * len(parts)
    for _ in range(total * (epochs + 1)):
        part = heap[0][1]
        expected.append(part)
        drawn[part] += 1
        heapq.heapreplace(heap, ((drawn[part] + 0.5) / parts[part][1], part))
    rows = [row for epoch in range(epochs + 1) for row in mixed(parts, 7, epoch, shuffle)]
    assert sources(parts, rows) == expected
    assert drawn_before(len(expected), [weight for _, weight in parts]) == drawn


@given(PARTS, st.integers(0, 2**31 - 1))
def test_each_source_runs_through_its_rows_before_it_begins_again(parts: list[tuple[int, float]], seed: int) -> None:
    rows = [row for epoch in range(3) for row in mixed(parts, seed, epoch, True)]
    start = 0
    for part, (number, _) in enumerate(parts):
        own = [row - start for row, source in zip(rows, sources(parts, rows), strict=True) if source == part]
        for begin in range(0, len(own), number):
            assert len(set(own[begin : begin + number])) == len(own[begin : begin + number])
        assert own[:number] == list(order(number, f"{seed}/{part}", 0, True))[: len(own[:number])]
        start += number


def test_any_stretch_has_the_shares_of_the_weights() -> None:
    parts = [(1000, 0.7), (50, 0.2), (5000, 0.1)]
    found = sources(parts, list(mixed(parts, 0, 3, True)))
    for begin in range(0, len(found) - 100, 37):
        counts = Counter(found[begin : begin + 100])
        assert all(abs(counts[part] - 100 * weight) <= 2 for part, (_, weight) in enumerate(parts))


def test_without_shuffle_each_source_keeps_its_order_and_weights_are_relative() -> None:
    assert list(mixed([(2, 1), (4, 1)], 0, 0, False)) == [0, 2, 1, 3, 0, 4]
    assert list(mixed([(2, 1), (4, 1)], 0, 1, False)) == [1, 5, 0, 2, 1, 3]
    assert list(mixed([(3, 2), (3, 6)], 5, 2, True)) == list(mixed([(3, 0.1), (3, 0.3)], 5, 2, True))


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_ledger_draws_in_that_order_and_goes_on_with_it(shuffle: bool) -> None:
    parts = [(5, 3.0), (7, 1.0)]

    def ledger() -> Ledger:
        return Ledger(12, 4, 1000, epochs=3, seed=3, shuffle=shuffle, shares=parts)

    expected = [row for epoch in range(3) for row in mixed(parts, 3, epoch, shuffle)]
    first, drawn = ledger(), []
    for room in (1, 5, 9, 100):
        assert list(first.upcoming(3)) == expected[len(drawn) : len(drawn) // 12 * 12 + 12][:3]
        drawn += [lease.index for lease in first.ask("a#1", 0, room, 0.0)]
    assert drawn == expected and list(first.upcoming(3)) == []
