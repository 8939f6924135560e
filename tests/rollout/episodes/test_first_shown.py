"""What the log of a server shows first: a prompt as the model reads it, and an answer with its reward."""

import logging

import pytest

from buffer.wire.protocol import WorkItem
from configs.load import load
from examples.countdown.make_model import make_tokenizer
from rollout.episodes.episode import Episodes
from rollout.episodes.first_shown import MOST_CHARS, FirstShown, shortened
from rollout.episodes.prompts import Prompts
from rollout.episodes.sampler import Sampler
from rollout.tasks.trajectory import single_turn
from tests.harness.fakes import FakeEngine, FakeRewards

NEEDED = ["--model.path=m", "--data.train=d.jsonl", "--reward.function=countdown", "--sampling.stop=[]"]


def made(*options: str) -> Episodes:
    prompts = Prompts(make_tokenizer(), load([*NEEDED, *options]))
    answer = prompts.tokenizer.encode("<answer>4+2</answer><|endoftext|>", add_special_tokens=False)
    sampler = Sampler(FakeEngine(lambda prompt: answer), prompts, 1.0, 64, 500)
    return Episodes(prompts, single_turn, sampler, FakeRewards(), 2, first=FirstShown(prompts))


def item(**row: object) -> WorkItem:
    return WorkItem(item=1, lease=1, version=0, problem={"answer": "6", **row})


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "rollout.episodes.first_shown"]


async def test_the_first_prompt_and_answer_are_shown_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    episodes = made("--data.system_prompt=Count.")
    for problem in ("4 2", "3 3"):
        await episodes.run(item(problem=problem))
    prompt, answer = shown(caplog)
    tokens = len(episodes.prompts.tokens({"problem": "4 2"}))
    assert prompt.startswith(
        f"the first prompt: {tokens} tokens; an answer ends at <|endoftext|>; ground truth: '6'\nCount.4 2\n"
    )
    assert prompt.endswith("\n(end of the first prompt)")
    assert answer.startswith("the first answer: ") and "finish stop; reward 0, formed 1\n<answer>4+2</answer>" in answer
    assert "<|endoftext|>" in answer


async def test_a_row_without_truth_and_a_long_prompt(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    episodes = made("--data.chat_template=none", "--data.max_prompt_tokens=5000")
    episodes.first.prompt(episodes.sampler.problem({"problem": "4 " * 2000}))
    (message,) = shown(caplog)
    assert "ground truth: none\n" in message and "characters ...]" in message and len(message) < MOST_CHARS + 200


def test_the_middle_is_left_out():
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 4) == "ab\n[... 3 characters ...]\nfg"
