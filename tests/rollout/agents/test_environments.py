"""Environments of `verifiers`, each in a Python of its own, play against recorded sessions.

The fast lane plays with a stub of `verifiers` 0.2 (`environments/stub`), the long lane with two real releases. The
first test that needs the releases installs both into `environments/` of the tests' virtual environment. This takes
minutes and 0.7 GB each; later runs reuse them. If the package index does not answer, the installation is tried again.
"""

import asyncio
import copy
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.doctor.trial import try_out
from configs.load import load
from configs.schema import Config
from rollout.episodes.episode import Episodes, Failure, Group
from rollout.episodes.setup import RolloutSetup
from rollout.tasks.environment import HOST
from tests.harness.calculator import REWARDS, ROOT, ROWS, CalculatingEngine, calculator, calculator_config
from tests.harness.children import children
from tests.harness.lanes import long_but

pytestmark = pytest.mark.timeout(1500)
HERE = Path(__file__).parent / "environments"
INSTALLED = Path(sys.prefix) / "environments"
STUB, CLASSIC, TASKS = ("calculator_classic", "stub"), ("calculator_classic", "0.2.1"), ("calculator_tasks", "0.4.0")
"""Environments, and the release of `verifiers` that each is played with."""
Python = Callable[[tuple[str, str]], Path]


def real(*values: Any) -> Any:
    """A case with a real release."""
    return pytest.param(*values, marks=pytest.mark.long)


