"""The examples of docs/rewards.md and docs/built-in-rewards.md do what the pages say."""

import re
from pathlib import Path
from typing import Any

import pytest

from configs.checks import check
from configs.load import load
from configs.schema import Config, RewardConfig
from rollout.rewards import REWARDS, load_reward
from rollout.rewards.convention import Answer
from rollout.rewards.workers import RewardPool
from tests.harness.model_server import ModelServer, says

ROOT = Path(__file__).parents[3]
PAGE = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rewards.md", "built-in-rewards.md"))


def block(heading: str, language: str, number: int = 0) -> str:
    """A block in `language` below a heading of the page."""
    below = PAGE.partition(f"# {heading}\n")[2]
    return str(re.findall(rf"```{language}\n(.*?)```", below, re.DOTALL)[number])


def run_file(folder: Path, heading: str, number: int = 0) -> Config:
    (folder / "run.yaml").write_text(block(heading, "yaml", number))
    return load([str(folder / "run.yaml"), "--model.path=m", "--data.train=d.jsonl"])


async def test_the_async_example_runs_a_test(tmp_path: Path):
    (tmp_path / "sandbox.py").write_text(block("Async functions", "python"))
    answers = [Answer(f"def f(x):\n    return {body}", 9, {"answer": "f(3) == 9"}) for body in ("x * x", "x + x")]
    async with RewardPool(RewardConfig(function=f"{tmp_path}/sandbox.py:score", timeout_s=60)) as pool:
        assert [score.reward for score in await pool.score(answers)] == [1.0, 0.0]


async def test_the_example_of_several_functions(tmp_path: Path):
    (tmp_path / "style.py").write_text("def score(solution_str): return len(solution_str)")
    given = run_file(tmp_path, "Several functions").reward
    check(run_file(tmp_path, "Several functions"), files=())
    parts = [part.model_copy(update={"function": f"{tmp_path}/style.py:score"}) for part in given.parts[3:]]
    config = given.model_copy(update={"function": [*given.parts[:3], *parts]})
    answer = Answer("<think>half of two\n</think> $1$", 3072, {"problem": "?", "answer": "1"})
    async with RewardPool(config) as pool:
        (score,) = await pool.score([answer])
    assert score.reward == pytest.approx(1.0 + 0.1 - 0.25)
    assert set(score.metrics) == {
        "math_verify",
        "math_verify/solved",
        "math_verify/formed",
        "math_verify/gave_up",
        "format",
        "format/gave_up",
        "length",
        "score",
    }
    assert score.metrics["length"] == -0.5 and score.metrics["score"] == len(answer.text)


@pytest.mark.parametrize(("verdict", "reward"), [("It is. [[CORRECT]]", 1.0), ("No: [[wrong]]", 0.0)])
async def test_the_example_of_a_judge(tmp_path: Path, verdict: str, reward: float):
    config = run_file(tmp_path, "A judge")
    check(config, files=())
    async with ModelServer(lambda body, number: (200, says(verdict))) as server:
        kwargs = config.reward.kwargs | {"url": server.url}
        judge = load_reward(config.reward.model_copy(update={"kwargs": kwargs}))
        (score,) = await judge.score_async([Answer("4", 1, {"problem": "2+2?", "answer": "4"})])
        await judge.function.close()
    assert score.reward == reward
    (asked,) = server.requests
    assert asked[2]["messages"][0]["content"].startswith("Question: 2+2?\nRight answer: 4\nAnswer to grade: 4\n")


def test_the_example_of_reward_servers(tmp_path: Path):
    config = run_file(tmp_path, "A reward model")
    check(config, files=())
    assert config.reward.urls == ["http://127.0.0.1:5700", "http://127.0.0.1:5701"]


def test_the_tables_name_what_there_is():
    named = set(re.findall(r"^\| `(\w+)`", PAGE.partition("\n## Built in\n")[2].partition("\n## ")[0], re.MULTILINE))
    assert named == set(REWARDS) - {"math"}
    for heading, function in (("A judge", "judge"), ("A reward model", "reward_model")):
        table = PAGE.partition(f"\n## {heading}\n")[2].partition("\n#")[0]
        rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
        fields: Any = REWARDS[function]
        assert sorted(name for names in rows for name in names) == sorted(fields.model_fields)
