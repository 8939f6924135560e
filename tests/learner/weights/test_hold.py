"""A server that evaluates holds newer versions back: no round waits for it, it does not count as dead, and it continues
with the newest version. The limit for answers (`weights.timeout_s`) is short here, and each test holds for longer."""

import asyncio
import time
from contextlib import contextmanager

import pytest
import torch

from learner.weights.receiver.rounds import State
from learner.weights.sender.publish import Sender
from tests.harness.keys import server_keys
from tests.harness.pace import paced
from tests.harness.weights_server import (
    HEARTBEAT_S,
    SPECS,
    WAIT_S,
    Addresses,
    VersionedPolicy,
    config,
    servers,
)


@contextmanager
def a_sender(timeout_s=60.0):
    sender = Sender(
        *(SPECS, config(timeout_s=timeout_s), 0, torch.device("cpu")),
        heartbeat_s=HEARTBEAT_S,
        keys=server_keys("learner"),
    )
    try:
        yield sender
    finally:
        sender.close()


@pytest.mark.parametrize("staging", ["full", pytest.param("bucket", marks=pytest.mark.long)])
def test_others_follow_while_one_holds_longer_than_any_answer_may_take(staging: str):
    timeout_s = paced(2.0)

    async def test():
        with a_sender(timeout_s) as sender:
            async with servers(Addresses(sender.address), "rollout-0", "rollout-1", staging=staging) as (one, two):
                one.hold.add(1)
                for version in (0, 1):
                    sender.publish(VersionedPolicy(version), version)
                    await one.has(version)
                    await two.has(version)
                began, slowest = time.monotonic(), 0.0
                for version in range(2, 12):
                    published = time.monotonic()
                    sender.publish(VersionedPolicy(version), version)
                    await two.has(version)
                    slowest = max(slowest, time.monotonic() - published)
                    await asyncio.sleep(timeout_s * 0.13)
                assert time.monotonic() - began > timeout_s and slowest < timeout_s, "no round waits for who holds"
                assert one.seen == [0, 1] and one.engine.holds(1)
                assert {member.name for member in sender._distributor.members} == {"rollout-0", "rollout-1"}
                one.receiver.release()
                await one.has(11)
                assert one.seen == [0, 1, 11]
                assert sender.stats()["weights/failed"] == 0

    asyncio.run(test())


def test_a_learner_that_closes_does_not_wait_for_who_holds():
    async def test():
        with a_sender() as sender:
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                one.hold.add(0)
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
                sender.publish(VersionedPolicy(1), 1)
                began = time.monotonic()
                await asyncio.to_thread(sender.close, 2.0 * WAIT_S)
                assert time.monotonic() - began < WAIT_S

    asyncio.run(test())


def test_between_rounds_it_may_hold_at_any_time_but_not_with_a_version_on_its_way():
    timeout_s = paced(2.0)

    async def test():
        with a_sender(timeout_s) as sender:
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
                async with asyncio.timeout(WAIT_S):
                    while not one.receiver.hold():  # until the round is over
                        await asyncio.sleep(0.01)
                sender.publish(VersionedPolicy(1), 1)
                await asyncio.sleep(timeout_s * 1.3)
                assert one.seen == [0] and sender.stats()["weights/failed"] == 0
                one.receiver.release()
                await one.has(1)
                one.receiver._rounds.state = State.PLEDGED  # Ready was said, Go has not come
                assert not one.receiver.hold()

    asyncio.run(test())


def test_another_learner_learns_that_it_holds():
    timeout_s = paced(2.0)

    async def test():
        with a_sender() as first:
            addresses = Addresses(first.address)
            async with servers(addresses, "rollout-0", "rollout-1") as (one, two):
                one.hold.add(3)
                first.publish(VersionedPolicy(3), 3)
                await one.has(3)
                await two.has(3)
                first.close()
                with a_sender(timeout_s) as second:
                    await addresses.set(second.address)
                    second.publish(VersionedPolicy(2), 2)
                    await two.has(2)
                    await asyncio.sleep(timeout_s * 1.3)
                    assert one.seen == [3] and second.stats()["weights/failed"] == 0
                    one.receiver.release()
                    await one.has(2)

    asyncio.run(test())
