"""Agents by URL as a rollout server runs them: recorded, scored, limited, and gone with their episode."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from buffer.wire.protocol import WorkItem
from configs.checks import check
from configs.load import load
from rollout.episodes.episode import Episodes, Failure, Group
from rollout.episodes.setup import RolloutSetup
from rollout.errors import EngineDead, EngineError
from tests.harness.calculator import REWARDS, ROOT, ROWS, CalculatingEngine, calculator
from tests.harness.children import children
from tests.harness.lanes import long_but
from tests.harness.pace import paced
from tests.rollout.agents.test_programs import wards

OPENAI = """
async def solve(row, base_url, api_key):
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": row["problem"]}]
        for turn in range(3):
            reply = (await client.chat.completions.create(model="any", messages=messages)).choices[0].message
            if not reply.content.startswith("?"):
                return {"score": float(reply.content == row["answer"]), "asked": turn}
            messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": str(eval(reply.content[1:]))}]

def solve_apart(row, base_url, api_key):
    import asyncio
    return asyncio.run(solve(row, base_url, api_key))
"""
SCRIPT = f"""{OPENAI}
import json, os, sys
row = json.load(sys.stdin)
result = solve_apart(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
print("solved it")
print(json.dumps(result))
"""
HOSTILE, HOSTILE_MODULE = str(Path(__file__).parent / "user_agents.py"), "tests.rollout.agents.user_agents"


@asynccontextmanager
async def played(
    folder: Path, task: str, *overrides: str
) -> AsyncIterator[tuple[RolloutSetup, Episodes, CalculatingEngine]]:
    setup, episodes, engine = calculator(folder, task, *overrides)
    async with setup:
        yield setup, episodes, engine
        door = setup.task._by_url.server
        assert not door._doors and not door._owners, "keys of episodes that have ended"
    assert wards() == [] and children(recursive=True) == []


@pytest.mark.parametrize("how", long_but(["solve", "solve_apart", "command"], 0))
async def test_an_agent_plays_and_every_token_is_recorded(how: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(OPENAI)
    (tmp_path / "script.py").write_text(SCRIPT)
    task, more = f"{tmp_path}/mine.py:{how}", []
    if how == "command":
        task, more = "agent", [f"--rollout.agent.command=[{sys.executable}, {tmp_path}/script.py]"]
    async with played(tmp_path, task, *more) as (_, episodes, engine):
        engine.version = 3
        groups = await asyncio.gather(*(episodes.attempt(row) for row in ROWS))
    assert all(isinstance(group, Group) for group in groups), groups
    assert [[sample.reward for sample in group.samples] for group in groups] == [[reward] * 2 for reward in REWARDS]
    sample = groups[0].samples[0]
    text = engine.tokenizer.decode(sample.tokens.numpy().tolist())
    assert text == (
        "user: 17*23=<|endoftext|>assistant: ?17*23<|endoftext|>user: 391<|endoftext|>assistant: 391<|endoftext|>"
    )
    taught = [token for token, own in zip(sample.tokens.numpy(), sample.sampled.numpy(), strict=True) if own]
    assert engine.tokenizer.decode(taught) == "?17*23<|endoftext|>391<|endoftext|>"
    assert set(sample.versions.numpy()[sample.sampled.numpy() == 1]) == {3}
    assert sample.metrics["turns"] == 2 and sample.metrics["asked"] == 1 and sample.metrics["ignored_settings"] == 0


async def test_the_limits_of_the_run_end_an_episode_that_is_scored(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import json, urllib.request\n"
        "def talk(row, base_url, api_key):\n"
        "    messages = [{'role': 'user', 'content': row['problem']}]\n"
        "    while True:\n"
        "        body = json.dumps({'messages': messages}).encode()\n"
        "        with urllib.request.urlopen(base_url + '/chat/completions', body) as answer:\n"
        "            messages += [json.load(answer)['choices'][0]['message'], messages[0]]\n"
    )
    async with played(tmp_path, f"{tmp_path}/mine.py:talk", "--rollout.chat.max_turns=3") as (_, episodes, _):
        group = await episodes.attempt(ROWS[0])
    assert isinstance(group, Group)
    assert {(sample.reward, sample.finish, sample.metrics["turns"]) for sample in group.samples} == {
        (0.0, "length", 3.0)
    }


REFUSED_THEN = """
import asyncio, json, sys, urllib.error, urllib.request
import openai

async def talk(row, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        try:
            while True:
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1"}])
        except openai.BadRequestError as error:
            raise OTHER
"""


@pytest.mark.parametrize(
    ("other", "reason"),
    long_but(
        [
            ("", None),
            ("urllib.error.HTTPError('', 400, 'Bad Request', None, None)", None),
            ("urllib.error.HTTPError('', 502, 'Bad Gateway', None, None)", "HTTP Error 502"),
            ("ConnectionError('the data base is gone') from None", "ConnectionError: the data base is gone"),
            ("SystemExit(3)", "called sys.exit(3)"),
        ],
        1,
        2,
    ),
)
async def test_only_the_refusal_itself_is_nothing_and_another_failure_after_it_is_none(
    other: str, reason: str | None, tmp_path: Path
):
    (tmp_path / "mine.py").write_text(REFUSED_THEN.replace("OTHER", other))
    limits = ["--rollout.chat.max_turns=1", "--rollout.sample_attempts=1"]
    async with played(tmp_path, f"{tmp_path}/mine.py:talk", *limits) as (_, episodes, _):
        outcome = await episodes.attempt(ROWS[0])
    if reason is None:
        assert isinstance(outcome, Group)
        assert [(sample.reward, sample.finish) for sample in outcome.samples] == [(0.0, "length")] * 2
    else:
        assert isinstance(outcome, Failure) and reason in outcome.reason


async def test_a_program_that_ends_badly_after_a_limit_has_nothing(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        REFUSED_THEN.replace("OTHER", "")
        + "import os\nasyncio.run(talk({}, os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']))\n"
    )
    command = f"--rollout.agent.command=[{sys.executable}, {tmp_path}/mine.py]"
    async with played(tmp_path, "agent", command, "--rollout.chat.max_turns=1") as (_, episodes, _):
        group = await episodes.attempt(ROWS[0])
    assert isinstance(group, Group) and [sample.reward for sample in group.samples] == [0.0, 0.0]


@pytest.mark.parametrize("error", long_but([EngineError("vLLM failed"), EngineDead("vLLM died")], 0))
async def test_the_engine_s_failure_is_no_reward_whatever_the_agent_returns(error: Exception, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import urllib.request\n"
        "def hopeful(row, base_url, api_key):\n"
        '    try: urllib.request.urlopen(base_url + \'/chat/completions\', b\'{"messages": [{"role": "user"}]}\')\n'
        "    except Exception: return 1.0\n"
    )
    async with played(tmp_path, f"{tmp_path}/mine.py:hopeful") as (_, episodes, engine):

        async def fail(*args: Any, **options: Any) -> None:
            raise error

        engine.generate = fail
        if isinstance(error, EngineDead):
            with pytest.raises(ExceptionGroup) as caught:
                await episodes.attempt(ROWS[0])
            assert caught.group_contains(EngineDead)
        else:
            failure = await episodes.attempt(ROWS[0])
            assert isinstance(failure, Failure) and failure.reason == "vLLM failed" and failure.kind == "engine"


@pytest.mark.parametrize("how", ["plain", pytest.param("concurrent", marks=pytest.mark.long)])
async def test_an_agent_has_its_time_outside_of_model_calls(how: str, tmp_path: Path):
    row = {"problem": "1", "how": {"plain": "loop", "concurrent": "wait"}[how]}
    limit_s = paced(2.0)
    limits = [f"--rollout.task_timeout_s={limit_s}", "--rollout.sample_attempts=1"]
    async with played(tmp_path, f"{HOSTILE}:{how}", *limits) as (_, episodes, engine):
        engine.gate.clear()
        playing = asyncio.create_task(episodes.attempt(row))
        async with asyncio.timeout(120):
            while engine.running < 2:
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.1 * limit_s)
        assert not playing.done()
        engine.gate.set()
        failure = await asyncio.wait_for(playing, 120)
        limit = f"took longer than rollout.task_timeout_s ({limit_s:g} s) outside of model calls; it was ended"
        assert isinstance(failure, Failure) and failure.reason == f"{HOSTILE}:{how} {limit}"
        async with asyncio.timeout(120):
            while wards():
                await asyncio.sleep(0.05)


@pytest.mark.long
async def test_waiting_for_a_worker_is_not_the_agent_s_time(tmp_path: Path):
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(5)\nfrom {HOSTILE_MODULE} import plain\n")
    limits = ["--rollout.task_timeout_s=4", "--rollout.sample_attempts=1"]
    async with played(tmp_path, f"{tmp_path}/slow.py:plain", *limits) as (_, episodes, _):
        (warden,) = [child for child in children() if child.children()]  # the template process has none
        os.kill(warden.children()[0].pid, signal.SIGKILL)
        group = await episodes.attempt({"problem": "1", "how": "fine"})
    assert isinstance(group, Group), group


async def test_who_waits_for_a_worker_that_another_blocks_is_returned(tmp_path: Path):
    limit_s = paced(2.0)
    limits = [f"--rollout.task_timeout_s={limit_s}", "--rollout.sample_attempts=1"]
    async with played(tmp_path, f"{HOSTILE}:concurrent", *limits) as (_, episodes, engine):
        engine.gate.clear()
        wait, block = (asyncio.create_task(episodes.attempt({"problem": "1", "how": how})) for how in ("wait", "block"))
        async with asyncio.timeout(120):
            while engine.running < 4:
                await asyncio.sleep(0.01)
        engine.gate.set()
        beside, guilty = await asyncio.wait_for(asyncio.gather(wait, block), 120)
    assert (
        isinstance(guilty, Failure)
        and not guilty.returned
        and f"rollout.task_timeout_s ({limit_s:g} s)" in guilty.reason
    )
    assert isinstance(beside, Failure) and beside.returned and "another episode ended the worker" in beside.reason


async def test_a_lease_that_is_lost_takes_everything_along(tmp_path: Path):
    async with played(tmp_path, f"{HOSTILE}:plain") as (setup, episodes, engine):
        engine.gate.clear()
        item = WorkItem(item=1, lease=7, version=0, problem={"problem": "1", "how": "loop"})
        playing = asyncio.create_task(episodes.run(item))
        async with asyncio.timeout(120):
            while engine.running < 2:
                await asyncio.sleep(0.01)
        assert len(setup.task._by_url.server._doors) == 2 and len(wards()) == 4
        episodes.abandon([7], Failure("the buffer took the lease back"))
        assert (await playing).reason == "the buffer took the lease back"
        async with asyncio.timeout(120):
            while wards() or engine.running or setup.task._by_url.server._doors:
                await asyncio.sleep(0.01)
        assert engine.aborted == 2


async def test_an_agent_that_is_killed_is_tried_again(tmp_path: Path):
    async with played(tmp_path, f"{HOSTILE}:plain") as (_, episodes, engine):
        engine.gate.clear()
        playing = asyncio.create_task(episodes.attempt({"problem": "1", "how": "ask"}))
        async with asyncio.timeout(120):
            while engine.running < 2:
                await asyncio.sleep(0.01)
        for agent in [pid for pid in wards() if psutil.Process(psutil.Process(pid).ppid()).pid in wards()]:
            os.kill(agent, signal.SIGKILL)
        async with asyncio.timeout(120):
            while engine.aborted < 2 or engine.running < 2:
                await asyncio.sleep(0.01)
        engine.gate.set()
        group = await asyncio.wait_for(playing, 120)
    assert isinstance(group, Group) and [sample.reward for sample in group.samples] == [0.0, 0.0]  # it says 5, not 4


def blocks(language: str) -> list[str]:
    """Blocks of code in docs/agents.md."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/agents.md").read_text(encoding="utf-8"), re.DOTALL)


async def test_the_page_s_agent_plays(tmp_path: Path):
    (example,) = blocks("python")
    (tmp_path / "agent.py").write_text(example)
    async with played(tmp_path, f"{tmp_path}/agent.py:solve") as (_, episodes, _):
        right = await episodes.attempt({"problem": "2+2=", "answer": "5"})
        wrong = await episodes.attempt({"problem": "2+2=", "answer": "4"})
    assert [(sample.reward, sample.metrics["turns_needed"]) for sample in right.samples] == [(1.0, 1.0)] * 2
    assert [(sample.reward, sample.metrics["turns"]) for sample in wrong.samples] == [(0.0, 3.0)] * 2


def test_the_page_s_run_files_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where no quickstart has run: the model that it makes is shorter than these episodes."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("yaml"):
        keys = yaml.safe_load(block)
        given = [f"--{section}.{key}={json.dumps(value)}" for section in keys for key, value in keys[section].items()]
        check(load([str(ROOT / "examples/countdown/quickstart.yaml"), "--learner.tokens_per_microbatch=auto",
                    "--rollout.engine.max_model_len=4096", *given]), files=())  # fmt: skip
