"""Async functions and several functions in the pool: many at once, each failure its own, nobody's reward 0."""

import asyncio
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from configs.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards.convention import Answer, Score
from rollout.rewards.workers import RewardPool
from tests.harness.lanes import long_but

USER = """
    import asyncio, os, sys, time

    running = most = 0

    async def score(solution_str, ground_truth, row, delay=0.2):
        global running, most
        running += 1
        most = max(most, running)
        try:
            what, _, number = solution_str.partition(" ")
            await asyncio.sleep(60 if what == "wait" else float(number or delay))
            if what == "block":
                time.sleep(60)
            if what == "raise":
                raise KeyError(row["problem"])
            if what == "exit":
                sys.exit(3)
            if what == "quit":
                os._exit(3)
            return {"score": 1.0, "most": most, "pid": os.getpid()}
        finally:
            running -= 1

    async def whole(reward_inputs):
        await asyncio.sleep(0.01)
        return [one["response_length"] for one in reward_inputs]

    class Judge:
        async def __call__(self, solution_str):
            await asyncio.sleep(0.01)
            return 0.5

    judge = Judge()

    def plain(solution_strs):
        return [{"score": 2.0, "solved": 1.0} for _ in solution_strs]

    def fails(solution_str):
        raise KeyError("part")

    def starts_a_loop(solution_str):
        async def inner():
            return 3.0
        return asyncio.run(inner())
"""
ROW = {"problem": "the row", "answer": "42"}


def answers(*texts: str) -> list[Answer]:
    return [Answer(text, 7, ROW) for text in texts]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(textwrap.dedent(USER))
    return tmp_path / "user.py"


async def test_one_worker_runs_many_async_calls_up_to_the_bound(file: Path):
    async with RewardPool(RewardConfig(function=f"{file}:score", concurrency=10)) as pool:
        began = time.monotonic()
        groups = await asyncio.gather(*(pool.score(answers(*["fine 0.5"] * 10)) for _ in range(4)))
        took_s = time.monotonic() - began
        scores = [score for group in groups for score in group]
        assert {score.reward for score in scores} == {1.0} and len(scores) == 40
        assert len({score.metrics["pid"] for score in scores}) == 1
        assert max(score.metrics["most"] for score in scores) == 10
        assert 2.0 <= took_s < 20  # four rounds of ten; one after another they would take 20 s


async def test_sync_functions_of_the_same_pool_run_one_at_a_time_outside_of_a_loop(file: Path):
    async with RewardPool(RewardConfig(function=f"{file}:starts_a_loop")) as pool:
        assert await pool.score(answers("a", "b")) == [Score(3.0)] * 2


@pytest.mark.parametrize(("name", "expected"), [("whole", 7.0), ("judge", 0.5)])
async def test_groups_and_objects_with_an_async_call(file: Path, name: str, expected: float):
    async with RewardPool(RewardConfig(function=f"{file}:{name}")) as pool:
        assert [score.reward for score in await pool.score(answers("a", "b", "c"))] == [expected] * 3


async def test_each_failure_is_its_own(file: Path):
    """A call that raises, exits or waits too long fails alone, and its worker goes on."""
    async with RewardPool(RewardConfig(function=f"{file}:score", timeout_s=3.0)) as pool:
        cases = {
            "raise": r"raised KeyError: 'the row'",
            "exit": r"called sys.exit\(3\)",
            "wait": r"took longer than reward.timeout_s \(3 s\)$",
        }
        fine = asyncio.create_task(pool.score(answers("fine 1")))
        failed = await asyncio.gather(*(pool.score(answers(what)) for what in cases), return_exceptions=True)
        for error, words in zip(failed, cases.values(), strict=True):
            assert isinstance(error, RewardError) and not error.returned
            with pytest.raises(RewardError, match=words):
                raise error
        before = (await fine)[0].metrics["pid"]
        assert (await pool.score(answers("fine")))[0].metrics["pid"] == before


