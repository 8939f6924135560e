"""Broken broadcasts and slow servers, over real sockets: recovery needs no memory, and no server delays another."""

import asyncio
import threading
import time
import weakref

import pytest
import torch

from learner.weights.channel import ChannelError, Rendezvous
from learner.weights.plan import Plan, dtype_name
from learner.weights.protocol import Go, RankAssignment, ServerWelcome, TensorSpec, pack
from learner.weights.receiver.follow import Receiver
from learner.weights.receiver.rounds import State
from learner.weights.receiver.staged import WeightsError
from learner.weights.receiver.staging import Staging
from tests.harness.keys import client_keys
from tests.harness.pace import paced
from tests.harness.weights_server import SPECS, WAIT_S, Addresses, StagingEngine, VersionedPolicy, config, servers
from tests.learner.weights.test_wire import a_sender, run, until_stat

CPU = torch.device("cpu")


class Crowded(Staging):
    """A Staging whose device has room for one copy. `first` replaces the receipt of its first round."""

    def __init__(self, *args, first=None):
        super().__init__(*args)
        self.first, self.allocated = first, 0

    def _allocate(self, plan, rotating):
        self.allocated += 1
        if self.allocated > 1:
            raise torch.OutOfMemoryError("no room for a second copy")
        return super()._allocate(plan, rotating)

    def _take(self, go, weights, channel):
        first, self.first = self.first, None
        if first:
            first()
            raise ChannelError("torn")
        return super()._take(go, weights, channel)


def an_engine(*firsts):
    """Make an engine with a worker for each of `firsts`."""
    engine = StagingEngine(len(firsts))
    engine.staging = [Crowded(CPU, i, engine.loader(i), first=first) for i, first in enumerate(firsts)]
    return engine


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("staging", ["full", "bucket"])
def test_a_broken_broadcast_costs_no_memory_and_delays_no_other_server(staging):
    """One server's round fails while the other's thread hangs in it. The first continues alone; the other joins once
    its only copy is free. Neither ever has two copies."""
    begun, release = threading.Event(), threading.Event()

    def hang():
        begun.set()
        release.wait(WAIT_S)

    async def test():
        with a_sender(timeout_s=2 * WAIT_S) as sender:
            addresses = Addresses(sender.address)
            stuck, torn = an_engine(None, hang), an_engine(lambda: begun.wait(WAIT_S))
            async with (
                servers(addresses, "stuck", workers=2, engine=stuck, staging=staging) as (one,),
                servers(addresses, "torn", engine=torn) as (two,),
            ):
                await until_stat(sender, "weights/members", 2.0)
                started = time.monotonic()
                sender.publish(VersionedPolicy(0), 0)
                await two.has(0)
                assert time.monotonic() - started < WAIT_S and not one.seen and not one.task.done()
                assert not stuck.staging[1].free
                release.set()
                await one.has(0)
                sender.publish(VersionedPolicy(1), 1)
                await one.has(1)
                await two.has(1)
            assert [copy.allocated for copy in (*stuck.staging, *torn.staging)] == [1, 1, 1]

    run(test())


def test_a_server_whose_thread_never_ends_does():
    """Else it would keep its policy for ever, for there are no other buckets."""
    release = threading.Event()

    async def test():
        with a_sender(timeout_s=0.6) as sender:
            engine = an_engine(lambda: release.wait(WAIT_S))
            addresses = Addresses(sender.address)
            receiver = Receiver(
                addresses.where,
                engine,
                "stuck",
                config(staging="full"),
                heartbeat_s=0.1,
                keys=client_keys(server="learner"),
            )
            following = asyncio.create_task(anext(receiver.policies()))
            await until_stat(sender, "weights/members", 1.0)
            sender.publish(VersionedPolicy(0), 0)
            with pytest.raises(WeightsError, match=r"given up \d+ s ago, and 1 worker\(s\) still hang"):
                await asyncio.wait_for(following, WAIT_S)
            release.set()

    run(test())


def a_welcome(specs):
    plan = Plan.of(specs, 1 << 20)
    tensors = [TensorSpec(name=s.name, shape=list(s.shape), dtype=dtype_name(s.dtype)) for s, *_ in plan.slots]
    trained = plan.trained.digest
    return plan, pack(
        ServerWelcome(tensors=tensors, bucket_bytes=1 << 20, digest=plan.digest, trained=trained, heartbeat_s=1.0)
    )


