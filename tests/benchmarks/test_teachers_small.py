"""The benchmark of teachers: when a run has reached its goal, and the rows of a seed."""

import pytest

from benchmarks.teachers import reached, rows_of


@pytest.mark.parametrize(
    ("rewards", "version"),
    [
        ([0.9] * 5, 5),
        ([0.9] * 4, None),
        ([0.2] * 5 + [0.9] * 9, 10),
        ([0.2] * 5 + [0.8] * 9, 10),
        ([0.9, 0.2] * 20, None),
        ([], None),
    ],
)
def test_the_goal_is_reached_by_a_mean_of_several_versions(rewards: list[float], version: int | None) -> None:
    assert reached(rewards) == version


KL = [1.0, 0.9, 0.8, 0.7, 0.6, 0.2, 0.2, 0.2, 0.2, 0.2]
TAUGHT = [{"reward/mean": 0.9, "teacher/reverse_kl": kl} for kl in KL]


def test_versions_are_compared_where_both_runs_reached_the_goal() -> None:
    alone = [{"reward/mean": 0.5}] * 15 + [{"reward/mean": 0.9}] * 5
    versions, share, kl = rows_of(1, alone, TAUGHT)
    assert versions.value == 5 and versions.against_value == 19 and share.value == pytest.approx(5 / 19)
    assert kl.value == pytest.approx(0.2) and kl.against_value == pytest.approx(0.8)


def test_a_run_that_never_reached_it_is_shown_with_its_last_rewards() -> None:
    never, _ = rows_of(1, [{"reward/mean": 0.5}] * 20, TAUGHT)
    assert never.what.startswith("never to a mean reward of 0.8") and (never.value, never.against_value) == (0.9, 0.5)
