"""The benchmark of difficulty with a real model: its problems, its runs, and when a run has reached its goal."""

import argparse
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mixture import KINDS, MixturePlan, config_of, name_of, plans, problems, rows_of, texts, tokens_to_goal
from configs.schema import Config
from rollout.rewards.countdown import compute_score


def test_problems_are_of_their_kind_and_the_student_is_shown_right_answers_to_trivial_ones() -> None:
    rows = problems()
    assert Counter(row["kind"] for row in rows) == KINDS and rows == problems()
    prompts = {row["prompt"][0]["content"]: row for row in rows}
    assert len(prompts) == len(rows)
    shown, scores = texts(rows, random.Random(1)), {kind: set[float]() for kind in KINDS}
    for prompt, answer in (next(shown) for _ in range(3000)):
        if (row := prompts.get(prompt)) is not None:  # the numbers of others are in another order
            scores[row["kind"]].add(compute_score(answer, row["reward_model"]["ground_truth"])["score"])
    assert scores == {"trivial": {1.0}, "fit": {0.0, 0.1, 1.0}, "impossible": {0.0, 0.1}}


def records(shares: dict[int, float], versions: int, tokens: int) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"version": version, "reward/mean": 0.5, "tokens_sampled": tokens} for version in range(1, versions + 1)
    ]
    made += [
        {"version": version + 1, "eval/version": version, "eval/fit/mean@2": shares[version]} for version in shares
    ]
    return made


def test_a_run_has_reached_its_goal_with_the_tokens_of_the_versions_until_then() -> None:
    slow, fast = records({0: 0.2, 4: 0.69, 8: 0.7}, 9, 100), records({0: 0.2, 4: 0.8, 8: 0.6}, 9, 150)
    assert tokens_to_goal(slow) == (8, 800) and tokens_to_goal(fast) == (4, 600)
    assert tokens_to_goal(records({0: 0.1}, 9, 100)) is None
    share = rows_of("0, seed 0", slow, fast)[-1]
    assert share.what == "share of the tokens" and share.value == 0.75
    bound = rows_of("0, seed 0", records({4: 0.5}, 9, 100), fast)[-1]
    assert bound.what == "share of the tokens, less than" and bound.value == pytest.approx(600 / 900)
    assert [row.what for row in rows_of("0, seed 0", slow, records({4: 0.5}, 9, 1))][-1] == "not 0.7 within versions"
    assert rows_of("0, seed 0", [], fast) == []


def test_two_runs_of_a_pair_differ_in_their_draws_only(tmp_path: Path) -> None:
    args = argparse.Namespace(work=tmp_path, versions=10, set=["learner.lr=8e-4"])
    pair = plans([3], [4], [0, 1, 2])
    assert pair == [MixturePlan(3, 4, False, (0, 1)), MixturePlan(3, 4, True, (1, 2))]
    uniform, chosen = (Config.model_validate(config_of(args, plan)) for plan in pair)
    assert uniform.batch.max_staleness == 4 and uniform.learner.lr == 8e-4 and uniform.data.difficulty is None
    assert chosen.data.difficulty is not None and chosen.data.eval["fit"].samples == 2
    kept = {"run": uniform.run, "buffer": uniform.buffer, "data": uniform.data}
    assert chosen.model_copy(update=kept) == uniform
    assert chosen.data.model_copy(update={"difficulty": None}) == uniform.data


def test_a_run_with_other_keys_is_another_run() -> None:
    """The benchmark reads runs that it finds in the folder, so runs with other keys must have other names."""
    (plan, _), sets = plans([3], [4], []), (["learner.lr=8e-4"], ["learner.lr=1e-3"], [])
    names = [name_of(argparse.Namespace(set=words), plan) for words in sets]
    assert names[0] == "uniform-staleness4-seed3-lr8e-4" and len(set(names)) == 3
