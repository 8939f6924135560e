"""Environments of the real `verifiers`, each in a Python of its own, play against recorded sessions.

The first test that needs them installs both releases from the package index into `environments/` of the virtual
environment that runs the tests: minutes, and 0.7 GB each; later runs find them there. An index that does not answer is
asked again.
"""

import asyncio
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
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.doctor.trial import try_out
from configs.load import load
from rollout.episodes.episode import Failure, Group
from rollout.episodes.setup import RolloutSetup
from rollout.tasks.environment import HOST
from tests.harness.calculator import REWARDS, ROOT, ROWS, CalculatingEngine, calculator, calculator_config
from tests.harness.children import children

pytestmark = pytest.mark.timeout(1500)
HERE = Path(__file__).parent / "environments"
INSTALLED = Path(sys.prefix) / "environments"
RELEASES = {"calculator_classic": "0.2.1", "calculator_tasks": "0.4.0"}
BOTH = pytest.mark.parametrize("name", RELEASES)


def install(*words: str | Path) -> None:
    """`PYTHON -m WORDS`, again after some time if it fails: the package index may be away for minutes."""
    python, *rest = words
    for pause_s in (20, 40, 80, 160, 0):
        if not subprocess.run([python, "-m", *rest]).returncode:
            return
        time.sleep(pause_s)
    raise AssertionError(f"python -m {' '.join(map(str, rest))} failed five times")


