"""Episodes: groups, failures, revoked leases, and what a sample holds."""

import asyncio
import logging

import numpy as np
import pytest

from buffer.wire.protocol import WorkItem
from buffer.wire.sample import Sample, sample_stats
from rollout.episodes.episode import Episodes, Failure, Group
from rollout.episodes.failure_log import FailureLog
from rollout.errors import EngineDead, EpisodeError, PromptError, RewardError, first_error
from rollout.tasks import Completion, Generate, Problem, Recorded, Trajectory
from rollout.tasks.trajectory import single_turn
from tests.harness.fakes import FakeBuffer, FakeEngine, FakePrompts, FakeRewards, fake_sampler, until

STOP = ord(".")


def item(problem: str = "1+1=", answer: str = "2.") -> WorkItem:
    return WorkItem(item=7, lease=70, version=3, problem={"problem": problem, "answer": answer})


def episodes(engine: FakeEngine, task=single_turn, samples: int = 3) -> Episodes:
    return Episodes(FakePrompts(), task, fake_sampler(engine, temperature=0.7), FakeRewards(), samples)


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


async def test_a_token_that_the_task_declares_given_keeps_no_log_probability():
    async def masked(problem: Problem, generate: Generate) -> Trajectory:
        trajectory = Trajectory(problem.prompt)
        trajectory.take(await generate(problem.prompt))
        trajectory.sampled[-2], trajectory.versions[-2] = 0, -1
        return trajectory

    outcome = await episodes(answering("2.")).run(item())
    assert isinstance(outcome, Group)
    outcome = await episodes(answering("2."), masked).run(item())
    assert isinstance(outcome, Group)
    stats = sample_stats(outcome.samples[0].pack())
    assert stats.sampled == 1 and outcome.samples[0].behaviour_logprobs.numpy().tolist() == [0, 0, 0, 0, 0, -0.5]


async def test_too_long_a_prompt_is_a_permanent_failure_with_numbers():
    assert await episodes(answering("2.")).run(item("9" * 21)) == Failure(
        "prompt of 21 tokens", "prompt", permanent=True
    )


async def test_a_reward_that_fails_fails_the_group_and_is_no_zero():
    outcome = await episodes(answering("crash")).run(item())
    assert isinstance(outcome, Failure) and not outcome.permanent
    assert outcome.kind == "reward" and outcome.reason.startswith("fake took longer")


async def test_a_sample_that_no_call_of_generate_made_is_an_error_of_the_task_where_routes_are_replayed():
    async def remembered(problem: Problem, generate: Generate) -> Trajectory:
        trajectory = Trajectory(problem.prompt)
        trajectory.take(Completion([ord("2"), STOP], [-0.5, -0.5], [3, 3], "stop"))
        return trajectory

    engine = answering("2.")
    assert isinstance(await episodes(engine, remembered).run(item()), Group)
    engine.routes = True
    outcome = await episodes(engine, remembered).run(item())
    assert isinstance(outcome, Failure) and outcome.kind == "task"
    assert outcome.reason.startswith("the task never called generate; with rollout.routing_replay")


async def test_a_refused_prompt_is_a_permanent_failure():
    def refuse(prompt: list[int]) -> list[int]:
        raise EpisodeError("vLLM refuses 4 tokens", permanent=True)

    assert await episodes(FakeEngine(refuse)).run(item()) == Failure("vLLM refuses 4 tokens", "task", permanent=True)


async def test_a_revoked_lease_aborts_its_generation_and_no_other():
    engine = answering("2.")
    engine.gate.clear()
    made = episodes(engine)
    revoked = asyncio.create_task(made.run(item()))
    kept = asyncio.create_task(made.run(item().model_copy(update={"lease": 71})))
    await until(lambda: engine.running == 6)
    made.abandon([70, 99], Failure("the buffer took the lease back"))
    assert await asyncio.wait_for(revoked, 120) == Failure("the buffer took the lease back")
    await until(lambda: engine.aborted == 3)
    assert engine.aborted == 3
    engine.gate.set()
    assert isinstance(await asyncio.wait_for(kept, 120), Group)
    made.abandon([70], Failure("again"))  # nothing happens to a lease that is closed


async def test_cancelling_an_episode_aborts_its_generation():
    engine = answering("2.")
    engine.gate.clear()
    running = asyncio.create_task(episodes(engine).run(item()))
    await until(lambda: engine.running == 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: engine.aborted == 3)
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

    made = episodes(FakeEngine(answer), asks_twice, samples=2)
    outcome = await made.run(item())
    assert isinstance(outcome, Group)
    sample = outcome.samples[0]
    assert sample.answer == "2.?2." and sample.metrics == {"turns": 2.0, "formed": 1.0}
    assert sample.sampled.numpy().tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 1]
    assert np.flatnonzero(sample.versions.numpy() == -1).tolist() == [0, 1, 2, 3, 6]
    assert prompts.count("1+1=2.?") == 2
    (scored,) = {str(answer.turns) for answer in made.rewards.answers}
    said, asked = {"text": "2.", "sampled": True}, {"text": "?", "sampled": False}
    assert scored == str([said, asked, said])


