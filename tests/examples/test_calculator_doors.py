"""The same seeded conversations through each door: the task in process, the agent by URL, the environment's host.

The policy's message is a function of the tokens before it alone, so the doors agree if and only if they show the engine
the same tokens. It errs in all the ways in which the warm-started model does, and in some more.
"""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from examples.calculator import problems
from examples.calculator.make_model import make_tokenizer, problem_of
from rollout.episodes.episode import Group
from rollout.episodes.setup import RolloutSetup
from rollout.tasks.environment import HOST
from tests.harness.fakes import FakeEngine
from tests.rollout.agents.test_environments import CLASSIC, TASKS, Python, python

__all__ = ["python"]

FOLDER = Path("examples/calculator")
ROWS = problems.split(0, 200)["train"][:24]
PLAYED = {"0.2.1": 24, "0.4.0": 2}
"""Rows that each release of verifiers plays: 0.4 starts a program for each turn."""
SHOWN_METRICS = ("turns", "segments", "truncated")


class ErringEngine(FakeEngine):
    """Stands for `Engine`, with a policy that solves about half of the problems."""

    def __init__(self) -> None:
        super().__init__(self.say)
        self.tokenizer = make_tokenizer()

    def say(self, prompt: list[int]) -> list[int]:
        """The message that follows a prompt."""
        said = self.tokenizer.decode(prompt).replace("<|assistant|>", "<|endoftext|>").split("<|endoftext|>")
        shown = [text.removeprefix("<|user|>") for text in said if text.startswith("<|user|>")]
        steps = problems.steps(problem_of(shown[0]))
        done = len(shown) - 1
        right = f"<calc>{steps[done]}</calc>" if done < 2 else f"<answer>{steps[2]}</answer>"
        wrong = [
            "<calc>1+1</calc>",
            "<calc>1/0</calc>",
            "<answer>7</answer>",
            steps[2],
            "<calc></calc>",
            "<answer>1</calc> <|user|>",
        ]
        source = random.Random(str(prompt))
        text = right if source.random() < 0.75 else source.choice(wrong)
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]


async def played(folder: Path, rows: list[dict[str, Any]], *settings: str) -> list[Group]:
    """A group of two samples for each row, as a rollout server of the example's run makes it."""
    (folder / "model").mkdir(parents=True)
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "model/config.json").write_text('{"model_type": "qwen2", "vocab_size": 112, "hidden_size": 64}')
    here = [f"--run.folder={folder}", f"--model.path={folder}/model", "--rollout.task_workers=1", "--batch.samples=2"]
    config, engine = load([str(FOLDER / "quickstart.yaml"), *settings, *here]), ErringEngine()
    setup = RolloutSetup.load(config, "rollout-0")
    async with setup:
        episodes = setup.episodes(config, engine, 1.0, 2)  # type: ignore[arg-type]
        groups = await asyncio.gather(*(episodes.attempt(row) for row in rows))
    made = [group for group in groups if isinstance(group, Group)]
    assert len(made) == len(rows), groups
    return made


def told(groups: list[Group]) -> list[list[tuple[Any, ...]]]:
    """All that the learner gets of them."""
    return [
        [
            (
                sample.tokens.numpy().tolist(),
                sample.sampled.numpy().tolist(),
                sample.behaviour_logprobs.numpy().tolist(),
                sample.versions.numpy().tolist(),
                sample.reward,
                sample.finish,
                {name: sample.metrics[name] for name in SHOWN_METRICS},
            )
            for sample in group.samples
        ]
        for group in groups
    ]


@pytest.fixture(scope="module")
def by_chat(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    """What the task in process makes of ROWS."""
    return asyncio.run(played(tmp_path_factory.mktemp("chat"), ROWS))


def test_the_policy_does_all_that_matters(by_chat: list[Group]):
    samples = [group.samples[0] for group in by_chat]
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    assert {1, 2, 3} <= {sample.metrics["turns"] for sample in samples}
    assert {sample.metrics["segments"] for sample in samples} == {1.0}
    for sample, row in zip(samples, ROWS, strict=True):
        text = make_tokenizer().decode(sample.tokens.numpy().tolist())
        assert text.startswith(f"<|user|>{row['problem']}<|endoftext|><|assistant|>") and text.endswith("<|endoftext|>")
        own = sample.sampled.numpy() == 1
        assert set(sample.versions.numpy()[own]) == {0} and set(sample.versions.numpy()[~own]) == {-1}


@pytest.mark.parametrize("how", ["function", pytest.param("command", marks=pytest.mark.long)])
def test_the_agent_by_url_is_the_same(how: str, by_chat: list[Group], tmp_path: Path):
    settings, rows = [str(FOLDER / "agent.yaml")], ROWS
    if how == "command":  # a Python program for each episode
        command = f"[{sys.executable}, -m, examples.calculator.agent]"
        settings, rows = [*settings, "--rollout.task=agent", f"--rollout.agent.command={command}"], ROWS[:4]
    assert told(asyncio.run(played(tmp_path, rows, *settings))) == told(by_chat)[: len(rows)]


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("environment", [CLASSIC, TASKS], ids=lambda environment: environment[0])
def test_the_environment_is_the_same(
    environment: tuple[str, str], python: Python, by_chat: list[Group], tmp_path: Path
) -> None:
    own, rows = python(environment), tmp_path / "rows.jsonl"
    install = ["-m", "uv", "pip", "install", "--quiet", "--no-deps", "--reinstall", "--python", str(own)]
    subprocess.run([own, *install, str(FOLDER / "environment")], check=True)
    subprocess.run([own, HOST, "export", "calculator_environment", rows], check=True, capture_output=True)
    with rows.open() as lines:
        given = [json.loads(line) for line, _ in zip(lines, range(PLAYED[environment[1]]), strict=False)]
    assert [(row["problem"], row["answer"]) for row in given] == [(row["problem"], row["answer"]) for row in ROWS][
        : len(given)
    ]
    settings = [str(FOLDER / "environment.yaml"), f"--rollout.environment.python={own}", "--rollout.task_timeout_s=300"]
    groups = asyncio.run(played(tmp_path, given, *settings))
    assert told(groups) == told(by_chat)[: len(given)]
