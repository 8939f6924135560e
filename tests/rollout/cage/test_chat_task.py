"""A user's function of (row, chat): its messages travel, its tokens are recorded in the server."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from rollout.cage.user_task import UserTask
from rollout.chat.session import ChatLimits, Sessions, TextParser
from rollout.chat.template import ChatTemplate
from rollout.episodes.episode import Episodes, Failure, Group
from rollout.episodes.prompts import Prompts
from rollout.episodes.sampler import Sampler
from rollout.episodes.setup import RolloutSetup
from rollout.errors import EngineError
from tests.harness.calculator import CalculatingEngine, calculator_config
from tests.harness.fakes import FakeEngine, FakeRewards
from tests.harness.lanes import long_but
from tests.rollout.chat.chat_templates import chat_tokenizer

RUN = Path(__file__).parents[3] / "examples/countdown/quickstart.yaml"
ROW = {"problem": "1", "answer": "7"}
GUESS = """
async def guess(row, chat):
    messages = [{"role": "user", "content": row["problem"]}]
    for turn in range(5):
        reply = await chat(messages)
        if row["answer"] in reply["content"]:
            return {"score": 1.0, "guesses": turn + 1.0}
        messages += [reply, {"role": "user", "content": "No. Try again."}]
    return {"score": 0.0, "guesses": 5.0}
"""


class Guesser:
    """A policy that says the number of its answers so far in the conversation, from five on."""

    def __init__(self) -> None:
        self.tokenizer = chat_tokenizer("chatml")
        self.engine = FakeEngine(self.answer)

    def answer(self, prompt: list[int]) -> list[int]:
        number = 5 + str(self.tokenizer.decode(prompt)).count("No.")
        return self.tokenizer.encode(f"{number}<|im_end|>", add_special_tokens=False)


async def play(
    source: str,
    folder: Path,
    own_score: bool = True,
    attempts: int = 1,
    turns: int = 9,
    policy: Guesser | None = None,
    limits: Sequence[str] = (),
) -> tuple[Group | Failure, FakeEngine, FakeRewards]:
    """Two samples of ROW by the function `guess` in `source`."""
    (folder / "mine.py").write_text(source)
    config = load([str(RUN), f"--rollout.task={folder}/mine.py:guess", "--rollout.task_workers=1", *limits])
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": 60})})
    policy, rewards = policy or Guesser(), FakeRewards()
    prompts = Prompts(policy.tokenizer, config)
    template = ChatTemplate(prompts)
    sessions = Sessions(template, TextParser(template), ChatLimits(300, 30, turns, 1000))
    async with UserTask(config, sessions) as task:
        sampler = Sampler(policy.engine, prompts, 1.0, 30, 300)  # type: ignore[arg-type]
        scorer: Any = None if own_score else rewards
        made = Episodes(prompts, task, sampler, scorer, 2, attempts)
        return await asyncio.wait_for(made.attempt(ROW), 120), policy.engine, rewards


async def test_the_function_s_score_is_the_reward_and_its_turns_one_segment(tmp_path: Path):
    outcome, engine, _ = await play(GUESS, tmp_path)
    assert isinstance(outcome, Group)
    sample = outcome.samples[0]
    assert (sample.reward, sample.finish) == (1.0, "stop")
    assert sample.metrics == {
        "guesses": 3.0, "turns": 3.0, "segments": 1.0, "bad_tool_calls": 0.0, "truncated": 0.0
    }  # fmt: skip
    assert sample.answer == "5\nuser\nNo. Try again.\nassistant\n6\nuser\nNo. Try again.\nassistant\n7"
    assert int(sample.sampled.numpy().sum()) == 6
    assert set(engine.salts) == {"v0"} and engine.asked_tokens == [30] * 6


async def test_another_reward_scores_it_and_the_function_s_numbers_are_metrics(tmp_path: Path):
    outcome, _, rewards = await play(GUESS, tmp_path, own_score=False)
    assert isinstance(outcome, Group)
    metrics = outcome.samples[0].metrics
    assert outcome.samples[0].reward == 0.0 and metrics["task_score"] == 1.0 and metrics["formed"] == 1.0
    assert rewards.answers[0].turns is not None
    assert [turn["sampled"] for turn in rewards.answers[0].turns] == [True, False, True, False, True]


async def test_a_limit_ends_a_function_that_does_not_catch_it_with_nothing(tmp_path: Path):
    outcome, _, _ = await play(GUESS, tmp_path, turns=2)
    assert isinstance(outcome, Group)
    assert (outcome.samples[0].reward, outcome.samples[0].finish) == (0.0, "length")
    assert outcome.samples[0].metrics["truncated"] == 1.0


CATCHES = """
from rollout.tasks import ChatRefused

async def guess(row, chat):
    messages, said = [{"role": "user", "content": row["problem"]}], []
    try:
        while True:
            reply = await chat(messages, max_tokens=20)
            messages += [reply, {"role": "user", "content": "No. Try again."}]
    except ChatRefused as error:
        assert error.code == "turns_exceeded" and "rollout.chat.max_turns" in str(error)
        return 0.25
"""


async def test_a_function_cannot_go_on_for_ever_with_calls_that_are_refused(tmp_path: Path):
    stubborn = """