def test_a_thread_that_waits_for_a_group_that_never_forms_holds_no_copy():
    """The round is given up before the thread began to receive, so the copy is free at once, for another plan too."""
    staging = Staging(CPU, 0, lambda weights: None)
    plan, welcome = a_welcome(SPECS)
    staging.prepare(welcome, "auto")
    meeting = Rendezvous("127.0.0.1", 3.0)
    group = RankAssignment(epoch=1, offset=1, world=2, host=meeting.host, port=meeting.port)
    go = Go(round=1, session="s", version=1, plan=plan.digest, timeout_s=3.0, source=group)
    staging.receive(pack(go), "inproc://nobody")
    (waiting,) = staging._receipts
    assert not staging.free
    assert staging.abort() and not waiting.over.is_set()
    old = weakref.ref(staging._buckets)
    staging.prepare(a_welcome(SPECS[:3])[1], "auto")
    assert old() is None and not waiting.over.is_set(), "the copy is freed while that thread still waits"
    with pytest.raises(ChannelError, match=r"given up|did not form"):
        waiting.begin()


def test_a_round_waits_for_all_earlier_rounds_that_hang():
    begun, release, reports = threading.Event(), threading.Event(), []
    staging = Crowded(CPU, 0, lambda weights: None, first=lambda: begun.set() or release.wait(WAIT_S))
    plan, welcome = a_welcome(SPECS)
    staging.prepare(welcome, "auto")
    staging._channel_for = lambda go: None
    go = Go(round=1, session="s", version=1, plan=plan.digest, timeout_s=0.2, source="/nowhere/v000001-0")
    for number in (1, 2, 3):
        staging.receive(pack(go.model_copy(update={"round": number})), "inproc://nobody")
        reports.append(staging._receipts[-1])
        assert begun.wait(WAIT_S)
    assert not staging.free and reports[0].writes
    assert reports[1].over.wait(WAIT_S) and reports[2].over.wait(WAIT_S), "neither begins; both end at their timeout"
    assert not staging.free and staging._version is None
    release.set()
    assert reports[0].over.wait(WAIT_S) and staging.free


def test_a_server_that_is_slow_to_be_ready_holds_no_version_from_the_others(caplog):
    caplog.set_level("INFO")

    async def test():
        with a_sender(timeout_s=2 * WAIT_S) as sender:
            async with servers(Addresses(sender.address), "prompt", "slow") as (prompt, slow):
                await until_stat(sender, "weights/members", 2.0)
                sender.publish(VersionedPolicy(0), 0)
                await prompt.has(0)
                await slow.has(0)
                await until_stat(sender, "weights/servers", 2.0)
                slow.receiver._rounds.state = State.LOADING
                sender.publish(VersionedPolicy(1), 1)
                await prompt.has(1)
                await until_stat(sender, "weights/version", 1.0)
                for version in (2, 3):
                    sender.publish(VersionedPolicy(version), version)
                    await prompt.has(version)  # no round waits for a late server
                    await until_stat(sender, "weights/version", float(version))
                slow.receiver._rounds.loaded()
                await slow.has(3)
                assert slow.seen == [0, 3] and sender.stats()["weights/failed"] == 0
        late = [line for line in lines_of(caplog) if "does not wait for slow" in line]
        assert len(late) == 1, "it is late once, not at each version"

    run(test())


def test_a_server_that_is_slow_to_load_holds_no_version_from_the_others():
    async def test():
        with a_sender(timeout_s=2 * WAIT_S) as sender:
            async with servers(Addresses(sender.address), "prompt", "slow") as (prompt, slow):
                await until_stat(sender, "weights/members", 2.0)
                gate, collective = asyncio.Event(), slow.engine.collective

                async def gated(method, *args, timeout_s):
                    if method == "rl_load":
                        await gate.wait()
                    return await collective(method, *args, timeout_s=timeout_s)

                slow.engine.collective = gated
                for version in (0, 1, 2):
                    await asyncio.to_thread(sender.publish, VersionedPolicy(version), version)
                    await prompt.has(version)
                gate.set()
                await slow.has(2)
                assert slow.seen == [0, 2] and sender.stats()["weights/failed"] == 0

    run(test())


def test_a_server_that_is_never_ready_is_left_out_after_its_own_timeout(caplog):
    """Rounds that continue without it do not restart its timeout."""

    async def test():
        with a_sender(timeout_s=paced(2.0), probe_every=0) as sender:
            async with servers(Addresses(sender.address), "prompt", "slow") as (prompt, slow):
                await until_stat(sender, "weights/members", 2.0)
                slow.receiver._rounds.state = State.LOADING
                version = -1
                while not sender.stats()["weights/failed"]:
                    version += 1
                    await asyncio.to_thread(sender.publish, VersionedPolicy(version), version)
                    await prompt.has(version)
                assert version > 1
                slow.receiver._rounds.loaded()
                await slow.has(version)  # it has joined again
        assert any("slow is left out: no Ready in round" in line for line in lines_of(caplog))

    run(test())
