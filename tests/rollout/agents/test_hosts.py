"""Hosts of environments and the workers that speak with them, with hosts and environments that go wrong."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from rollout.hosts.verifiers_host import Host
from rollout.tasks.environment import Relay
from rollout.tasks.programs import timed_by_server

HOST = """
import json, os, sys, time
for line in map(json.loads, sys.stdin):
    if "cancel" in line:
        print(json.dumps({"cancelled": line["cancel"]}), flush=True)
    elif line["how"] == "block":
        time.sleep(600)
    elif line["how"] == "leave":
        os._exit(3) if os.fork() else time.sleep(600)
    elif line["how"] == "long":
        sys.stdout.write("x" * (2**26 + 2**20))
        sys.stdout.flush()
    elif line["how"] == "garbage":
        print("hello", flush=True)
    elif line["how"] == "fine":
        print(json.dumps({"id": line["id"], "pid": os.getpid()}), flush=True)
"""


HEARS_S = 1.0
"""Time for a host to confirm that an episode was cancelled."""


def load() -> Any:
    """The loader: episodes are requests to the host above; one of "none" asks it for nothing."""
    relay = Relay(subprocess.Popen([sys.executable, "-c", HOST], bufsize=0, stdin=-1, stdout=-1), HEARS_S)

    async def play(how: str, generate: object) -> Any:
        if how == "none":
            return 0
        return (await relay.ask({"how": how}))["pid"]

    return timed_by_server(play, apart=False)


def hosts() -> Cage:
    function = CagedFunction("hosted", "tests.rollout.agents.test_hosts:load", [], 60.0, episodes=True)
    return Cage(function)


async def test_a_host_that_does_not_hear_of_a_cancelled_episode_is_started_again():
    async with hosts() as cage:
        first = await cage.call("fine")
        blocked = asyncio.create_task(cage.call("block"))
        beside = asyncio.create_task(cage.call("fine"))
        assert await cage.call("none") == 0  # the two before it have begun
        blocked.cancel()
        with pytest.raises(CagedError) as caught:
            await asyncio.wait_for(beside, 120)
        assert caught.value.origin == "died" and "killed by SIGKILL" in str(caught.value)
        assert await asyncio.wait_for(cage.call("fine"), 120) != first


async def test_a_host_that_hears_it_lives_on():
    async with hosts() as cage:
        first = await cage.call("fine")
        waiting = asyncio.create_task(cage.call("nothing"))
        assert await cage.call("none") == 0
        waiting.cancel()
        await asyncio.sleep(1.2 * HEARS_S)
        assert await asyncio.wait_for(cage.call("fine"), 120) == first


@pytest.mark.parametrize("how", ["long", "garbage"])
async def test_what_is_no_answer_ends_the_host(how: str):
    async with hosts() as cage:
        with pytest.raises(CagedError) as caught:
            await asyncio.wait_for(cage.call(how), 60)
        assert caught.value.origin == "died"
        assert await asyncio.wait_for(cage.call("fine"), 120)


async def test_a_host_that_ends_is_noticed_although_a_process_that_it_forked_keeps_its_pipes():
    async with hosts() as cage:
        with pytest.raises(CagedError) as caught:
            await asyncio.wait_for(cage.call("leave"), 30)
        assert caught.value.origin == "died" and "exit code 3" in str(caught.value)
        assert await asyncio.wait_for(cage.call("fine"), 120)


class OddEnvironment:
    """Stands for `Environment`: its reward is nothing that JSON can write."""

    api = "v0"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run(self, row: Any, url: str, sampling: dict[str, Any]) -> dict[str, Any]:
        return {"ok": True, "reward": {1.0}}


async def test_a_reward_that_json_cannot_write_is_answered():
    answers = io.BytesIO()
    host = Host(OddEnvironment(), answers)  # type: ignore[arg-type]
    host.running[7] = asyncio.create_task(host.play(7, {}, "", {}))
    await host.running[7]
    said = json.loads(answers.getvalue())
    assert said["id"] == 7 and said["ok"] is False and "TypeError" in said["error"] and host.running == {}


async def test_a_host_says_that_it_has_heard_of_a_cancelled_episode():
    answers, (requests, ours) = io.BytesIO(), os.pipe()
    os.write(ours, b'{"cancel": 7}\n')
    os.close(ours)
    await Host(OddEnvironment(), answers).serve(os.fdopen(requests, "rb"))  # type: ignore[arg-type]
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [{"ready": "v0"}, {"cancelled": 7}]