async def guess(row, chat):
    await chat([{"role": "user", "content": "1"}])
    while True:
        try:
            await chat("hello")
        except Exception:
            pass
"""
    outcome, _, _ = await play(stubborn, tmp_path, limits=["--rollout.task_timeout_s=1"])
    assert isinstance(outcome, Failure) and "took longer than rollout.task_timeout_s (1 s)" in outcome.reason


async def test_a_function_may_catch_a_limit(tmp_path: Path):
    outcome, _, _ = await play(CATCHES, tmp_path, turns=2)
    assert isinstance(outcome, Group)
    assert (outcome.samples[0].reward, outcome.samples[0].finish) == (0.25, "length")


async def test_wrong_messages_and_missing_scores_fail_the_group_in_words(tmp_path: Path):
    wrong = 'async def guess(row, chat):\n    await chat([{"role": "user", "content": 7}])\n'
    outcome, _, _ = await play(wrong, tmp_path)
    assert isinstance(outcome, Failure)
    assert outcome.reason.endswith(
        "mine.py:guess: chat: messages[0].content: a text is needed, or a list of parts with type text"
    )
    silent = 'async def guess(row, chat):\n    await chat([{"role": "user", "content": "1"}])\n'
    outcome, _, _ = await play(silent, tmp_path)
    assert isinstance(outcome, Failure)
    assert outcome.reason.startswith("rollout.task gave no score, and reward.function is task")
    outcome, _, _ = await play(silent, tmp_path, own_score=False)
    assert isinstance(outcome, Group) and "task_score" not in outcome.samples[0].metrics
    nothing = "async def guess(row, chat):\n    return 1.0\n"
    outcome, _, _ = await play(nothing, tmp_path)
    assert isinstance(outcome, Failure) and "without an answer of the model" in outcome.reason
    long = 'async def guess(row, chat):\n    await chat([{"role": "user", "content": "9" * 400}])\n'
    outcome, _, _ = await play(long, tmp_path)
    assert isinstance(outcome, Failure)
    assert "without an answer of the model: this prompt of 418 tokens leaves no room: a call has 300" in outcome.reason
    nan = GUESS.replace("1.0", 'float("nan")')
    outcome, _, _ = await play(nan, tmp_path)
    assert isinstance(outcome, Failure) and "the task scored an episode nan" in outcome.reason


async def test_a_sample_whose_worker_dies_begins_again(tmp_path: Path):
    """The first episode of all ends the worker, and with it the other; both are played again from the beginning."""
    mark = tmp_path / "died"
    ends = f"""
        import os, pathlib
        mark = pathlib.Path("{mark}")
        if turn == 1 and not mark.exists():
            mark.touch()
            os._exit(3)
"""
    dies = GUESS.replace("        if row", f"{ends}        if row")
    outcome, _, _ = await play(dies, tmp_path, attempts=2)
    assert isinstance(outcome, Group)
    assert [sample.metrics["turns"] for sample in outcome.samples] == [3.0, 3.0]
    mark.unlink()
    outcome, _, _ = await play(dies, tmp_path, attempts=1)
    assert isinstance(outcome, Failure) and "exit code 3" in outcome.reason


async def test_an_engine_s_error_is_no_score_whatever_the_function_makes_of_it(tmp_path: Path):
    policy, calls = Guesser(), list[int]()

    def fail(prompt: list[int]) -> list[int]:
        calls.append(1)
        if len(calls) <= 2:
            raise EngineError("vLLM failed on 3 tokens")
        return Guesser.answer(policy, prompt)

    policy.engine.answer = fail
    swallows = """
async def guess(row, chat):
    try:
        return await _guess(row, chat)
    except Exception:
        return 0.5
"""
    source = GUESS.replace("def guess", "def _guess") + swallows
    outcome, _, _ = await play(source, tmp_path, attempts=1, policy=policy)
    assert isinstance(outcome, Failure) and outcome.kind == "engine" and "vLLM failed" in outcome.reason
    calls.clear()
    outcome, _, _ = await play(source, tmp_path, attempts=2, policy=policy)
    assert isinstance(outcome, Group) and [sample.reward for sample in outcome.samples] == [1.0, 1.0]


BY_URL = """
import json, urllib.request

def guess(row, base_url, api_key):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": row["problem"]}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)).read()
    return 1.0
"""
BY_CHAT = """
async def guess(row, chat):
    await chat([{"role": "user", "content": row["problem"]}])
    return 1.0
"""


@pytest.mark.parametrize(
    ("answer", "source"),
    long_but([(answer, source) for source in (BY_CHAT, BY_URL) for answer in (9, 150, None)], 0, 4),
)
async def test_an_evaluation_set_has_answers_and_a_context_of_its_own_length(
    source: str, answer: int | None, tmp_path: Path
):
    (tmp_path / "mine.py").write_text(source)
    config = calculator_config(tmp_path, f"{tmp_path}/mine.py:guess", "--rollout.max_sample_tokens=124")
    engine, setup = CalculatingEngine(), RolloutSetup.load(config, "rollout-0")
    episodes = setup.episodes(config, engine, 1.0, samples=1, max_tokens=answer)  # type: ignore[arg-type]
    async with setup:
        assert isinstance(await episodes.attempt(ROW), Group)
    assert engine.asked_tokens == [answer or 24]
