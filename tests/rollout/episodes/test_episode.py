"""Episodes: groups, failures, revoked leases, and what a sample holds."""

import asyncio

import numpy as np
import pytest

from buffer.wire.protocol import WorkItem
from buffer.wire.sample import Sample
from rollout.episodes.episode import (
    Completion,
    EpisodeError,
    Episodes,
    Failure,
    Generate,
    Group,
    Problem,
    Trajectory,
    first_error,
    sampler,
)
from rollout.tasks import single_turn
from tests.harness.fakes import FakeEngine, FakePrompts, FakeRewards

STOP = ord(".")


def item(problem: str = "1+1=", answer: str = "2.") -> WorkItem:
    return WorkItem(item=7, lease=70, version=3, problem={"problem": problem, "answer": answer})


def episodes(engine: FakeEngine, task=single_turn, samples: int = 3) -> Episodes:
    return Episodes(FakePrompts(), task, sampler(engine, 8, 0.7, [STOP]), FakeRewards(), samples)


def answering(text: str) -> FakeEngine:
    return FakeEngine(lambda prompt: [ord(character) for character in text])


async def test_a_group_has_prompt_answer_masks_versions_and_rewards():
    engine = answering("2.")
    engine.version = 6
    outcome = await episodes(engine).run(item())
    assert isinstance(outcome, Group) and len(outcome.samples) == 3
    sample = Sample.unpack(outcome.samples[0].pack())
    assert sample.tokens.numpy().tolist() == [ord(character) for character in "1+1=2."]
    assert sample.sampled.numpy().tolist() == [0, 0, 0, 0, 1, 1]
    assert sample.versions.numpy().tolist() == [-1, -1, -1, -1, 6, 6]
    assert sample.behaviour_logprobs.numpy() == pytest.approx([0, 0, 0, 0, -0.5, -0.5])
    assert (sample.reward, sample.finish, sample.answer, sample.metrics) == (1.0, "stop", "2.", {"formed": 1.0})
    assert engine.temperatures == {0.7}


async def test_a_cut_answer_says_so():
    outcome = await episodes(answering("x" * 20)).run(item())
    assert isinstance(outcome, Group)
    assert outcome.samples[0].finish == "length" and outcome.samples[0].reward == 0.0


async def test_too_long_a_prompt_is_a_permanent_failure_with_numbers():
    assert await episodes(answering("2.")).run(item("9" * 21)) == Failure("prompt of 21 tokens", permanent=True)


async def test_a_reward_that_fails_fails_the_group_and_is_no_zero():
    outcome = await episodes(answering("crash")).run(item())
    assert isinstance(outcome, Failure) and not outcome.permanent
    assert outcome.reason.startswith("reward: fake took longer")


async def test_a_refused_prompt_is_a_permanent_failure():
    def refuse(prompt: list[int]) -> list[int]:
        raise ValueError("longer than max_model_len 4")

    outcome = await episodes(FakeEngine(refuse)).run(item())
    assert outcome == Failure("vLLM refuses 4 tokens: longer than max_model_len 4", permanent=True)


async def test_a_revoked_lease_aborts_its_generation_and_no_other():
    engine = answering("2.")
    engine.gate.clear()
    made = episodes(engine)
    revoked = asyncio.create_task(made.run(item()))
    kept = asyncio.create_task(made.run(item().model_copy(update={"lease": 71})))
    await asyncio.sleep(0.02)
    made.abandon([70, 99], "the buffer took the lease back")
    assert await asyncio.wait_for(revoked, 5) == Failure("the buffer took the lease back")
    await asyncio.sleep(0)
    assert engine.aborted == 3
    engine.gate.set()
    assert isinstance(await asyncio.wait_for(kept, 5), Group)
    made.abandon([70], "again")  # a lease that is closed: nothing happens


async def test_cancelling_an_episode_aborts_its_generation():
    engine = answering("2.")
    engine.gate.clear()
    running = asyncio.create_task(episodes(engine).run(item()))
    await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.01)
    assert engine.aborted == 3


async def test_a_task_of_several_turns_marks_what_the_policy_said():
    async def asks_twice(problem: Problem, generate: Generate) -> Trajectory:
        trajectory = Trajectory(problem.prompt)
        trajectory.take(await generate(trajectory.tokens))
        trajectory.give([ord("?")])
        trajectory.take(await generate(trajectory.tokens))
        trajectory.metrics["turns"] = 2.0
        return trajectory

    prompts: list[str] = []

    def answer(prompt: list[int]) -> list[int]:
        prompts.append("".join(map(chr, prompt)))
        return [ord("2"), STOP]

    outcome = await episodes(FakeEngine(answer), asks_twice, samples=2).run(item())
    assert isinstance(outcome, Group)
    sample = outcome.samples[0]
    assert sample.answer == "2.?2." and sample.metrics == {"turns": 2.0, "formed": 1.0}
    assert sample.sampled.numpy().tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 1]
    assert np.flatnonzero(sample.versions.numpy() == -1).tolist() == [0, 1, 2, 3, 6]
    assert prompts.count("1+1=2.?") == 2


async def test_a_task_may_give_up():
    async def gives_up(problem: Problem, generate: Generate) -> Trajectory:
        raise EpisodeError("the tool server does not answer")

    outcome = await episodes(answering("2."), gives_up).run(item())
    assert outcome == Failure("the tool server does not answer", permanent=False)


async def test_what_is_not_foreseen_is_raised():
    async def broken(problem: Problem, generate: Generate) -> Trajectory:
        raise KeyError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        await episodes(answering("2."), broken).run(item())
    assert isinstance(first_error(caught.value), KeyError)


async def test_outcomes_go_where_they_belong():
    class Desk:
        def __init__(self) -> None:
            self.told: list[object] = []

        async def put(self, item: WorkItem, samples: list[Sample]) -> None:
            self.told.append((item.item, samples))

        async def fail(self, item: WorkItem, reason: str, permanent: bool = False) -> None:
            self.told.append((item.item, reason, permanent))

        async def ask(self, room: int) -> None:
            return None

    desk = Desk()
    await Group([]).deliver(desk, item())
    await Failure("why", permanent=True).deliver(desk, item())
    assert desk.told == [(7, []), (7, "why", True)]


def test_completion_and_trajectory_keep_their_lengths_equal():
    trajectory = Trajectory([1, 2])
    trajectory.take(Completion([3], [-0.1], [5], "length"))
    trajectory.give([4, 4])
    lengths = {len(trajectory.tokens), len(trajectory.sampled), len(trajectory.logprobs), len(trajectory.versions)}
    assert lengths == {5} and trajectory.finish == "length" and trajectory.start == 2
