"""The ranks of a learner that each send their own rows, and servers, over real sockets, stores and gloo groups: every
worker gets the bytes that it gets from a gathered copy, whole versions or none, whoever dies when."""

import asyncio
import signal
import time
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import TCPStore

from learner.weights.buckets import PublishedPolicy
from learner.weights.channel import ChannelError
from learner.weights.plan import Spec
from learner.weights.protocol import RankAssignment, RowsBegun, RowsSent, SendRows
from learner.weights.sender.distributor import ATTEMPTS
from learner.weights.sender.publish import Sender
from learner.weights.sender.row_broadcast import RowBroadcast
from tests.harness.keys import server_keys
from tests.harness.lanes import long_but
from tests.harness.row_ranks import ForkedRank, RowLearner, row_learner, run_learner, run_rank, sending_ranks
from tests.harness.scenes import GRACE_S
from tests.harness.server_process import ServerProcess
from tests.harness.weights_server import (
    HEARTBEAT_S,
    SPECS,
    WAIT_S,
    Addresses,
    StagingEngine,
    VersionedPolicy,
    config,
    servers,
)
from tests.learner.weights.test_wire import a_process, line, run, until_stat

ODD = [
    *SPECS,
    Spec("scalar", (1,), torch.float32),
    Spec("row", (1, 33), torch.bfloat16),
    Spec("pair", (2,), torch.bfloat16),
]


PATIENT_S = 60.0
"""A timeout that a busy machine does not reach, where no server or rank fails."""


def publish(learner, version):
    return asyncio.to_thread(learner.publish, version)


def an_engine(specs, workers=1):
    engine = StagingEngine(workers)
    engine.specs = specs
    return engine


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_gets_what_a_gathered_copy_has(ranks, workers):
    """Staged and bucket by bucket, at once; uneven rows, rows that only one rank has, tensors that each rank has."""

    async def test():
        with row_learner(ranks, ODD, whole=("norm",), timeout_s=PATIENT_S) as learner:
            addresses = Addresses(learner.address)
            async with (
                servers(addresses, "full", engine=an_engine(ODD, workers)) as (full,),
                servers(addresses, "bucket", staging="bucket", engine=an_engine(ODD, workers)) as (bucket,),
            ):
                await until_stat(learner.sender, "weights/members", 2.0)
                for version in (0, 1, 2):
                    await publish(learner, version)
                    await full.has(version)
                    await bucket.has(version)
                assert full.engine.pauses == 0 and bucket.engine.pauses >= 3
                assert [each._buckets.rotating for each in bucket.engine.staging] == [True] * workers
            assert learner.sender.stats()["weights/failed"] == 0
            pools = [learner.sender._copies, *(other.copies for other in learner.others)]
            sizes = [sum(copy.weights.num_bytes for copy in pool._copies) for pool in pools]
            assert max(sizes) < min(sizes) + 2 * 40_000 * len(learner.sender._copies.plan.slots), "none holds a whole"

    run(test())


def test_a_rank_without_rows_takes_part():
    """Three rows over four ranks: the last rank has none, of the trained weights or of any."""
    specs = [Spec("frozen", (9, 8), torch.float32), *(Spec(f"w{i}", (3, 5), torch.bfloat16) for i in range(3))]

    async def test():
        for frozen in (("frozen",), ()):
            with row_learner(4, specs[len(frozen) == 0 :], frozen=frozen, timeout_s=PATIENT_S) as learner:
                engine = an_engine(specs[len(frozen) == 0 :])
                async with servers(Addresses(learner.address), "one", engine=engine) as (one,):
                    for version in (0, 1):
                        await publish(learner, version)
                        await one.has(version)
                assert learner.sender.stats()["weights/failed"] == 0

    run(test())


def test_frozen_weights_are_sent_once_and_a_newcomer_gets_everything():
    frozen = ("embed", "layer.1", "norm")

    async def test():
        with row_learner(2, SPECS, frozen=frozen, timeout_s=PATIENT_S) as learner:
            addresses = Addresses(learner.address)
            async with servers(addresses, "one") as (one,):
                for version in (0, 1):
                    await publish(learner, version)
                    await one.has(version)
                async with servers(addresses, "late", staging="bucket") as (late,):
                    await late.has(1)
                    await publish(learner, 2)
                    await one.has(2)
                    await late.has(2)
                assert set(one.engine.loads[-1]).isdisjoint(frozen) and set(one.engine.loads[0]) >= set(frozen)
            assert learner.sender.stats()["weights/failed"] == 0

    run(test())


