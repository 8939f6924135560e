"""Agents in processes of their own: each ends alone and in words, and leaves nothing behind."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.cage import CagedError, CagedFunction
from rollout.cage.apart import TAIL_BYTES
from rollout.cage.cage import Cage
from rollout.cage.failure_text import ToldError
from rollout.cage.process_table import below, children_of_all
from rollout.tasks.programs import agent_of, result_of_command
from tests.harness.children import children
from tests.harness.lanes import long_but
from tests.harness.pace import paced

LOADER = "tests.rollout.agents.user_agents:load"
MEMORY = "rollout.task_memory_gib (1 GiB)"


class Agents(Cage):
    """A cage of agents, called as the server calls them, here without a URL."""

    async def run(self, how: str, **row: Any) -> Any:
        return await asyncio.wait_for(self.call({"how": how, **row}, "", ""), 120)


def agents(name: Any = "plain", workers: int = 1, timeout_s: float = 60.0) -> Agents:
    shown = name if isinstance(name, str) else " ".join(name)
    options = {"prefix": "rollout.task_", "episodes": True, "memory_gib": 1.0}
    return Agents(CagedFunction(shown, LOADER, [name, MEMORY], timeout_s, **options), workers)


def wards() -> list[int]:
    """Processes below this one that are neither the cage's wardens nor their workers."""
    children = children_of_all()
    workers = {min(children.get(warden, [0])) for warden in children.get(os.getpid(), [])}
    return [pid for warden in children.get(os.getpid(), []) for pid in below(warden, children) if pid not in workers]


async def error_of(call: Any) -> CagedError:
    with pytest.raises(CagedError) as caught:
        await call
    return caught.value


async def test_results_travel_and_an_imported_file_s_own_files_stay_open():
    async with agents() as cage:
        assert await cage.run("fine") == {"score": 1.0, "extra": 2}
        assert await cage.run("async") == 0.5
        assert await cage.run("file") not in (True, None)
        pids = await asyncio.gather(*(cage.run("pid") for _ in range(20)))
        assert len(set(pids)) == 20 and wards() == []
    assert children(recursive=True) == []


@pytest.mark.parametrize(
    ("how", "origin", "reason"),
    long_but(
        [
            ("segfault", "died", "plain ended its process (killed by SIGSEGV)"),
            ("sys.exit", "SystemExit", "plain called sys.exit(3)"),
            ("os._exit", "exited", "plain ended its process (exit code 3)"),
            ("quiet exit", "died", "plain ended its process before it returned"),
            ("object", "unanswerable", "plain returned a result of type object that cannot be sent"),
            ("huge", "unanswerable", "64.0 MiB are more than the 32 MiB of a message"),
            ("recurse", "RecursionError", "plain raised RecursionError"),
            ("raise", "KeyError", "plain raised KeyError: 'target'"),
            ("bomb", "died", "plain started too many processes; all of them were killed"),
            ("hog", "out_of_memory", f"plain used more memory than {MEMORY}; its process was killed"),
            ("close", "exited", "plain ended its process (exit code 1)"),
            ("kill group", "died", "plain ended its process (killed by SIGKILL)"),
            ("kill guard", "died", "plain ended its processes (the guard of them was killed)"),
        ],
        0,
        1,
        3,
        5,
        9,
        12,
    ),
)
async def test_one_ends_in_words_alone_and_leaves_nothing(how: str, origin: str, reason: str, tmp_path: Path):
    async with agents() as cage:
        beside = asyncio.create_task(cage.run("thread"))
        error = await error_of(cage.run(how, file=f"{tmp_path}/pid"))
        assert error.origin == origin and reason in str(error) and "\n" not in str(error) and not error.returned
        assert await beside == 1.0 and await cage.run("fine")
        async with asyncio.timeout(120):
            while wards():
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "how", long_but(["thread", "child", "socket", "many", "print", "folder", "fork"], 0, 1, 3, 5, 6)
)
async def test_what_a_good_one_leaves_is_gone_when_its_result_is_there(how: str, tmp_path: Path):
    async with agents() as cage:
        assert await cage.run(how, file=f"{tmp_path}/pid")
        assert wards() == []


@pytest.mark.parametrize("how", long_but(["loop", "stop", "write", "stop guard"], 0, 3))
async def test_a_cancelled_one_is_killed_with_all_that_it_started(how: str):
    async with agents() as cage:
        running = asyncio.create_task(cage.run(how))
        async with asyncio.timeout(120):
            while len(wards()) < 2:  # guard and agent
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        running.cancel()
        async with asyncio.timeout(120):
            while wards():
                await asyncio.sleep(0.05)
        assert await cage.run("fine")


