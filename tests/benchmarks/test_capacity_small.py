"""`python -m benchmarks.capacity --small` runs to its end: the real buffer, its crowds, a kill; a crowd outlives a
buffer as a `Connection` does; what hangs or dies ends the command in words."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.capacity.__main__ import SMALL, CrowdProcess, Measured, NotMeasured
from benchmarks.capacity.crowd import Crowd
from buffer.wire.message import Message
from buffer.wire.protocol import State, Take
from tests.harness.buffer_process import buffer, group, in_loop, make_requests, rollout
from tests.harness.keys import client_keys

FIGURES = ("groups", "tokens", "Put, p50", "Put, p99", "Put during a Take", "heartbeat", "memory", "open files")


@pytest.mark.long
def test_the_benchmark_of_many_clients_works(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.capacity", "--small", "--share-prompts", "--write"]
    done = subprocess.run([*command, str(tmp_path / "capacity.json")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "capacity.json").read_text())
    assert result["size"]["servers"] == 64 and result["command"].endswith("--small --share-prompts")
    values = {row["what"]: row["value"] for row in result["rows"]}
    for phase in ("as fast as it goes", "at a tenth of that", "at a tenth, a batch taken over and over"):
        for figure in FIGURES:
            assert any(what.startswith(phase) and figure in what for what in values), (phase, figure)
    (trained,) = [what for what in values if what.startswith("as fast as it goes: Trained of each rank")]
    said = int(trained.rpartition(" ")[2])
    assert said and said % SMALL["ranks"] == 0, "every rank says it, as in a run"
    assert values["as fast as it goes: groups"] > 0
    assert values["killed and serving again"] > 0
    assert all(row["what"] in done.stdout for row in result["rows"])


@in_loop
async def test_a_crowd_whose_requests_were_lost_with_the_buffer_gets_its_answers_from_the_next_one(
    tmp_path: Path,
) -> None:
    """A rank that waits in a Take sends nothing by itself, and once counted as gone for ever."""
    path, heard = tmp_path / "buffer.sqlite", asyncio.Event()
    parts: list[int] = []

    def on_answer(client: int, number: int, answer: Message, seconds: float, size: int) -> None:
        parts.append(client)
        if len(parts) == 3:
            heard.set()

    async with buffer(make_requests(path, groups=1)) as it:
        crowd = Crowd(it.address, "f" * 16, "learner", 3, on_answer, "t", client_keys("learner"))
        crowd.start()
        await crowd.all_welcome()
        for rank in range(3):
            crowd.send(rank, Take(version=0, rank=rank, world=3))
        while len(list(it.requests._parked)) < 3:
            await asyncio.sleep(0.01)
    async with buffer(make_requests(path, groups=1), it.address) as again, rollout(again.address) as samples:
        (item,) = await samples.ask(1) or []
        assert (await samples.put(item, group(item.item))).accepted
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(heard.wait()), crowd.failed]
        await asyncio.wait(ends, timeout=60, return_when="FIRST_COMPLETED")
        assert sorted(parts) == [0, 1, 2]
        crowd.close()


@in_loop
async def test_what_a_client_is_refused_ends_the_crowd() -> None:
    async with buffer() as it:
        crowd = Crowd(it.address, "another config", "rollout", 1, lambda *heard: None, "t", client_keys())
        crowd.start()
        with pytest.raises(RuntimeError, match="has config another config"):
            await crowd.all_welcome()
        crowd.close()


def measured(folder: Path) -> Measured:
    given: dict[str, Any] = SMALL | {"rows": 10, "start": "t", "heartbeat_s": 2.0, "share_prompts": False}
    return Measured(given, folder)


@in_loop
async def test_a_phase_that_does_not_end_says_its_name_and_the_last_words_of_the_buffer(tmp_path: Path) -> None:
    it = measured(tmp_path)
    it.buffer = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"])
    await asyncio.to_thread(it.buffer.wait)
    (tmp_path / "buffer.log").write_text("first\nlast word\n")
    with pytest.raises(
        NotMeasured, match=r"(?s)as fast as it goes: not over after 0.01 s; the buffer ended with 3.*last word"
    ):
        await it.within(0.01, "as fast as it goes", asyncio.Event().wait())


@in_loop
async def test_a_crowd_that_dies_ends_the_phase_that_waits_for_it(tmp_path: Path) -> None:
    it = measured(tmp_path)
    with pytest.raises(NotMeasured, match="Hello: the process of the servers ended"):
        await it.within(60, "Hello", CrowdProcess("servers", it.address, it.fingerprint, {}).__aenter__())


@in_loop
async def test_settled_is_when_no_put_is_under_way_and_no_batch_is_left(tmp_path: Path) -> None:
    it = measured(tmp_path)
    it.given["groups"] = 4
    told: list[dict[str, Any]] = []
    under_way = iter((1, 0, 0, 0))
    counts = iter(
        (dict(stored=9, batched=0), dict(stored=1, batched=4), dict(stored=4, batched=0), dict(stored=3, batched=0))
    )

    class Servers(CrowdProcess):
        def tell(self, **command: Any) -> None:
            told.append(command)

        async def hear(self) -> dict[str, Any]:
            return {"under_way": next(under_way)}

    async def answer() -> None:
        while True:
            made: Any = State.model_construct
            state = made(counts=next(counts))
            for _ in range(2):
                while it.awaited is None or it.awaited.done():
                    await asyncio.sleep(0)
                it.awaited.set_result(state)

    answering = asyncio.create_task(answer())
    await it.settle(Servers("servers", it.address, it.fingerprint, {}))
    answering.cancel()
    assert told[0] == {"rate": 0.0} and next(counts, None) is None and next(under_way, None) is None
