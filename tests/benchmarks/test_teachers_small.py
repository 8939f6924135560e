"""The benchmark of teachers: when a run has reached its goal, the rows of a seed, and several benchmarks at a time."""

import argparse
from pathlib import Path

import pytest

from benchmarks.runs.ports import FIRST, LAST, free_port
from benchmarks.teachers import (
    ON_GPU,
    Plan,
    laid_over,
    last_version,
    name_of,
    only_maker,
    plans,
    play,
    reached,
    rows_of,
    setting,
)


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
    weak = [one | {"reward/mean": 0.6} for one in TAUGHT]
    never, _ = rows_of(1, [{"reward/mean": 0.5}] * 20, weak)
    assert never.what == "not to a mean reward of 0.8 in 10 versions: the last mean"
    assert never.value == pytest.approx(0.6) and (never.against, never.against_value) == ("alone, after 20", 0.5)


def test_rewards_that_never_reached_it_bound_the_share() -> None:
    versions, share, _ = rows_of(1, [{"reward/mean": 0.5}] * 20, TAUGHT)
    assert (versions.value, versions.against, versions.against_value) == (5, "rewards alone, more than", 20)
    assert share.what == "  as a share, less than" and share.value == 0.25


def test_runs_take_gpus_in_turn_and_a_learner_another_one_than_its_server() -> None:
    made = plans([0, 1, 2], [4, 5])
    assert [(plan.seed, plan.taught) for plan in made] == [(s, t) for t in (False, True) for s in range(3)]
    assert all(plan.gpu != plan.learner_gpu and {plan.gpu, plan.learner_gpu} == {4, 5} for plan in made)
    assert plans([0], []) == [Plan(0, False, None, None), Plan(0, True, None, None)]


def test_a_setting_is_laid_over_key_by_key() -> None:
    config = {"learner": {"lr": 1e-3, "device": "cpu"}, "data": {"eval": "file"}}
    for change in ({"data": {"eval": {}}}, setting("learner.lr=4e-3"), setting("teacher.engine.dtype=float32")):
        laid_over(config, change)
    assert config["learner"] == {"lr": "4e-3", "device": "cpu"} and config["data"] == {"eval": {}}
    assert config["teacher"] == {"engine": {"dtype": "float32"}}


def test_some_settings_are_of_all_runs_and_each_run_has_a_name_of_its_own(tmp_path: Path) -> None:
    both, own = ["batch.groups=256", "run.versions=9"], ["learner.betas=[0.8, 0.9]"]
    args = argparse.Namespace(both=both, set=own, versions=10, work=tmp_path, teacher=None)
    names = [name_of(args, Plan(0, taught, None, None)) for taught in (False, True)]
    assert names == ["rewards-seed0-groups256-versions9", "taught-seed0-groups256-versions9-betas0.80.9"]
    assert [last_version(args, Plan(0, taught, None, None)) for taught in (False, True)] == [9, 9]
    args.teacher = tmp_path / "other"
    others = [name_of(args, Plan(0, taught, None, None)) for taught in (False, True)]
    assert others[0] == names[0] and others[1] != names[1]


def test_on_gpus_a_run_survives_the_rounding_of_improbable_tokens() -> None:
    """A run with a teacher ended at version 5 by a probe that differed by .061 nat in the mean, at log-probabilities of
    -15 and -20: half the distance of two numbers of that size in bfloat16 is .03 to .06."""
    assert ON_GPU["model"]["dtype"] == "bfloat16" and ON_GPU["weights"]["probe_tolerance"] == 0.2


def plan_in(work: Path, only: str | None) -> tuple[argparse.Namespace, Plan, Path]:
    """A run on rewards alone, whose run file and one record exist."""
    folder = work / "rewards-seed0"
    folder.mkdir()
    (folder / "given.yaml").write_text("of another process")
    (folder / "metrics.jsonl").write_text('{"version": 1, "reward/mean": 0.5}\n{"version": 2, "rew')
    args = argparse.Namespace(work=work, teacher=None, set=[], both=[], only=only, versions=10, budget_s=5.0)
    return args, Plan(0, False, None, None), folder / "given.yaml"


@pytest.mark.parametrize("only", ["teacher", "nothing"])
def test_a_run_that_only_leaves_out_is_read_and_its_run_file_kept(tmp_path: Path, only: str) -> None:
    """Another benchmark may have begun it a moment ago: its processes read the address of their buffer there."""
    args, plan, file = plan_in(tmp_path, only)
    assert [one["reward/mean"] for one in play(args, plan)] == [0.5]
    assert file.read_text() == "of another process"


def test_a_run_that_another_benchmark_makes_is_not_made_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, plan, file = plan_in(tmp_path, None)
    with only_maker(file.parent):
        assert [one["reward/mean"] for one in play(args, plan)] == [0.5]
    assert file.read_text() == "of another process"
    assert f"another benchmark makes the run in {file.parent} now" in "".join(capsys.readouterr())


def test_a_port_is_given_once_and_never_one_of_outgoing_connections() -> None:
    """Searches that begin at the same port find different ones, as searches of other processes would."""
    ports = [free_port(20_000) for _ in range(5)] + [free_port() for _ in range(5)]
    assert len(set(ports)) == 10 and all(FIRST <= port < LAST for port in ports)