async def test_a_task_may_give_up():
    async def gives_up(problem: Problem, generate: Generate) -> Trajectory:
        raise EpisodeError("the tool server does not answer")

    outcome = await episodes(answering("2."), gives_up).run(item())
    assert outcome == Failure("the tool server does not answer", "task", permanent=False)


async def test_whatever_a_task_raises_fails_the_attempt_and_not_the_server():
    async def broken(problem: Problem, generate: Generate) -> Trajectory:
        raise KeyError("a bug\nin two lines")

    async def parallel(problem: Problem, generate: Generate) -> Trajectory:
        async with asyncio.TaskGroup() as turns:
            turns.create_task(broken(problem, generate))
        raise AssertionError

    async def forgetful(problem: Problem, generate: Generate) -> None:
        await generate(problem.prompt)

    for task in (broken, parallel):
        failure = Failure("the task raised KeyError: 'a bug\\nin two lines'", "task")
        assert await episodes(answering("2."), task).run(item()) == failure
    outcome = await episodes(answering("2."), forgetful).run(item())
    assert outcome == Failure("the task returned NoneType; a Trajectory is needed", "task")


async def test_a_dead_engine_is_raised_through_a_task():
    def die(prompt: list[int]) -> list[int]:
        raise EngineDead("vLLM died")

    with pytest.raises(ExceptionGroup) as caught:
        await episodes(FakeEngine(die)).run(item())
    assert isinstance(first_error(caught.value), EngineDead)


async def test_groups_are_put_and_failures_reported():
    buffer = FakeBuffer()
    await Group([]).deliver(buffer, item())
    await Failure("why", "engine", permanent=True).deliver(buffer, item())
    assert buffer.put_groups == {7: []} and buffer.failures == {7: ("engine", "why", True)}
    assert buffer.returned == set()
    await Failure("nobody tried", returned=True).deliver(buffer, item())
    assert buffer.failures == {7: ("infrastructure", "nobody tried", False)} and buffer.returned == {7}


async def test_a_reason_is_one_bounded_line():
    async def verbose(problem: Problem, generate: Generate) -> Trajectory:
        raise EpisodeError("so\n  much " * 1000)

    outcome = await episodes(answering("2."), verbose).run(item())
    assert isinstance(outcome, Failure)
    assert outcome.reason.startswith("so much so much") and len(outcome.reason) == 300


def failed(log: FailureLog, error: EpisodeError) -> None:
    try:
        raise error
    except EpisodeError as raised:
        log.record(raised, str(raised))


def test_the_first_failure_of_a_kind_and_type_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture):
    log = FailureLog()
    for _ in range(5):
        failed(log, RewardError("mine raised KeyError: 'x'", origin="KeyError"))
    failed(log, RewardError("mine raised TypeError: 'x'", origin="TypeError"))
    failed(log, EpisodeError("the task gave up"))
    lines = [(record.levelno, record.message, record.exc_info is not None) for record in caplog.records]
    assert lines == [
        (logging.WARNING, "an attempt failed, kind reward: mine raised KeyError: 'x'", True),
        (logging.WARNING, "an attempt failed, kind reward: mine raised TypeError: 'x'", True),
        (logging.WARNING, "an attempt failed, kind task: the task gave up", True),
    ]
    assert "in failed" in caplog.text


def test_later_failures_are_counted_and_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture):
    log = FailureLog(repeat_s=600.0)
    for _ in range(4):
        failed(log, RewardError("no reward"))
        failed(log, EpisodeError("gave up"))
    log.repeat_s = 0.0  # as if that time had passed
    failed(log, RewardError("still no reward"))
    log.repeat_s = 600.0
    for _ in range(2):
        failed(log, RewardError("still no reward"))
    assert [record.message for record in caplog.records[2:]] == [
        "4 more attempts failed, kind reward; the last: still no reward"
    ]


def test_completion_and_trajectory_keep_their_lengths_equal():
    trajectory = Trajectory([1, 2])
    trajectory.take(Completion([3], [-0.1], [5], "length"))
    trajectory.give([4, 4])
    lengths = {len(trajectory.tokens), len(trajectory.sampled), len(trajectory.logprobs), len(trajectory.versions)}
    assert lengths == {5} and trajectory.finish == "length" and trajectory.start == 2


