"""The examples of docs/rewards.md, docs/tasks.md and docs/chat.md do what the pages say."""

import re
from pathlib import Path

import yaml

from buffer.wire.protocol import WorkItem
from configs.load import load
from configs.schema import Config, RewardConfig
from examples.countdown.make_model import make_tokenizer
from rollout.cage.user_task import UserTask
from rollout.episodes.episode import Episodes, Group
from rollout.episodes.prompts import Prompts
from rollout.episodes.sampler import Sampler
from rollout.episodes.setup import open_sessions
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer, Reward, Score, Turn
from rollout.tasks import load_task
from tests.harness.fakes import FakeEngine, FakeRewards
from tests.rollout.chat.chat_templates import chat_tokenizer

ROOT = Path(__file__).parents[2]
ROW = {"problem": "What is 17 x 23?", "answer": "391"}


def example(page: str, language: str) -> str:
    """The one block in `language` of a page."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def run_file(page: str, *overrides: str) -> Config:
    """The quickstart with the keys that the page shows."""
    keys = yaml.safe_load(example(page, "yaml"))
    given = [
        f"--{section}.{key}={yaml.dump(keys[section][key]).split(chr(10))[0]}"
        for section in keys
        for key in keys[section]
    ]
    return load([str(ROOT / "examples/countdown/quickstart.yaml"), *given, *overrides])


def reward(folder: Path) -> Reward:
    (folder / "score.py").write_text(example("rewards.md", "python"))
    return load_reward(RewardConfig(function=f"{folder}/score.py:score", kwargs=run_file("rewards.md").reward.kwargs))


def test_the_reward_counts_what_the_policy_wrote_and_takes_a_fee_for_calls(tmp_path: Path):
    right, wrong = "It is <answer>391</answer>", "It is <answer>390</answer>"
    tool: Turn = {"text": "<answer>391</answer>", "sampled": False}
    answers = [
        Answer(right, 9, ROW),
        Answer(wrong, 9, ROW),
        Answer(
            f"?{tool['text']}{right}", 19, ROW, [{"text": "?", "sampled": True}, tool, {"text": right, "sampled": True}]
        ),
        Answer(f"?{tool['text']}", 10, ROW, [{"text": "?", "sampled": True}, tool]),
    ]
    assert reward(tmp_path).score(answers) == [
        Score(1.0, {"solved": 1.0, "calls": 0.0}),
        Score(0.0, {"solved": 0.0, "calls": 0.0}),
        Score(0.95, {"solved": 1.0, "calls": 1.0}),
        Score(-0.05, {"solved": 0.0, "calls": 1.0}),
    ]


class ToolModel:
    """A policy that calls the tool, then answers with what it said; its tokenizer has the tags that Qwen's has."""

    def __init__(self, config: Config) -> None:
        self.tokenizer = make_tokenizer()
        self.tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
        self.prompts = Prompts(self.tokenizer, config)

    def answer(self, prompt: list[int]) -> list[int]:
        product = re.search(r"<tool_response>(\d+)", self.tokenizer.decode(prompt))
        text = f"<answer>{product[1]}</answer>" if product else "<tool_call>17 23</tool_call> and more"
        return self.tokenizer.encode(text, add_special_tokens=False)


def episodes(folder: Path, longest: int | None) -> tuple[Episodes, FakeRewards]:
    (folder / "tool.py").write_text(example("tasks.md", "python"))
    config, rewards = run_file("tasks.md"), FakeRewards()
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_prompt_tokens": 100})})
    model = ToolModel(config)
    longest = longest or config.rollout.max_sample_tokens or 0
    sampler = Sampler(FakeEngine(model.answer), model.prompts, 1.0, 64, longest)  # type: ignore[arg-type]
    return Episodes(model.prompts, load_task(f"{folder}/tool.py:play"), sampler, rewards, 2), rewards  # type: ignore[arg-type]


async def test_the_task_calls_its_tool_and_goes_on(tmp_path: Path):
    made, rewards = episodes(tmp_path, None)
    outcome = await made.run(WorkItem(item=1, lease=1, version=0, problem=ROW))
    assert isinstance(outcome, Group)
    assert outcome.samples[0].answer == (
        "<tool_call>17 23</tool_call><tool_response>391</tool_response><answer>391</answer>"
    )
    assert outcome.samples[0].metrics["called"] == 1.0 and outcome.samples[0].finish == "stop"
    assert [score.reward for score in reward(tmp_path).score(rewards.answers)] == [0.95, 0.95]


async def test_the_task_ends_where_no_room_is_left(tmp_path: Path):
    made, _ = episodes(tmp_path, 27)
    outcome = await made.run(WorkItem(item=1, lease=1, version=0, problem=ROW))
    assert isinstance(outcome, Group)
    assert outcome.samples[0].answer == "<tool_call>17 23</tool_call>" and outcome.samples[0].finish == "length"


class GuessModel:
    """A policy that guesses 389, 390, 391 ..."""

    def __init__(self) -> None:
        self.tokenizer = chat_tokenizer("chatml")

    def answer(self, prompt: list[int]) -> list[int]:
        guess = 389 + str(self.tokenizer.decode(prompt)).count("No. Try again.")
        return self.tokenizer.encode(f"{guess}<|im_end|>", add_special_tokens=False)


async def guessed(folder: Path, *overrides: str) -> Group:
    """A group of the page's task in its workers, with the limits of the page's run file and `overrides`."""
    (folder / "guess.py").write_text(example("chat.md", "python"))
    config = run_file("chat.md", f"--rollout.task={folder}/guess.py:guess", "--data.max_prompt_tokens=100", *overrides)
    model = GuessModel()
    prompts = Prompts(model.tokenizer, config)
    async with UserTask(config, open_sessions(config, prompts)) as task:
        sampler = Sampler(FakeEngine(model.answer), prompts, 1.0, 64, 4096)  # type: ignore[arg-type]
        outcome = await Episodes(prompts, task, sampler, None, 2).run(WorkItem(item=1, lease=1, version=0, problem=ROW))
    assert isinstance(outcome, Group), outcome
    return outcome


async def test_the_chat_task_is_scored_by_itself(tmp_path: Path):
    sample = (await guessed(tmp_path)).samples[0]
    assert sample.reward == 0.8 and sample.metrics["guesses"] == 3.0 and sample.metrics["turns"] == 3.0
    assert sample.finish == "stop" and sample.metrics["segments"] == 1.0


async def test_the_chat_task_ends_with_its_turns(tmp_path: Path):
    sample = (await guessed(tmp_path, "--rollout.chat.max_turns=2")).samples[0]
    assert sample.reward == 0.0 and sample.finish == "length" and sample.metrics["truncated"] == 1.0
