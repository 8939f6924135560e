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


def test_a_run_on_rewards_alone_that_never_reaches_it_counts_with_all_its_versions() -> None:
    alone = [{"reward/mean": 0.5}] * 120
    taught = [
        {"reward/mean": 0.9, "teacher/reverse_kl": kl} for kl in (1.0, 0.9, 0.8, 0.7, 0.6, 0.2, 0.2, 0.2, 0.2, 0.2)
    ]
    versions, share, came, kl = rows_of(1, alone, taught)
    assert (versions.value, versions.against_value, share.value) == (5, 120, pytest.approx(5 / 120))
    assert came.value == 0 and (kl.value, kl.against_value) == (pytest.approx(0.2), pytest.approx(0.8))