def test_a_server_goes_from_a_gathering_learner_to_ranks_that_send_and_back():
    """Its room is made anew each time: who sends is part of the plan."""

    @contextmanager
    def gathering():
        sender = Sender(SPECS, config(), 0, torch.device("cpu"), heartbeat_s=HEARTBEAT_S, keys=server_keys("learner"))
        try:
            yield sender
        finally:
            sender.close()

    async def test():
        addresses = Addresses()
        async with servers(addresses, "rollout-0") as (one,):
            with gathering() as sender:
                await addresses.set(sender.address)
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
                assert not one.engine.staging[0]._buckets.scratch
            with row_learner(3, timeout_s=PATIENT_S) as learner:
                await addresses.set(learner.address)
                await publish(learner, 1)
                await one.has(1)
                assert len(one.engine.staging[0]._buckets.scratch) == 2
            with gathering() as sender:
                await addresses.set(sender.address)
                sender.publish(VersionedPolicy(2), 2)
                await one.has(2)

    run(test())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mode", long_but(["go", "half"], 1))
def test_a_server_that_is_killed_costs_the_others_no_version(mode):
    async def test():
        with row_learner(2) as learner:
            async with (
                servers(Addresses(learner.address), "rollout-0") as (one,),
                a_process(learner.address, "rollout-9", mode) as victim,
            ):
                await until_stat(learner.sender, "weights/members", 2.0)
                await publish(learner, 0)
                assert await line(victim) == mode
                victim.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                await one.has(0)
                assert time.monotonic() - killed < config().timeout_s + GRACE_S
                started = time.monotonic()
                await publish(learner, 1)
                assert time.monotonic() - started < config().timeout_s  # it waits for no server
                await one.has(1)

    run(test())


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_a_server_that_stalls_in_the_broadcast_costs_one_timeout():
    async def test():
        with row_learner(2) as learner:
            async with servers(Addresses(learner.address), "rollout-0") as (one,):
                stalled = await asyncio.to_thread(ServerProcess, learner.address, "rollout-9", "stall", "cpu", "auto")
                try:
                    await until_stat(learner.sender, "weights/members", 2.0)
                    await publish(learner, 0)
                    assert await line(stalled) == "stall"
                    started = time.monotonic()
                    await one.has(0)
                    assert time.monotonic() - started < config().timeout_s + GRACE_S
                    assert await line(stalled) == "version 0 right"
                finally:
                    await asyncio.to_thread(stalled.kill)

    run(test())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mode", long_but(["go", "half", "sums"], 1, 2))
def test_a_rank_that_is_killed_leaves_servers_with_their_whole_version(mode):
    """The learner ends as a whole then; the next one reaches them."""

    async def test():
        addresses = Addresses()
        async with servers(addresses, "rollout-0", "rollout-1") as both:
            learner = RowLearner(2, here=1)
            with ForkedRank(run_rank, learner.store.port, 1, 2, mode, 1) as rank:
                await addresses.set(learner.address)
                await until_stat(learner.sender, "weights/members", 2.0)
                await publish(learner, 0)
                for one in both:
                    await one.has(0)
                publishing = asyncio.create_task(publish(learner, 1))
                assert await asyncio.to_thread(rank.line) == mode
                rank.kill()
                await publishing
                async with asyncio.timeout(WAIT_S):
                    while not learner.sender.stats()["weights/failed"]:
                        await asyncio.sleep(0.05)
            assert all(one.engine.holds(0) and one.seen == [0] for one in both)
            await asyncio.to_thread(learner.close)
            with row_learner(2) as successor:
                await addresses.set(successor.address)
                await publish(successor, 1)
                for one in both:
                    await one.has(1)

    run(test())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mode", long_but(["go", "half", "sums"], 1))