@pytest.mark.parametrize(
    ("what", "words"),
    long_but(
        [
            ("block", r"reward.timeout_s \(2 s\); its process was killed"),
            ("quit", r"ended its process \(exit code 3\)"),
        ],
        1,
    ),
)
async def test_a_call_that_ends_its_worker_fails_and_those_beside_it_are_returned(file: Path, what: str, words: str):
    """A blocked loop is found by the warden; the reason of a group is the culprit's, never a bystander's."""
    async with RewardPool(RewardConfig(function=f"{file}:score", timeout_s=2.0)) as pool:
        beside = [asyncio.create_task(pool.score(answers("fine 1.5"))) for _ in range(3)]
        with pytest.raises(RewardError, match=words) as caught:
            await asyncio.wait_for(pool.score(answers("fine 1.5", f"{what} 0.5", "fine 1.5")), 60)
        assert not caught.value.returned
        outcomes = await asyncio.gather(*beside, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, RewardError) and outcome.returned
            assert "another call ended the worker that both shared" in str(outcome)
        assert (await asyncio.wait_for(pool.score(answers("fine")), 60))[0].reward == 1.0


async def test_a_cancelled_call_makes_room(file: Path):
    async with RewardPool(RewardConfig(function=f"{file}:score", concurrency=1, timeout_s=600)) as pool:
        waiting = asyncio.create_task(pool.score(answers("wait")))
        await asyncio.sleep(0.5)
        waiting.cancel()
        assert (await asyncio.wait_for(pool.score(answers("fine")), 120))[0].reward == 1.0


async def test_a_worker_is_replaced_after_its_calls(file: Path):
    async with RewardPool(RewardConfig(function=f"{file}:score", max_calls=4, concurrency=8)) as pool:
        scores = await asyncio.wait_for(pool.score(answers(*["fine"] * 8)), 60)
        assert sorted(Counter(score.metrics["pid"] for score in scores).values()) == [4, 4]


async def test_several_functions_are_added_with_their_weights(file: Path, tmp_path: Path):
    """Sync, async, batched and built-in ones together; each is a metric."""
    parts = [
        {"function": f"{file}:score", "weight": 0.5, "name": "slow"},
        {"function": f"{file}:plain"},
        {"function": f"{file}:whole", "weight": -1},
        {"function": "exact_match", "weight": 10, "kwargs": {"score": 3.0}},
        {"function": "length", "weight": 0, "kwargs": {"free": 0, "cap": 14}},
    ]
    async with RewardPool(RewardConfig(function=parts), tmp_path / "server") as pool:
        (score,) = await pool.score(answers("42"))
        pid = score.metrics.pop("slow/pid")
        assert pid > 0 and score == Score(
            0.5 + 2.0 - 7.0 + 30.0,
            {
                "slow": 1.0,
                "slow/most": 1.0,
                "plain": 2.0,
                "plain/solved": 1.0,
                "whole": 7.0,
                "exact_match": 3.0,
                "exact_match/solved": 1.0,
                "exact_match/formed": 1.0,
                "exact_match/gave_up": 0.0,
                "length": -0.5,
            },
        )


async def test_one_part_that_fails_fails_the_group(file: Path):
    parts = [{"function": f"{file}:plain"}, {"function": f"{file}:fails"}]
    async with RewardPool(RewardConfig(function=parts)) as pool:
        with pytest.raises(RewardError, match=r"user.py:fails raised KeyError: 'part'") as caught:
            await pool.score(answers("a", "b"))
        assert not caught.value.returned and caught.value.origin == "KeyError"


async def test_a_part_that_cannot_be_loaded_is_refused(file: Path):
    parts = [{"function": f"{file}:plain"}, {"function": "length", "kwargs": {"free": 1}}]
    with pytest.raises(ValueError, match=r"reward.function\.1 length: it needs cap; add reward.function\.1.kwargs"):
        async with RewardPool(RewardConfig(function=parts)):
            pass
