"""Metrics of the problems, from what the buffer says in a part."""

from types import SimpleNamespace
from typing import Any

from learner.train.step import problem_metrics


def part(**fields: Any) -> Any:
    return SimpleNamespace(**({"problems": {}, "new_groups": 0, "flat_groups": 0} | fields))


def test_the_share_of_rows_left_out_counts_each_row_once() -> None:
    counts = {"unseen": 10, "unsolved": 5, "between": 12, "solved": 10, "retired": 8, "left_out": 13}
    found = problem_metrics(part(problems=counts, new_groups=8, flat_groups=3))
    assert found["problems/left_out_share"] == 13 / 50 and found["problems/retired"] == 8.0
    assert found["groups/flat"] == 3 / 8


def test_a_buffer_that_was_just_started_gives_no_share_of_flat_groups() -> None:
    assert problem_metrics(part()) == {}