def test_a_learner_that_is_killed_leaves_servers_with_their_whole_version(mode):
    async def test():
        addresses = Addresses()
        async with servers(addresses, "staged") as (staged,), servers(addresses, "bucket", staging="bucket") as (slow,):
            with ForkedRank(run_learner, 2, mode, 1) as learner:
                await addresses.set(await asyncio.to_thread(learner.line))
                await staged.has(0)
                await slow.has(0)
                assert await asyncio.to_thread(learner.line) == mode
                await asyncio.sleep(0.1)
            assert staged.engine.holds(0) and staged.seen == [0], "never a part of version 1"
            with row_learner(3) as successor:
                await addresses.set(successor.address)
                await publish(successor, 5)
                await staged.has(5)
                await slow.has(5)

    run(test())


def test_servers_are_not_refused_for_what_a_rank_fails_at():
    """Round after round fails for all of them, and none of it is their fault; the rank continues, and so do they."""

    async def test():
        with row_learner(2) as learner:
            other, orders = learner.others[0], []
            start = other._start

            def refuse(order):
                orders.append(order)
                if len(orders) > ATTEMPTS + 1:
                    return start(order)
                other._answers.post(RowsSent(rank=1, number=order.number, reason="not now", refused=True))

            other._start = refuse
            async with servers(Addresses(learner.address), "one", "two") as both:
                await until_stat(learner.sender, "weights/members", 2.0)
                await publish(learner, 0)
                for one in both:
                    await one.has(0)
            assert len(orders) > ATTEMPTS + 1 and learner.sender.stats()["weights/failed"] >= ATTEMPTS
            assert not learner.sender._distributor._suspects._until

    run(test())


class FormedGroup:
    """Rank 0's group, in which its own rows are being sent for ever."""

    backend, members = "gloo", ()
    formed = RankAssignment(epoch=1, offset=0, world=2, host="127.0.0.1", port=1)

    def send(self, policy, copies, digest):
        return asyncio.get_running_loop().create_future()


def test_a_rank_that_does_not_get_its_order_is_at_fault():
    async def test():
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        transport = RowBroadcast(FormedGroup(), sending_ranks(store, 0, 2), 1.0)
        sending = transport.send(PublishedPolicy(None, 7), None, "plan")
        assert transport.at_fault
        transport._on_answer(RowsBegun(rank=1, number=transport._number))
        assert not transport.at_fault
        transport._on_answer(RowsSent(rank=1, number=transport._number - 1, reason="stale", refused=True))
        assert not transport.at_fault and not sending.done()
        transport._on_answer(RowsSent(rank=1, number=transport._number, reason="why"))
        with pytest.raises(ChannelError, match="why"):
            await sending

    run(test())


def test_a_rank_that_has_overwritten_a_version_sends_none_of_it():
    """Rows of two versions would pass every checksum, whose sums are those of the rows that were sent."""
    with row_learner(2) as learner:
        other, group = learner.others[0], learner.sender._distributor._transport._group
        for version in (0, 1, 2):
            learner.publish(version)
        order = SendRows(
            number=1,
            version=0,
            plan=other.copies.plan.digest,
            timeout_s=1.0,
            source={
                "epoch": 1,
                "offset": 0,
                "world": 1,
                "host": group._rendezvous.host,
                "port": group._rendezvous.port,
            },
        )
        answers = []
        other._answers.post = answers.append
        other._send(order, FormedChannel())
        assert answers[0].refused
        assert "rank 1: version 0 is not among those that this rank holds (2, 1)" in answers[0].reason
        other._sum(order)
        assert len(answers) == 1


class FormedChannel:
    """A group that is formed, and must not be used."""

    def connect(self):
        pass


def test_a_rank_waits_for_a_version_that_it_has_not_published_yet():
    with row_learner(2) as learner:
        learner.publish(0)
        copies = learner.others[0].copies
        with pytest.raises(LookupError, match="version 1 is not among"), copies.hold_version(1, 0.05):
            pass
        with copies.hold_version(0, 0.05) as held:
            assert held.version == 0
            with pytest.raises(TimeoutError, match="the rows of version 0 were still being sent"):
                copies.take(0, 0.05)


def test_what_ends_a_thread_of_a_rank_ends_its_next_publication():
    with row_learner(2, timeout_s=PATIENT_S) as learner:
        learner.others[0]._guard(lambda: 1 / 0)
        policy = learner.policies(0)[1]
        with pytest.raises(ZeroDivisionError):
            learner.others[0].publish(policy, 0)
