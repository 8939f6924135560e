"""A session's limits, errors and ends."""

import asyncio
from typing import Any

import pytest

from rollout.chat.session import ChatLimits
from rollout.errors import ChatRefused, EngineDead, EngineError, EpisodeError
from rollout.tasks.trajectory import Recorded, Trajectory
from tests.rollout.chat.scripted import Scene, check_against_log, scene

HI = [{"role": "user", "content": "hi"}]


def answering(limits: ChatLimits | None = None, text: str = "ok") -> Scene:
    given = limits or ChatLimits(context=4000, answer=200, turns=100, tokens=100_000)
    return scene("chatml", lambda prompt: text, given)


async def more(made: Scene, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reply = await made.session.chat(messages)
    return [*messages, reply.message, {"role": "user", "content": "more"}]


async def refused(made: Scene, messages: list[dict[str, Any]], **options: Any) -> ChatRefused:
    with pytest.raises(ChatRefused) as caught:
        await made.session.chat(messages, **options)
    return caught.value


async def test_a_reply_says_how_it_ended_and_what_it_cost():
    made = answering()
    reply = await made.session.chat(HI)
    assert reply.message == {"role": "assistant", "content": "ok"} and reply.finish_reason == "stop"
    assert (reply.prompt_tokens, reply.completion_tokens) == (len(made.engine.log[0].prompt), 3)
    assert (await made.session.chat(HI, max_tokens=1)).finish_reason == "length"


async def test_turns_are_limited_and_what_was_said_is_scored():
    made = answering(ChatLimits(context=4000, answer=200, turns=2, tokens=100_000))
    messages = await more(made, await more(made, HI))
    error = await refused(made, messages)
    assert (error.code, str(error)) == ("turns_exceeded", "this episode has used its 2 turns (rollout.chat.max_turns)")
    recorded = made.session.recorded({"score": 0.5, "guesses": 2})
    assert recorded.score is not None and recorded.score.reward == 0.5
    assert recorded.trajectory.finish == "length"
    assert recorded.trajectory.metrics == {
        "guesses": 2.0, "turns": 2.0, "segments": 1.0, "bad_tool_calls": 0.0, "truncated": 1.0
    }  # fmt: skip


async def test_calls_that_give_no_answer_are_limited_too():
    made = answering(ChatLimits(context=4000, answer=200, turns=2, tokens=100_000))
    await made.session.chat(HI)
    made.engine.gate.clear()
    for begun in range(2, 5):  # given up in the midst of an answer
        asking = asyncio.create_task(made.session.chat(HI))
        while made.engine.begun < begun:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
    made.engine.gate.set()
    for _ in range(3):
        assert (await refused(made, [])).code == "invalid_request_error"
    assert not made.session.truncated
    await made.session.chat(HI)
    error = await refused(made, [])
    assert error.code == "turns_exceeded" and "8 calls (4 times rollout.chat.max_turns)" in str(error)
    assert made.session.recorded(None).trajectory.finish == "length"


async def test_an_answer_ends_where_the_context_does_and_then_nothing_more_is_said():
    made = answering(ChatLimits(context=60, answer=200, turns=9, tokens=1000), "th" * 300)
    messages = await more(made, HI)
    assert len(made.engine.log[0].prompt) + len(made.engine.log[0].tokens) == 60
    error = await refused(made, messages)
    assert error.code == "context_length_exceeded" and "rollout.max_sample_tokens" in str(error)
    assert made.session.recorded(None).trajectory.finish == "length"


async def test_the_tokens_of_all_segments_are_limited_whatever_runs_beside():
    made = answering(ChatLimits(context=100, answer=20, turns=99, tokens=250), "ab 12 " * 20)
    starts = [[{"role": "user", "content": f"{number}"}] for number in range(12)]
    outcomes = await asyncio.gather(*(made.session.chat(start) for start in starts), return_exceptions=True)
    codes = {outcome.code for outcome in outcomes if isinstance(outcome, ChatRefused)}
    assert codes == {"context_length_exceeded"}
    trajectory = made.session.recorded(None).trajectory
    assert 200 < len(trajectory.tokens) <= 250
    check_against_log(trajectory, made.engine.log, set(range(len(made.engine.log))))


async def test_branches_side_by_side_count_what_they_share_each():
    made = answering(ChatLimits(context=300, answer=20, turns=99, tokens=300), "ab 12 " * 20)
    messages = await more(made, HI)
    outcomes = await asyncio.gather(*(made.session.chat(messages) for _ in range(6)), return_exceptions=True)
    assert any(isinstance(outcome, ChatRefused) for outcome in outcomes)
    trajectory = made.session.recorded(None).trajectory
    assert 200 < len(trajectory.tokens) <= 300 and len(trajectory.starts) > 1


async def test_a_shared_beginning_counts_once_for_each_segment():
    made = answering(ChatLimits(context=100, answer=20, turns=99, tokens=1000))
    messages = await more(made, HI)
    await made.session.chat(messages)
    await made.session.chat([*messages[:-1], {"role": "user", "content": "else"}])
    trajectory = made.session.recorded(None).trajectory
    assert trajectory.metrics["segments"] == 2.0
    assert made.session._conversation.num_tokens() == len(trajectory.tokens)


async def test_time_ends_a_call_under_way_and_those_after_it():
    made = answering(ChatLimits(context=4000, answer=200, turns=9, tokens=10_000, timeout_s=2.0))
    messages = await more(made, HI)
    made.engine.gate.clear()
    error = await refused(made, messages)
    assert (error.code, str(error)) == ("time_exceeded", "this episode has used its 2 s (rollout.chat.timeout_s)")
    made.engine.gate.set()
    assert (await refused(made, HI)).code == "time_exceeded"
    trajectory = made.session.recorded(1.0).trajectory
    assert trajectory.finish == "length" and trajectory.metrics["turns"] == 1.0


async def test_a_closed_session_answers_nobody():
    made = answering()
    await made.session.chat(HI)
    made.engine.gate.clear()
    asking = asyncio.create_task(made.session.chat(HI))
    while made.engine.begun < 2:
        await asyncio.sleep(0)
    made.session.close()
    made.session.close()
    with pytest.raises(ChatRefused) as caught:
        await asking
    assert caught.value.code == "episode_ended"
    assert (await refused(made, HI)).code == "episode_ended"
    recorded = made.session.recorded(1)
    assert (recorded.trajectory.metrics["turns"], recorded.trajectory.finish) == (1.0, "stop")


@pytest.mark.parametrize("error", [EngineError("vLLM failed"), EngineDead("vLLM died")])
async def test_a_failure_of_the_infrastructure_is_no_score_whatever_the_agent_makes_of_it(error: Exception):
    made = answering()
    await made.session.chat(HI)

    def fail(prompt: str) -> str:
        raise error

    made.engine.script = fail
    with pytest.raises(type(error)):
        await made.session.chat(HI)
    assert made.session.error is error
    with pytest.raises(type(error)):
        await made.session.chat(HI)
    with pytest.raises(type(error)):
        made.session.recorded(0.0)


async def test_an_episode_without_an_answer_is_a_failure():
    with pytest.raises(EpisodeError, match="without an answer of the model; call chat at least once"):
        answering().session.recorded(1.0)


async def test_withdrawn_answers_are_context_at_most():
    made = answering()
    reply = await made.session.chat(HI)
    messages = [*HI, reply.message, {"role": "user", "content": "more"}]
    await made.session.chat(messages)
    made.session.withdraw(reply.turn)
    trajectory = made.session.recorded(1).trajectory
    check_against_log(trajectory, made.engine.log, {1})
    assert trajectory.metrics["turns"] == 1.0


async def test_a_retry_drops_one_answer_and_not_that_of_another_who_asked_the_same():
    made = answering()
    await asyncio.gather(*(made.session.chat(HI) for _ in range(3)))
    await made.session.chat(HI, repeated=True)
    assert made.session.recorded(1).trajectory.metrics["turns"] == 3.0
    made.engine.gate.clear()
    asking, begun = asyncio.create_task(made.session.chat(HI)), made.engine.begun
    while made.engine.begun == begun:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    made.engine.gate.set()
    await made.session.chat(HI, repeated=True)  # of the request that was cancelled, whose answer nobody has
    assert made.session.recorded(1).trajectory.metrics["turns"] == 4.0


LONE = "a \ud83d b"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": LONE}], "messages[0].content: character 2 is a lone surrogate"),
        ([{"role": "user", "content": [{"type": "text", "text": LONE}]}], "messages[0].content[0]: character 2 is"),
        ([{"role": LONE, "content": "hi"}], "surrogates not allowed"),
    ],
)
async def test_half_a_character_is_refused_before_anything_is_sampled(messages: Any, words: str):
    made = answering()
    error = await refused(made, messages)
    assert error.code == "invalid_request_error" and words in str(error)
    assert made.engine.begun == 0 and made.session.error is None
    str(error).encode()


