"""The learner of several nodes as one: generations start and end together. Members are real keepers in this process."""

import asyncio
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.process import FINAL, Event, Process, Restarts
from actors.supervise.cluster.gang_member import GangMember
from actors.supervise.cluster.node_keeper import Whereabouts
from actors.supervise.gang import Gang, LostMember

QUICK = Restarts(first_s=0.05, most_s=0.2, failures=2)
STAYS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("store", os.environ["MASTER_PORT"], "of", os.environ["NODE_RANK"], "is", os.getpid(), *sys.argv[1:], flush=True)
signal.sigwait({signal.SIGTERM})
print("drained")
"""
FLAG = ["--weights.host=127.0.0.1"]


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


class LocalMember:
    """A member in this process in place of a Ray actor: stands for `RemoteMember`. `lose` is the loss of its node."""

    def __init__(self, process: Process, number: int) -> None:
        self.process, self.number, self.lives = process, number, 0
        self.unfit = ""
        self._there = asyncio.Event()
        self._gone = asyncio.Event()
        self.join()

    def join(self) -> None:
        """A node for this member."""
        self.lives += 1
        self.member = GangMember(self.process, None, f"node-{self.number}-{self.lives}", "127.0.0.1")
        self._there.set()
        self._gone.clear()

    def lose(self) -> None:
        """Its node, with all on it."""
        self._there.clear()
        self._gone.set()
        self.member.kill()

    def release(self) -> None:
        self.member.kill()

    async def place(self) -> tuple[Whereabouts, str]:
        await self._there.wait()
        place, _ = self.member.place()
        return place, self.unfit

    async def host(self) -> int:
        return self.member.host()

    async def start(self, env: dict[str, str], flags: Sequence[str]) -> None:
        await self._call(self.member.start, env, flags)

    async def events(self, after: int) -> tuple[list[Event], list[str], bool]:
        found = await self._call(self.member.events, after, 0.2)
        assert found is not None
        return found  # type: ignore[no-any-return]

    async def drain(self, timeout_s: float) -> None:
        await self._call(self.member.drain, timeout_s)

    async def kill(self) -> None:
        await self._call(self.member.kill)

    async def _call(self, method: Callable[..., Any], *arguments: object) -> Any:
        if self._gone.is_set():
            raise LostMember("it is gone")
        found = await asyncio.to_thread(method, *arguments)
        if self._gone.is_set():
            raise LostMember("it is gone")
        return found


class Story:
    """A gang of two, and what it reported."""

    def __init__(self, folder: Path, code: str, other: str = "") -> None:
        argv = [(sys.executable, "-c", text) for text in (code, other or code)]
        logs = [folder / "logs" / f"learner{number}.log" for number in range(2)]
        made = [
            Process("learner", "learner", one, log, nodes=2, restarts=QUICK)
            for one, log in zip(argv, logs, strict=True)
        ]
        self.members = [LocalMember(process, number) for number, process in enumerate(made)]
        self.gone = defaultdict[str, asyncio.Event](asyncio.Event)
        self.left: list[str] = []
        """Nodes that the gang has waited for, of which `gone` says when they are."""
        self.gang = Gang(made[0], self.members, self.wait_gone, lambda address: FLAG)
        self.events: list[Event] = []

    async def wait_gone(self, node: str, limit_s: float) -> None:
        await self.gone[node].wait()
        self.left.append(node)

    async def until(self, wanted: Callable[[Event], object]) -> Event:
        """The first later event that is wanted."""
        async with asyncio.timeout(150):
            while True:
                for event in await self.gang.events(self.events[-1].number if self.events else 0):
                    self.events.append(event)
                    if wanted(event):
                        return event

    async def met(self) -> list[int]:
        """Pids of the newest generation, once both nodes' processes have met."""
        words = [(await self.until(lambda event: "store " in event.text)).text.split() for _ in range(2)]
        words.sort(key=lambda line: line[line.index("of") + 1])
        ports, pids, flags = zip(
            *((line[line.index("of") - 1], line[line.index("is") + 1], line[line.index("is") + 2 :]) for line in words),
            strict=True,
        )
        assert len({*ports}) == 1 and list(flags) == [FLAG, FLAG], "one store, and flags by the first node's address"
        return [int(pid) for pid in pids]