async def test_nothing_survives_the_death_of_the_worker_or_its_warden():
    async with agents() as cage:
        for victim in range(2):
            running = asyncio.create_task(cage.run("loop"))
            async with asyncio.timeout(120):
                while len(wards()) < 2:
                    await asyncio.sleep(0.01)
            before = wards()
            (warden,) = children()
            os.kill([warden, *warden.children()][victim].pid, signal.SIGKILL)
            assert (await error_of(running)).origin == "died"
            async with asyncio.timeout(120):
                while any(map(psutil.pid_exists, before)):
                    await asyncio.sleep(0.05)
        assert await cage.run("fine")


async def test_async_ones_share_a_worker_and_the_server_keeps_the_time():
    limit_s = paced(1.0)
    async with agents("concurrent", timeout_s=limit_s) as cage:
        waiting = asyncio.create_task(cage.run("wait"))
        pids = await asyncio.gather(*(cage.run("pid") for _ in range(10)))
        assert len(set(pids)) == 1
        await asyncio.sleep(1.5 * limit_s)
        assert not waiting.done()  # no limit of the worker's own
        waiting.cancel()
        error = await error_of(cage.run("block"))
        assert error.origin == "timed_out" and "rollout.task_timeout_s" in str(error)
        assert str(await error_of(cage.run("exit"))) == "concurrent called sys.exit(3)"
        assert await cage.run("fine") == {"score": 1.0, "extra": 2}


SCRIPT = """import json, os, sys, time
row = json.load(sys.stdin)
print("hello", flush=True)
if row["how"] == "score": print(json.dumps({"score": row["value"], "seen": len(os.environ["OPENAI_BASE_URL"])}))
if row["how"] == "number": print(0.25, end="\\n\\n")
if row["how"] == "exit": print(1.0); sys.exit(4)
if row["how"] == "raise": print(1.0, flush=True); raise KeyError("target")
if row["how"] == "text": print("done")
if row["how"] == "list": print([1.0])
if row["how"] == "print": [sys.stdout.write("x" * 2**20 + "\\n") for _ in range(64)] and print(1)
if row["how"] == "child":
    if os.fork() == 0: os.setsid(); time.sleep(600)
    print(1.0)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "agent.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "agent.py")]


async def test_a_command_reads_the_row_and_its_last_line_is_the_score(command: list[str]):
    async with agents(command) as cage:
        url = "http://127.0.0.1:1/e/x/v1"
        result = await cage.call({"how": "score", "value": 0.5, "image": b"\xff\x00", "long": "y" * 10**6}, url, "key")
        assert result == {"score": 0.5, "seen": len(url)}
        assert await cage.run("number") == 0.25
        assert await cage.run("print") == 1 and await cage.run("child") == 1.0 and wards() == []


@pytest.mark.parametrize(
    ("how", "origin", "reason"),
    long_but(
        [
            ("exit", "exited", "ended its process (exit code 4)"),
            ("raise", "exited", "ended its process (exit code 1)"),
            ("text", "unanswerable", "the last line of its output is 'done'; a number or"),
            ("list", "unanswerable", "the last line of its output is '[1.0]'; a number or"),
            ("nothing", "unanswerable", "the last line of its output is 'hello'; a number or"),
        ],
        0,
        3,
    ),
)
async def test_a_command_without_a_score_has_failed(command: list[str], how: str, origin: str, reason: str):
    async with agents(command) as cage:
        error = await error_of(cage.run(how))
        assert error.origin == origin and reason in str(error) and command[1] in str(error)
        assert how != "raise" or "KeyError: 'target'" in error.detail


def test_a_last_line_that_was_not_kept_is_said_to_be_too_long():
    line = json.dumps({"score": 1.0, "log": "x" * TAIL_BYTES}).encode() + b"\n"
    with pytest.raises(
        ToldError, match=r"^node: the last line of its output has more than 64 KiB, and no more are kept"
    ):
        result_of_command("node", line[-TAIL_BYTES:])
    assert result_of_command("node", line + b"0.5\n") == 0.5


async def test_a_hundred_at_once():
    async with agents(workers=2) as cage:
        assert await asyncio.gather(*(cage.run("fine") for _ in range(100))) == [{"score": 1.0, "extra": 2}] * 100
        assert wards() == []


def test_an_agent_may_be_an_object_that_is_called_asynchronously():
    class Agent:
        async def __call__(self, row, base_url, api_key):
            return 1.0

    play: Any = agent_of("agent", Agent(), "", frozenset())
    assert asyncio.run(play({}, "http://here", "key", None)) == 1.0