async def test_tools_are_judged_before_anything_is_sampled():
    made = answering()
    assert "tools.0.function" in str(await refused(made, HI, tools=[{"type": "function"}]))
    assert made.engine.begun == 0


@pytest.mark.parametrize("max_tokens", [0, -1, 2.5, "7", True])
async def test_max_tokens_is_a_whole_number(max_tokens: Any):
    assert "max_tokens" in str(await refused(answering(), HI, max_tokens=max_tokens))


def trajectory_of_two_turns() -> Trajectory:
    made = Trajectory([1])
    made.tokens, made.sampled = [1, 2, 3, 1, 2], [0, 1, 1, 0, 1]
    return made


def test_results_become_scores():
    assert Recorded.of(trajectory_of_two_turns(), None).score is None
    for result in (2, {"score": 2.0}, {"overall": 2, "score": 9.0, "note": "text"}):
        score = Recorded.of(trajectory_of_two_turns(), result).score
        assert score is not None and score.reward == 2.0
    recorded = Recorded.of(trajectory_of_two_turns(), {"turn_rewards": [0.5, 1], "solved": True})
    assert recorded.score is not None and recorded.score.reward == 0.0
    assert recorded.trajectory.turn_rewards == [0.5, 1.0] and recorded.trajectory.metrics == {"solved": 1.0}


@pytest.mark.parametrize(
    "result",
    [float("nan"), {"score": float("inf")}, "1", [1], {"score": "x"}, {"turn_rewards": [1]}, {"turn_rewards": 3},
     {"turn_rewards": [1, float("nan")]}, {"score": 1, "turn_rewards": []}],
)  # fmt: skip
def test_results_that_are_no_scores_are_errors(result: Any):
    with pytest.raises(EpisodeError):
        Recorded.of(trajectory_of_two_turns(), result)