def install(*words: str | Path) -> None:
    """`PYTHON -m WORDS`, again after some time if it fails: the package index may be away for minutes."""
    python, *rest = words
    for pause_s in (20, 40, 80, 160, 0):
        if not subprocess.run([python, "-m", *rest]).returncode:
            return
        time.sleep(pause_s)
    raise AssertionError(f"python -m {' '.join(map(str, rest))} failed five times")


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """The Python that has an environment of `verifiers`."""
    loaded: set[str] = set()
    stub = tmp_path_factory.mktemp("python") / "python"
    stub.write_text(f'#!/bin/sh\nPYTHONPATH="{HERE}/stub:{HERE}" exec "{sys.executable}" "$@"\n')
    stub.chmod(0o755)

    def made(environment: tuple[str, str]) -> Path:
        name, release = environment
        if environment == STUB:
            return stub
        folder = INSTALLED / f"verifiers-{release}"
        own, done = folder / "bin/python", folder / ".installed"
        INSTALLED.mkdir(exist_ok=True)
        with (INSTALLED / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests of another checkout may share this virtual environment
            if not done.exists():
                venv.create(folder, with_pip=True, clear=True)
                install(own, "pip", "install", "--quiet", "uv")
                install(own, "uv", "pip", "install", "--quiet", "--python", own, f"verifiers=={release}")
                done.touch()
        (packages,) = (folder / "lib").glob("python*/site-packages")
        (packages / "headrace_tests.pth").write_text(f"{HERE}\n")
        if name not in loaded:  # compiled once for all hosts, also where Python is told to keep no bytecode
            compiled = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
            subprocess.run([own, HOST, "check", name], check=True, capture_output=True, env=compiled)
            loaded.add(name)
        return own

    return made


def rows_of(python: Path, name: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        subprocess.run([python, HOST, "export", name, file, json.dumps(args)], check=True, capture_output=True)
        return [json.loads(line) for line in file.read_text().splitlines()]


def keys(python: Path, name: str, args: dict[str, Any] | None = None) -> list[str]:
    return [
        f"--rollout.environment.id={name}",
        f"--rollout.environment.python={python}",
        f"--rollout.environment.args={json.dumps(args or {})}",
        "--rollout.task_timeout_s=120",
    ]


def hosts() -> list[psutil.Process]:
    return below(psutil.Process(), str(HOST))


def below(process: psutil.Process, word: str) -> list[psutil.Process]:
    """What runs below `process` with `word` in its command line; one that has ended has none."""
    found = []
    for each in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [each] if word in " ".join(each.cmdline()) else []
    return found


@dataclass
class Playing:
    """One server's environment in one host, entered; each scene has episodes with an engine of its own. An episode of a
    task set is a process that imports `verifiers`, so groups are of one sample where one shows it."""

    name: str
    rows: list[dict[str, Any]]
    config: Config
    setup: RolloutSetup

    def episodes(self, samples: int = 1, max_tokens: int | None = None) -> tuple[Episodes, CalculatingEngine]:
        engine = CalculatingEngine()
        made = self.setup.episodes(self.config, engine, 1.0, samples=samples, max_tokens=max_tokens)  # type: ignore[arg-type]
        return made, engine

    def row_that(self, how: str) -> dict[str, Any]:
        """The first, whose episode goes wrong so."""
        row = copy.deepcopy(self.rows[0])
        row["extra_info"]["row"] |= {"info": {how: True}} if self.name == "calculator_classic" else {"how": how}
        return row

    def doors(self) -> dict[str, Any]:
        """Doors of the calls that go on."""
        return self.setup.task._by_url.server._doors  # type: ignore[attr-defined,no-any-return]


async def rewards_are_those_of_an_agent(playing: Playing) -> None:
    episodes, engine = playing.episodes(samples=2)
    groups = await asyncio.gather(*(episodes.attempt(row) for row in playing.rows))
    assert all(isinstance(group, Group) for group in groups), groups
    assert [[sample.reward for sample in group.samples] for group in groups] == [[reward] * 2 for reward in REWARDS]
    sample = groups[0].samples[0]
    assert engine.tokenizer.decode(sample.tokens.numpy().tolist()) == (
        "user: 17*23=<|endoftext|>assistant: ?17*23<|endoftext|>user: 391<|endoftext|>assistant: 391<|endoftext|>"
    )
    assert sample.sampled.numpy().sum() == len("?17*23") + 1 + len("391") + 1
    assert sample.metrics["turns"] == 2 and sample.metrics["segments"] == 1


async def an_evaluation_set_asks_for_its_own_length(playing: Playing) -> None:
    for answer in (9, 150):
        episodes, engine = playing.episodes(max_tokens=answer)
        assert isinstance(await episodes.attempt(playing.rows[0]), Group)
        assert engine.asked_tokens == [answer] * 2


async def an_empty_answer_is_scored(playing: Playing) -> None:
    episodes, engine = playing.episodes()
    engine.answer = lambda prompt: [engine.tokenizer.eos_token_id]
    group = await episodes.attempt(playing.rows[0])
    assert isinstance(group, Group), group
    assert [sample.reward for sample in group.samples] == [0.0]


async def an_episode_that_is_not_ok_is_no_reward(playing: Playing) -> None:
    failure = await playing.episodes()[0].attempt(playing.row_that("fail"))
    assert isinstance(failure, Failure) and not failure.permanent
    assert failure.reason.startswith(f"environment {playing.name}: its episode failed: ")
    assert "sandbox" in failure.reason


async def a_task_set_that_cannot_score_gives_no_zero(playing: Playing) -> None:
    if playing.name == "calculator_tasks":  # before 0.4 verifiers itself makes a zero of it
        failure = await playing.episodes()[0].attempt(playing.row_that("unscored"))
        assert isinstance(failure, Failure) and "the judge does not answer" in failure.reason


async def a_lost_lease_ends_the_episodes_in_the_host(playing: Playing) -> None:
    episodes, engine = playing.episodes(samples=2)
    engine.gate.clear()
    attempt = asyncio.create_task(episodes.attempt(playing.rows[0]))
    await until(lambda: engine.running == 2)
    (host,) = hosts()
    attempt.cancel()
    await until(lambda: engine.aborted == 2 and not playing.doors())
    await until(lambda: not below(host, "program"))
    assert isinstance(await playing.episodes()[0].attempt(playing.rows[0]), Group) and hosts() == [host]


async def a_host_that_dies_is_started_again_and_its_episodes_are_the_infrastructure_s(playing: Playing) -> None:
    episodes, engine = playing.episodes(samples=2)
    engine.gate.clear()
    attempt = asyncio.create_task(episodes.attempt(playing.rows[0]))
    await until(lambda: engine.running == 2)
    (host,) = hosts()
    os.kill(host.pid, signal.SIGKILL)
    failure = await asyncio.wait_for(attempt, 120)
    assert isinstance(failure, Failure) and failure.kind == "infrastructure"
    assert failure.reason == f"environment {playing.name} ended its process (killed by SIGKILL)"
    assert engine.running == 0 and not playing.doors()
    engine.gate.set()
    group = await episodes.attempt(playing.rows[0])
    assert isinstance(group, Group) and [sample.reward for sample in group.samples] == [1.0, 1.0]


SCENES = [
    rewards_are_those_of_an_agent,
    an_evaluation_set_asks_for_its_own_length,
    an_empty_answer_is_scored,
    an_episode_that_is_not_ok_is_no_reward,
    a_task_set_that_cannot_score_gives_no_zero,
    a_lost_lease_ends_the_episodes_in_the_host,
    a_host_that_dies_is_started_again_and_its_episodes_are_the_infrastructure_s,
]


@pytest.mark.parametrize("environment", [STUB, real(CLASSIC), real(TASKS)])
async def test_one_host_plays_all_scenes(environment: tuple[str, str], python: Python, tmp_path: Path):
    """One after the other, because the host of a real release takes ten seconds to start; the last one kills it."""
    (name, _), own = environment, python(environment)
    rows = rows_of(own, name, {"how": "well"} if name == "calculator_classic" else {"taskset": {"how": "well"}})
    assert all('"well"' in json.dumps(row) for row in rows)
    assert [(row["problem"], row["answer"]) for row in rows] == [(row["problem"], row["answer"]) for row in ROWS]
    config = calculator_config(tmp_path, "environment", *keys(own, name), "--rollout.sample_attempts=1")
    setup = RolloutSetup.load(config, "rollout-0")
    async with setup:
        for scene in SCENES:
            await scene(Playing(name, rows, config, setup))
    assert children(recursive=True) == []


async def until(true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("environment", [STUB, real(CLASSIC)])
@pytest.mark.parametrize(
    ("name", "args", "words"),
    long_but(
        [
            ("nonsense", {}, "rollout.environment.id: nonsense: nonsense: no such environment is installed for "),
            ("calculator_classic", {"how": "group"}, "scores a group of rollouts together, which is not supported"),
            ("calculator_classic", {"how": "raise"}, "cannot be loaded: RuntimeError: Failed to load environment"),
            ("calculator_classic", {"how": "exit"}, "its host ended with exit code 5 before it was ready"),
        ],
        0,
        3,
    ),
)
async def test_what_cannot_be_played_is_refused_in_one_line(
    name: str, args: dict[str, Any], words: str, environment: tuple[str, str], python: Python, tmp_path: Path
):
    setup, _, _ = calculator(tmp_path, "environment", *keys(python(environment), name, args))
    with pytest.raises(ValueError) as caught:
        async with setup:
            pass
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.long
async def test_several_agents_are_refused(python: Python, tmp_path: Path):
    own, args = python(TASKS), {"id": "user_sim"}
    setup, _, _ = calculator(tmp_path, "environment", *keys(own, "calculator_tasks", args))
    with pytest.raises(ValueError, match="has several agents \\(assistant, user\\)"):
        async with setup:
            pass


async def test_a_python_without_verifiers_is_refused(tmp_path: Path):
    setup, _, _ = calculator(tmp_path, "environment", *keys(Path(sys.executable), "wordle"))
    with pytest.raises(ValueError, match=r"rollout.environment.id: wordle: verifiers cannot be imported by "):
        async with setup:
            pass


@pytest.mark.parametrize("environment", [STUB, real(CLASSIC)])
def test_the_doctor_tries_the_environment(environment: tuple[str, str], python: Python, tmp_path: Path):
    start = [str(ROOT / "examples/countdown/quickstart.yaml"), "--rollout.task=environment"]
    own = python(environment)
    found = try_out(["task"], load([*start, *keys(own, "nonsense")]), [])
    assert len(found.refused) == 1 and "nonsense: no such environment is installed" in found.refused[0]
    assert try_out(["task"], load([*start, *keys(own, "calculator_classic")]), []).refused == []