async def test_a_failed_sample_is_tried_again_from_its_beginning():
    seen: list[Trajectory] = []

    async def fails_first(problem: Problem, generate: Generate) -> Trajectory:
        trajectory = Trajectory(problem.prompt)
        seen.append(trajectory)
        trajectory.take(await generate(trajectory.tokens))
        if trajectory is seen[0]:
            raise KeyError("the tool server is gone")
        return trajectory

    made = Episodes(FakePrompts(), fails_first, fake_sampler(answering("2.")), FakeRewards(), 3, sample_attempts=2)
    outcome = await made.run(item())
    assert isinstance(outcome, Group) and len(outcome.samples) == 3 and len(seen) == 4


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (EpisodeError("gone"), 2),
        (EpisodeError("no row", permanent=True), 1),
        (PromptError("no prompt"), 1),
    ],
)
async def test_a_sample_is_tried_as_often_as_the_run_says_unless_nothing_can_help(error: Exception, calls: int):
    begun: list[int] = []

    async def fails(problem: Problem, generate: Generate) -> Trajectory:
        begun.append(1)
        raise error

    made = Episodes(FakePrompts(), fails, fake_sampler(answering("2.")), FakeRewards(), 1, sample_attempts=2)
    outcome = await made.run(item())
    assert isinstance(outcome, Failure) and outcome.reason == str(error) and len(begun) == calls


async def test_a_dead_engine_ends_the_server_at_the_first_try():
    def die(prompt: list[int]) -> list[int]:
        raise EngineDead("vLLM died")

    made = Episodes(FakePrompts(), single_turn, fake_sampler(FakeEngine(die)), FakeRewards(), 1, sample_attempts=9)
    with pytest.raises(ExceptionGroup):
        await made.run(item())


async def test_all_turns_of_a_group_use_what_was_cached_at_its_beginning():
    engine = answering("2.")

    async def asks_twice(problem: Problem, generate: Generate) -> Trajectory:
        trajectory = Trajectory(problem.prompt)
        trajectory.take(await generate(trajectory.tokens))
        engine.version += 1
        trajectory.take(await generate(trajectory.tokens))
        return trajectory

    made = episodes(engine, asks_twice, samples=2)
    assert isinstance(await made.run(item()), Group) and isinstance(await made.run(item()), Group)
    assert engine.salts == ["v0"] * 4 + ["v2"] * 4
    assert sorted({int(v) for v in (await made.run(item())).samples[0].versions.numpy()}) == [-1, 4, 5]


async def test_a_task_of_tokens_may_score_its_trajectory_itself():
    async def scores(problem: Problem, generate: Generate) -> Trajectory:
        trajectory = await single_turn(problem, generate)
        trajectory.score = {"score": 0.5, "length": 2}
        return trajectory

    made = Episodes(FakePrompts(), scores, fake_sampler(answering("2.")), None, 2)
    outcome = await made.run(item())
    assert isinstance(outcome, Group)
    assert (outcome.samples[0].reward, outcome.samples[0].metrics) == (0.5, {"length": 2.0})
    outcome = await episodes(answering("2."), scores).run(item())
    assert isinstance(outcome, Group)
    assert (outcome.samples[0].reward, outcome.samples[0].metrics["task_score"]) == (1.0, 0.5)


async def test_a_reward_is_told_once_what_several_segments_repeat():
    async def forks(problem: Problem, generate: Generate) -> Recorded:
        made = Trajectory(problem.prompt)
        made.take(await generate(made.tokens))
        made.starts.append(len(made.tokens))
        made.give([*problem.prompt, ord("2"), ord("!")])
        made.take(await generate(made.tokens[made.starts[1] :]))
        return Recorded(made, None)

    made = episodes(answering("2."), forks, samples=1)
    outcome = await made.run(item())
    assert isinstance(outcome, Group) and outcome.samples[0].answer == "2.2."
    assert made.rewards.answers[0].turns is None and made.rewards.answers[0].num_tokens == 4


async def test_a_reward_that_asks_gets_special_tokens_and_the_prompt():
    for asks, raw, prompt in ((["raw", "prompt"], "4|.", "2+2"), (["raw"], "4|.", None), ([], None, None)):
        engine = FakeEngine(lambda prompt: [ord(letter) for letter in "4|."])
        episodes = Episodes(FakePrompts(), single_turn, fake_sampler(engine), rewards := FakeRewards(asks), 1)
        await episodes.attempt({"problem": "2+2", "answer": "4."})
        (answer,) = rewards.answers
        assert (answer.text, answer.raw, answer.prompt) == ("4.", raw, prompt)