@in_a_loop
async def test_a_rank_that_is_killed_ends_its_generation_and_the_next_one_meets(tmp_path: Path) -> None:
    story = Story(tmp_path, STAYS)
    first = await story.met()
    os.kill(first[1], signal.SIGKILL)
    failed = await story.until(lambda event: event.kind == "failed")
    assert failed.code == 137
    assert failed.text.startswith("node 1 (127.0.0.1) ended first and the others with it: exit code 137 after")
    second = await story.met()
    assert not {*first} & {*second} and not any(map(psutil.pid_exists, first))
    await story.gang.drain(60.0)
    assert (await story.until(lambda event: event.kind in FINAL)).kind == "ended"
    assert [event.text for event in story.events if "drained" in event.text] in (
        ["drained", "node 1 (127.0.0.1): drained"],
        ["node 1 (127.0.0.1): drained", "drained"],
    )


@in_a_loop
async def test_a_node_that_is_lost_is_waited_for_and_costs_no_attempt(tmp_path: Path) -> None:
    story = Story(tmp_path, STAYS)
    await story.met()
    for _ in range(QUICK.failures + 1):
        await asyncio.to_thread(story.members[1].lose)
        lost = await story.until(lambda event: event.kind == "failed")
        assert "node 1 (127.0.0.1) is lost: it is gone; all ranks begin again together" in lost.text
        story.members[1].join()
        await story.met()
    assert story.gang.nodes == ["node-0-1", f"node-1-{QUICK.failures + 2}"]
    await story.gang.kill()
    assert (await story.until(lambda event: event.kind in FINAL)).kind == "ended"


@in_a_loop
async def test_a_drain_ends_the_wait_for_a_node(tmp_path: Path) -> None:
    story = Story(tmp_path, STAYS)
    await story.met()
    await asyncio.to_thread(story.members[0].lose)
    await story.until(lambda event: event.kind == "failed")
    await story.gang.drain(60.0)
    assert (await story.until(lambda event: event.kind in FINAL)).text == "it was waiting for its nodes"


@in_a_loop
async def test_a_node_that_leaves_is_given_up_in_time(tmp_path: Path) -> None:
    story = Story(tmp_path, STAYS)
    first = await story.met()
    await story.gang.leave(story.gang.nodes[1], 60.0)
    await story.until(lambda event: event.text.startswith("its version is saved because a node leaves"))
    assert sum("drained" in event.text for event in story.events) == 2, "asked to finish, not killed"
    story.gone["node-1-1"].set()
    assert not {*first} & {*(await story.met())}
    await story.gang.kill()


@pytest.mark.parametrize("moving", [False, True], ids=["at once", "while it waits for the first"])
@in_a_loop
async def test_every_node_that_leaves_has_left_before_it_begins_again(moving: bool, tmp_path: Path) -> None:
    story = Story(tmp_path, STAYS)
    await story.met()
    first, second = story.gang.nodes
    leaves = asyncio.create_task(story.gang.leave(first, 60.0))
    if moving:
        await story.until(lambda event: event.text.startswith("its version is saved because a node leaves"))
    await story.gang.leave(second, 90.0)
    await leaves
    if not moving:
        await story.until(lambda event: event.text.startswith("its version is saved because a node leaves"))
    story.gone[first].set()
    story.gone[second].set()
    await story.met()
    assert sorted(story.left) == sorted([first, second])
    await story.gang.kill()


SLEEPS = "import time; time.sleep(600)"
"""Until the other node has ended the generation."""


@pytest.mark.parametrize(
    ("code", "other", "kind", "text"),
    [
        ("pass", "pass", "ended", "exit code 0"),
        (
            "print('python -m learner: the data ended')\nexit(3)",
            "exit(3)",
            "ended",
            "python -m learner: the data ended",
        ),
        ("print('no model there')\nexit(2)", SLEEPS, "refused", "no model there"),
        (
            SLEEPS,
            "print('no memory')\nexit(1)",
            "gave_up",
            "it failed 2 times in a row and never trained a new version",
        ),
    ],
)
@in_a_loop
async def test_how_a_gang_ends(code: str, other: str, kind: str, text: str, tmp_path: Path) -> None:
    story = Story(tmp_path, code, other)
    last = await story.until(lambda event: event.kind in FINAL)
    assert last.kind == kind and text in last.text


@in_a_loop
async def test_an_unfit_node_is_named(tmp_path: Path) -> None:
    story = Story(tmp_path, STAYS)
    story.members[1].unfit = "10.0.0.2: torch is 2.11.0 here"
    last = await story.until(lambda event: event.kind in FINAL)
    assert (last.kind, last.text) == ("refused", "10.0.0.2: torch is 2.11.0 here")


def test_the_store_of_the_ranks_listens_at_its_own_address_only(tmp_path: Path) -> None:
    """A machine has all of 127.0.0.0/8; torch alone would listen at each of its addresses."""
    member = GangMember(Process("learner", "learner", ("true",), tmp_path / "log"), None, "node", "127.0.0.1")
    port = member.host()
    socket.create_connection(("127.0.0.1", port), 5.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5.0)
