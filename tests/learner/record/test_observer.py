"""Looks at servers and buffer: what a State becomes, and that a real buffer is asked again and again."""

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from learner.record.observer import Observer, servers_record
from tests.harness.buffer_process import buffer, in_loop, rollout
from tests.harness.keys import client_keys
from tests.harness.watched import make_config, state


def test_a_state_becomes_one_flat_record(tmp_path: Path) -> None:
    config = make_config(tmp_path, "rollout.tensor_parallel=2")
    record = servers_record(state(), 5.0, config, learner_gpus=4)
    assert record["kind"] == "servers" and record["time"] == 5.0 and "version" not in record
    assert record["buffer/version"] == 7 and record["buffer/items_stored"] == 20 and record["buffer/failed_reward"] == 4
    assert record["servers/known"] == 2 and record["servers/heard"] == 1, "the other one is lost"
    assert record["servers/running"] == 190.0 and record["servers/kv_usage"] == 0.8
    assert record["server/rollout-0/tokens_per_s"] == 640.0 and record["server/rollout-1/silent_s"] == 240.0
    assert (record["waiting/Take"], record["waiting/Take_s"]) == (1, 3.25)
    assert record["gpus"] == 4 + 2, "of the server that is heard"
    assert servers_record(state(), 5.0, config)["gpus"] == 0, "on a CPU"
    assert all(isinstance(value, int | float) for key, value in record.items() if key != "kind")


def test_of_very_many_servers_there_are_sums_only(tmp_path: Path) -> None:
    one = {"version": 3, "leases": 1, "silent_s": 0.0, "stats": {"running": 2.0, "limit_kv": 9.0, "stall_s": 0.5}}
    many = state(servers={f"rollout-{number}": one for number in range(500)})
    record = servers_record(many, 5.0, make_config(tmp_path))
    assert record["servers/running"] == 1000.0 and record["servers/stall_s"] == 0.5
    assert "servers/limit_kv" not in record and sum(key.startswith("server/") for key in record) == 64 * 6


@in_loop
async def test_the_buffer_is_asked_until_the_learner_ends(tmp_path: Path) -> None:
    found, enough = [], threading.Event()

    def take(record):
        found.append(record)
        if len(found) >= 3:
            enough.set()

    async with buffer() as served, rollout(served.address, "rollout-0") as client:
        await client.beat({"running": 5.0})
        config = make_config(tmp_path, f"buffer.address={served.address}", "log.servers_every_s=0.05")
        with Observer(config, client_keys("learner"), 0, take):
            assert await asyncio.to_thread(enough.wait, 50.0)
    assert found[-1]["server/rollout-0/running"] == 5.0
    assert [one["time"] for one in found] == sorted(one["time"] for one in found)


@in_loop
async def test_a_disk_that_is_full_for_a_moment_costs_a_few_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries, written = [], threading.Event()

    def take(record):
        tries.append(record)
        if len(tries) <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.set()

    async with buffer() as served:
        config = make_config(tmp_path, f"buffer.address={served.address}", "log.servers_every_s=0.05")
        with Observer(config, client_keys("learner"), 0, take):
            assert await asyncio.to_thread(written.wait, 50.0)
    assert caplog.text.count("No space left on device") == 1


def test_a_learner_whose_buffer_is_gone_ends_all_the_same(tmp_path: Path) -> None:
    with Observer(
        make_config(tmp_path, "buffer.address=tcp://127.0.0.1:9"), client_keys("learner"), 0, lambda record: None
    ):
        pass
