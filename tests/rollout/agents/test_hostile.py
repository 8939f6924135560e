"""Everything that can go wrong with users' episodes, at once, in one rollout server, between good ones.

The server continues: good groups arrive, each bad group is named, and no episode leaves anything behind. In the fast
lane a run has the cases of FEW, which end at once. In the long lane one run has all cases, also slow ones and those
that need memory or processes. `test_programs.py` has each case alone.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from rollout.episodes.episode import Episodes, Failure, Group
from tests.harness.calculator import ROOT, calculator
from tests.harness.children import children
from tests.harness.lanes import long_but
from tests.rollout.agents.test_programs import wards

pytestmark = pytest.mark.timeout(900)
USER = Path(__file__).parent / "user_agents.py"
LATE, MEMORY = "took longer than rollout.task_timeout_s", "emory"
BOTH_KINDS: dict[str, str | None] = {
    "segfault": "killed by SIGSEGV",
    "sys.exit": "called sys.exit(3)",
    "os._exit": "ended its process (exit code 3)",
    "raise": "KeyError: 'target'",
    "recurse": "RecursionError",
    "nan": "the task scored an episode nan; a finite number",
    "inf": "the task scored an episode inf; a finite number",
    "text": "the task scored an episode 'one'; a finite number",
    "none": "rollout.task",
    "object": "of type object that cannot be sent",
    "huge": "64.0 MiB are more than the 32 MiB of a message",
    "loop": LATE,
    "hog": MEMORY,
    "kill group": "killed by SIGKILL",
    "bomb": "started too many processes; all of them were killed",
    "thread": None,
    "socket": None,
    "print": None,
    "folder": None,
}
"""What an episode does, and the words by which its failure names it; None: it does harm but returns a score."""
AGENTS = BOTH_KINDS | {
    "stop": LATE,
    "write": LATE,
    "reader": LATE,
    "close": "ended its process (exit code 1)",
    "kill guard": "the guard of them was killed",
    "garbage": "RuntimeError: sent garbage",
    "dead key": "HTTP Error 410: Gone",
    "child": None,
    "later": None,
    "many": None,
}
FEW = {"segfault", "sys.exit", "raise", "nan", "object", "kill group", "thread", "kill guard", "dead key", "later"}
TALKING = BOTH_KINDS | {"wait": LATE, "bad messages": "messages"}


async def play(episodes: Episodes, row: dict[str, Any], places: asyncio.Semaphore) -> Group | Failure:
    """An attempt at the row, again as often as the buffer would dispatch it: who only stood beside is not at fault."""
    async with places:
        while isinstance(outcome := await episodes.attempt(row), Failure) and outcome.returned:
            pass
        return outcome


def own_s() -> int:
    """A time limit that is short, and long enough for the good ones on a machine that is busy with other tests."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    return int(min(120, max(24, 300 * (time.monotonic() - began))))


def few(ways: dict[str, str | None]) -> dict[str, str | None]:
    return {way: words for way, words in ways.items() if way in {*FEW, "bad messages"}}


@pytest.mark.parametrize(
    ("function", "ways", "at_once"),
    long_but(
        [
            pytest.param("plain", few(AGENTS), 4, id="plain"),
            pytest.param("talking", few(TALKING), 2, id="talking"),
            pytest.param("plain", AGENTS, 4, id="plain, all", marks=pytest.mark.long),
            pytest.param("talking", TALKING, 1, id="talking, all", marks=pytest.mark.long),
        ],
        0,
    ),
)
def test_a_run_goes_on_whatever_its_episodes_do(
    function: str, ways: dict[str, str | None], at_once: int, tmp_path: Path
):
    keys = [f"--rollout.task_timeout_s={own_s()}", "--rollout.task_memory_gib=0.75", "--rollout.sample_attempts=1"]
    keys += ["--rollout.task_workers=2", "--rollout.engine.max_num_seqs=16"]  # by the last: 272 processes a worker

    async def run() -> tuple[dict[str, Group | Failure], list[Group | Failure], int]:
        setup, episodes, _ = calculator(tmp_path, f"{USER}:{function}", *keys)
        places, beside, fine = asyncio.Semaphore(at_once), asyncio.Semaphore(3), {"problem": "2+2=", "how": "fine"}
        async with setup:
            assert isinstance(await episodes.attempt(fine), Group)
            files = len(os.listdir("/proc/self/fd"))
            async with asyncio.TaskGroup() as tasks:
                bad, good = {}, []
                for way in ways:
                    row = {"problem": "2+2=", "how": way, "file": f"{tmp_path}/{way}"}
                    bad[way] = tasks.create_task(play(episodes, row, places))
                    good.append(tasks.create_task(play(episodes, fine, beside)))
            door = setup.task._by_url.server
            assert not door._doors and not door._owners, "keys outlive their episodes"
            if function == "plain":
                async with asyncio.timeout(120):
                    while wards():
                        await asyncio.sleep(0.05)
            left = len(os.listdir("/proc/self/fd")) - files
        return {way: task.result() for way, task in bad.items()}, [task.result() for task in good], left

    bad, good, left = uvloop.run(run())
    assert [type(outcome) for outcome in good] == [Group] * len(ways), good
    for way, words in ways.items():
        outcome = bad[way]
        if words is None:
            assert isinstance(outcome, Group) and outcome.samples[0].reward == 1.0, (way, outcome)
        else:
            assert isinstance(outcome, Failure) and words in outcome.reason, (way, outcome)
            assert "\n" not in outcome.reason
    assert left <= 4, "files or sockets are left open"  # a worker that was replaced may still be closing
    assert children(recursive=True) == []
    late = tmp_path / "later"
    assert not late.exists() or not late.read_text()


SERVER = """
import asyncio, sys
from pathlib import Path
from tests.harness.calculator import calculator

async def main():
    setup, episodes, _ = calculator(Path(sys.argv[1]), sys.argv[2], "--rollout.task_timeout_s=600")
    async with setup:
        await episodes.attempt({"problem": "2+2=", "how": "child", "file": f"{sys.argv[1]}/child"})
        print("ready", flush=True)
        await episodes.attempt({"problem": "2+2=", "how": "leave and loop", "file": f"{sys.argv[1]}/left"})

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_server(number: signal.Signals, tmp_path: Path):
    """Agents in mid-episode, one with a daemon that left session and parent, when their server is killed."""
    command = [sys.executable, "-c", SERVER, str(tmp_path), f"{USER}:plain"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        deadline, below = 600, []
        while deadline and len(below) < 8:  # warden, worker, and of two samples guard, agent and daemon
            below = psutil.Process(server.pid).children(recursive=True)
            deadline -= 1
            psutil.wait_procs(below[:1], 0.1)
        assert len(below) >= 8
        server.send_signal(number)
        server.wait(120)
    assert psutil.wait_procs(below, 60)[1] == []