@pytest.fixture(scope="session")
def python() -> Callable[[str], Path]:
    """The Python that has the environment, from its name."""
    loaded: set[str] = set()

    def made(name: str) -> Path:
        folder = INSTALLED / f"verifiers-{RELEASES[name]}"
        own, done = folder / "bin/python", folder / ".installed"
        INSTALLED.mkdir(exist_ok=True)
        with (INSTALLED / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests of another checkout may share this virtual environment
            if not done.exists():
                venv.create(folder, with_pip=True, clear=True)
                install(own, "pip", "install", "--quiet", "uv")
                install(own, "uv", "pip", "install", "--quiet", "--python", own, f"verifiers=={RELEASES[name]}")
                done.touch()
        (packages,) = (folder / "lib").glob("python*/site-packages")
        (packages / "headrace_tests.pth").write_text(f"{HERE}\n")
        if name not in loaded:  # compiled once for all hosts, also where Python is told to keep no bytecode
            compiled = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
            subprocess.run([own, HOST, "check", name], check=True, capture_output=True, env=compiled)
            loaded.add(name)
        return own

    return made


def rows_of(python: Path, name: str, **args: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in exported(python, name, json.dumps(args)).splitlines()]


@cache
def exported(python: Path, name: str, args: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        subprocess.run([python, HOST, "export", name, file, args], check=True, capture_output=True)
        return file.read_text()


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


def how(name: str, what: str) -> dict[str, Any]:
    """Arguments by which the calculator goes wrong."""
    return {"how": what} if name == "calculator_classic" else {"taskset": {"how": what}}


@BOTH
async def test_the_same_rewards_as_those_of_an_agent(name: str, python: Any, tmp_path: Path):
    own = python(name)
    rows = rows_of(own, name)
    assert [(row["problem"], row["answer"]) for row in rows] == [(row["problem"], row["answer"]) for row in ROWS]
    setup, episodes, engine = calculator(tmp_path, "environment", *keys(own, name))
    async with setup:
        groups = await asyncio.gather(*(episodes.attempt(row) for row in rows))
    assert all(isinstance(group, Group) for group in groups), groups
    assert [[sample.reward for sample in group.samples] for group in groups] == [[reward] * 2 for reward in REWARDS]
    sample = groups[0].samples[0]
    assert engine.tokenizer.decode(sample.tokens.numpy().tolist()) == (
        "user: 17*23=<|endoftext|>assistant: ?17*23<|endoftext|>user: 391<|endoftext|>assistant: 391<|endoftext|>"
    )
    assert sample.sampled.numpy().sum() == len("?17*23") + 1 + len("391") + 1
    assert sample.metrics["turns"] == 2 and sample.metrics["segments"] == 1
    assert children(recursive=True) == []


@BOTH
@pytest.mark.parametrize("answer", [9, 150])
async def test_an_evaluation_set_asks_for_its_own_length(name: str, answer: int, python: Any, tmp_path: Path):
    own = python(name)
    (row, *_) = rows_of(own, name)
    config = calculator_config(tmp_path, "environment", *keys(own, name))
    engine, setup = CalculatingEngine(), RolloutSetup.load(config, "rollout-0")
    episodes = setup.episodes(config, engine, 1.0, samples=1, max_tokens=answer)  # type: ignore[arg-type]
    async with setup:
        assert isinstance(await episodes.attempt(row), Group)
    assert engine.asked_tokens == [answer] * 2


@BOTH
async def test_an_empty_answer_is_scored(name: str, python: Any, tmp_path: Path):
    own = python(name)
    (row, *_) = rows_of(own, name)
    setup, episodes, engine = calculator(tmp_path, "environment", *keys(own, name))
    engine.answer = lambda prompt: [engine.tokenizer.eos_token_id]
    async with setup:
        group = await episodes.attempt(row)
    assert isinstance(group, Group), group
    assert [sample.reward for sample in group.samples] == [0.0, 0.0]


@BOTH
async def test_an_episode_that_is_not_ok_is_no_reward(name: str, python: Any, tmp_path: Path):
    own = python(name)
    (row, *_) = rows_of(own, name, **how(name, "fail"))
    setup, episodes, _ = calculator(tmp_path, "environment", *keys(own, name, how(name, "fail")))
    async with setup:
        failure = await episodes.attempt(row)
    assert isinstance(failure, Failure) and not failure.permanent
    assert failure.reason.startswith(f"environment {name}: its episode failed: ") and "sandbox" in failure.reason


async def test_a_task_set_that_cannot_score_gives_no_zero(python: Any, tmp_path: Path):
    own, name = python("calculator_tasks"), "calculator_tasks"
    (row, *_) = rows_of(own, name, **how(name, "unscored"))
    setup, episodes, _ = calculator(tmp_path, "environment", *keys(own, name))
    async with setup:
        failure = await episodes.attempt(row)
    assert isinstance(failure, Failure) and "the judge does not answer" in failure.reason


@BOTH
async def test_a_host_that_dies_is_started_again_and_its_episodes_are_the_infrastructure_s(
    name: str, python: Any, tmp_path: Path
):
    own = python(name)
    (row, *_) = rows_of(own, name)
    limits = ["--rollout.sample_attempts=1"]
    setup, episodes, engine = calculator(tmp_path, "environment", *keys(own, name), *limits)
    async with setup:
        engine.gate.clear()
        playing = asyncio.create_task(episodes.attempt(row))
        await until(lambda: engine.running == 2)
        (host,) = hosts()
        os.kill(host.pid, signal.SIGKILL)
        failure = await asyncio.wait_for(playing, 120)
        assert isinstance(failure, Failure) and failure.kind == "infrastructure"
        assert failure.reason == f"environment {name} ended its process (killed by SIGKILL)"
        assert engine.running == 0 and not setup.task._by_url.server._doors
        engine.gate.set()
        group = await episodes.attempt(row)
        assert isinstance(group, Group) and [sample.reward for sample in group.samples] == [1.0, 1.0]
    assert children(recursive=True) == []


@BOTH
async def test_a_lost_lease_ends_the_episodes_in_the_host(name: str, python: Any, tmp_path: Path):
    own = python(name)
    (row, *_) = rows_of(own, name)
    setup, episodes, engine = calculator(tmp_path, "environment", *keys(own, name))
    async with setup:
        engine.gate.clear()
        playing = asyncio.create_task(episodes.attempt(row))
        await until(lambda: engine.running == 2)
        (host,) = hosts()
        playing.cancel()
        await until(lambda: engine.aborted == 2 and not setup.task._by_url.server._doors)
        await until(lambda: not below(host, "program"))
        engine.gate.set()
        assert isinstance(await episodes.attempt(row), Group) and hosts() == [host]


async def until(true: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("nonsense", {}, "rollout.environment.id: nonsense: nonsense: no such environment is installed for "),
        ("calculator_classic", {"how": "group"}, "scores a group of rollouts together, which is not supported"),
        ("calculator_classic", {"how": "raise"}, "cannot be loaded: RuntimeError: Failed to load environment"),
        ("calculator_classic", {"how": "exit"}, "its host ended with exit code 5 before it was ready"),
    ],
)
async def test_what_cannot_be_played_is_refused_in_one_line(
    name: str, args: dict[str, Any], words: str, python: Any, tmp_path: Path
):
    setup, _, _ = calculator(tmp_path, "environment", *keys(python("calculator_classic"), name, args))
    with pytest.raises(ValueError) as caught:
        async with setup:
            pass
    assert words in str(caught.value) and "\n" not in str(caught.value)


async def test_several_agents_are_refused(python: Any, tmp_path: Path):
    own, args = python("calculator_tasks"), {"id": "user_sim"}
    setup, _, _ = calculator(tmp_path, "environment", *keys(own, "calculator_tasks", args))
    with pytest.raises(ValueError, match="has several agents \\(assistant, user\\)"):
        async with setup:
            pass


async def test_a_python_without_verifiers_is_refused(tmp_path: Path):
    setup, _, _ = calculator(tmp_path, "environment", *keys(Path(sys.executable), "wordle"))
    with pytest.raises(ValueError, match=r"rollout.environment.id: wordle: verifiers cannot be imported by "):
        async with setup:
            pass


def test_the_doctor_tries_the_environment(python: Any, tmp_path: Path):
    start = [str(ROOT / "examples/countdown/quickstart.yaml"), "--rollout.task=environment"]
    own = python("calculator_classic")
    found = try_out(["task"], load([*start, *keys(own, "nonsense")]), [])
    assert len(found.refused) == 1 and "nonsense: no such environment is installed" in found.refused[0]
    assert try_out(["task"], load([*start, *keys(own, "calculator_classic")]), []).refused == []
