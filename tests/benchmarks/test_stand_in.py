"""`benchmarks.rollout` and `benchmarks.loop` see the batches that the learner's stand-in takes: the real buffer and the
real stand-in, and a server of the test that stores groups."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.runs.processes import Processes, run_file
from buffer.curve import client_keys_for
from buffer.wire.client import RolloutClient
from buffer.wire.connection import Connection
from configs.resume import fingerprint
from tests.harness.buffer_process import sample

BATCHES, GROUPS, SAMPLES, TOKENS = 3, 2, 2, 4


async def serve_groups(run: Processes) -> None:
    """Store the groups of so many batches, as a rollout server does."""
    address, print_ = run.config.buffer.address, fingerprint(run.config)
    keys = client_keys_for(address, run.config.run.path, "rollout")
    async with asyncio.timeout(240), Connection(address, "rollout-0", "rollout", print_, keys=keys) as connection:
        server, left = RolloutClient(connection, lambda: 0), BATCHES * GROUPS
        while left:
            for item in await server.ask(left) or []:
                stored = await server.put(item, [sample(tokens=TOKENS) for _ in range(SAMPLES)])
                assert stored.accepted
                left -= 1


@pytest.mark.long
def test_batches_that_the_stand_in_takes_are_seen(tmp_path: Path) -> None:
    batch = {"groups": GROUPS, "samples": SAMPLES, "max_staleness": 1000}
    run = Processes(run_file(tmp_path, "run", "speck", batch=batch, learner={"threads": 1, "device": "cpu"}), {})
    with run:
        run.start("buffer", "buffer")
        run.start("learner", "benchmarks.runs.stand_in", "1e9", "0")
        asyncio.run(serve_groups(run))
        run.wait("the batches", lambda: len(run.records("batches.jsonl")) >= BATCHES, 240.0)
        records = run.records("batches.jsonl")
    assert [record["version"] for record in records] == list(range(BATCHES))
    assert {record["samples"] for record in records} == {GROUPS * SAMPLES}
    sampled = records[0]["tokens"]
    assert sampled > 0 and all(record["tokens"] == sampled and record["steady"] for record in records)
