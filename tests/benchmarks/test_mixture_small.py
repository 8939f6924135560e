"""The benchmark of difficulty with a real model: its problems, its runs, and when a run has reached its goal."""

import argparse
import random
from collections import Counter
from pathlib import Path

from benchmarks.mixture import (
    KINDS,
    MixturePlan,
    MixtureProgress,
    config_of,
    is_over,
    name_of,
    plans,
    problems,
    rows_of,
    texts,
    tokens_until,
)
from configs.schema import Config
from rollout.rewards.countdown import compute_score
from tests.harness.buffer_process import buffer, committed, in_loop, make_requests, rollout, sample


def test_problems_are_of_their_kind_and_the_student_is_shown_right_answers_to_trivial_ones() -> None:
    rows = problems()
    assert Counter(row["kind"] for row in rows) == KINDS and rows == problems()
    prompts = {row["prompt"][0]["content"]: row for row in rows}
    assert len(prompts) == len(rows)
    shown, scores = texts(rows, random.Random(1)), {kind: set[float]() for kind in KINDS}
    for prompt, answer in (next(shown) for _ in range(3000)):
        if (row := prompts.get(prompt)) is not None:  # the numbers of others are in another order
            scores[row["kind"]].add(compute_score(answer, row["reward_model"]["ground_truth"])["score"])
    assert scores == {"trivial": {1.0}, "fit": {0.1, 1.0}, "impossible": {0.1}}


def made(shares: dict[int, float], per_version: int, trained: int = 9) -> MixtureProgress:
    """A run that was evaluated so, and samples as many tokens for each version."""
    return MixtureProgress(trained, shares, {version: version * per_version for version in shares})


def test_a_run_has_reached_its_goal_with_the_tokens_of_the_versions_until_then() -> None:
    slow, fast, short = made({0: 0.2, 4: 0.69, 8: 0.7}, 100), made({0: 0.2, 4: 0.8, 8: 0.6}, 150), made({0: 0.5}, 1)
    assert (slow.goal, fast.goal, short.goal) == (8, 4, None)
    share = rows_of("0, seed 0", slow, fast)[-1]
    assert share.what == "share of the tokens" and share.value == 600 / 800
    bound = rows_of("0, seed 0", made({0: 0.2, 12: 0.6}, 100, trained=15), fast)[-1]
    assert bound.what == "share of the tokens, less than" and bound.value == 600 / 1200
    assert [row.what for row in rows_of("0, seed 0", slow, short)][-1] == "not 0.7 within versions"
    assert rows_of("0, seed 0", made({}, 1), fast) == []


def test_uniform_drawing_ends_without_the_goal_when_it_was_evaluated_after_too_many_tokens() -> None:
    """The tokens of the run by difficulty, 600, are .6 of 1,000."""
    fast, short = made({4: 0.7}, 150), made({4: 0.5}, 150)
    assert is_over(made({8: 0.6}, 125, trained=12), 100, fast)
    assert not is_over(made({8: 0.6}, 124, trained=12), 100, fast)
    assert is_over(made({4: 0.7}, 1), 100, fast) and is_over(fast, 100)
    assert not is_over(made({96: 0.6}, 1000), 100, short) and not is_over(short, 100)
    assert is_over(made({96: 0.6}, 1, trained=100), 100, short) and not is_over(made({}, 1, trained=0), 100, fast)


@in_loop
async def test_tokens_of_groups_without_variance_count_until_the_last_batch_of_a_version_is_formed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "buffer.sqlite"
    requests = make_requests(file, max_staleness=1, groups=1, skip_zero_variance=True)
    batches = requests.handlers.ledger.batches
    async with buffer(requests) as it, rollout(it.address) as samples:
        for number, rewards in enumerate([(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 1.0)]):
            (item,) = await samples.ask(1) or []
            await samples.put(item, [sample(reward, 2 * 10**number) for reward in rewards])
            if number % 2:
                assert batches.take(number // 2)
                batches.trained(number // 2)
                committed(requests)
    assert [tokens_until(tmp_path, version) for version in range(3)] == [0, 22, 2222]


def test_two_runs_of_a_pair_differ_in_their_draws_only(tmp_path: Path) -> None:
    args = argparse.Namespace(work=tmp_path, versions=10, set=["learner.lr=8e-4"])
    pair = plans([3], [4], [0, 1, 2])
    assert pair == [MixturePlan(3, 4, True, (0, 1)), MixturePlan(3, 4, False, (1, 2))]
    chosen, uniform = (Config.model_validate(config_of(args, plan)) for plan in pair)
    assert uniform.batch.max_staleness == 4 and uniform.learner.lr == 8e-4 and uniform.data.difficulty is None
    assert chosen.data.difficulty is not None and chosen.data.eval["fit"].samples == 2
    kept = {"run": uniform.run, "buffer": uniform.buffer, "data": uniform.data}
    assert chosen.model_copy(update=kept) == uniform
    assert chosen.data.model_copy(update={"difficulty": None}) == uniform.data


def test_a_run_with_other_keys_or_of_another_model_is_another_run(tmp_path: Path) -> None:
    """The benchmark reads runs that it finds in the folder, so runs with other keys must have other names."""
    (_, plan), sets = plans([3], [4], []), (["learner.lr=8e-4"], ["learner.lr=1e-3"], [])
    names = [name_of(argparse.Namespace(work=tmp_path, set=words), plan) for words in sets]
    assert names[0] == "uniform-staleness4-seed3-lr8e-4"
    record = tmp_path / "model-seed3" / "warm_start.json"
    record.parent.mkdir()
    for shown in ("one", "other"):
        record.write_text(shown)
        names.append(name_of(argparse.Namespace(work=tmp_path, set=[]), plan))
    assert len(set(names)) == 5
