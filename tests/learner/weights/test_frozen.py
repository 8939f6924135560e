"""Frozen weights on the wire: each server gets them once, whatever happens to it, to others or to the learner."""

import asyncio
import hashlib
import signal
import threading
from contextlib import contextmanager
from itertools import islice

import pytest
import torch

from learner.weights.channel import ChannelError
from learner.weights.plan import Spec
from learner.weights.protocol import Checksums, Go
from learner.weights.receiver import staging as receiving
from learner.weights.receiver.staged import WeightsError
from learner.weights.sender.publish import Follower, Sender
from tests.harness.keys import server_keys
from tests.harness.pace import paced
from tests.harness.scenes import intercept
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

CPU = torch.device("cpu")
FROZEN = {"embed", "layer.1", "norm"}
"""The first, one in the middle and the last."""
WHOLE = [*(s.name for s in SPECS if s.name in FROZEN), *(s.name for s in SPECS if s.name not in FROZEN)]
TRAINED = [spec.name for spec in SPECS if spec.name not in FROZEN]


class Learner:
    """A sender of a policy with frozen weights; `sent`: the servers that were sent a Go, and for which plan."""

    def __init__(self, specs=SPECS, frozen=FROZEN, folder=None, **keys):
        self.sender = Sender(
            *(specs, config(**keys), 0, CPU),
            heartbeat_s=HEARTBEAT_S,
            folder=folder,
            frozen=frozen,
            keys=server_keys("learner"),
        )
        self.sent, self.frozen, self.address = [], frozen, self.sender.address
        plan = self.sender._copies.plan
        names = {plan.trained.digest: "trained", plan.digest: "whole"}

        def note(member, message):
            if isinstance(message, Go):
                self.sent.append((member.name, message.version, names[message.plan]))
            return message

        intercept(self.sender, note)

    def publish(self, version, content=None):
        self.sender.publish(VersionedPolicy(version if content is None else content, frozen=self.frozen), version)


@contextmanager
def a_learner(**keys):
    learner = Learner(**keys)
    try:
        yield learner
    finally:
        learner.sender.close()


@pytest.mark.parametrize("transport", ["broadcast", "safetensors"])
@pytest.mark.parametrize("staging", ["full", "bucket"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_frozen_weights_come_with_the_first_version_only(transport, staging, workers, tmp_path):
    async def test():
        with a_learner(transport=transport, folder=tmp_path / "weights") as learner:
            async with servers(Addresses(learner.address), "a", workers=workers, staging=staging) as (one,):
                for version in (0, 1, 2):
                    learner.publish(version)
                    await one.has(version)
                assert one.engine.loads == [WHOLE] * workers + [TRAINED] * 2 * workers
            assert learner.sent == [("a", 0, "whole"), ("a", 1, "trained"), ("a", 2, "trained")]
            assert learner.sender.stats()["weights/failed"] == 0

    run(test())


@pytest.mark.parametrize("staging", ["full", "bucket"])
def test_a_newcomer_in_mid_run_gets_everything_and_the_others_do_not(staging):
    async def test():
        with a_learner() as learner:
            addresses = Addresses(learner.address)
            async with servers(addresses, "a", staging=staging) as (one,):
                learner.publish(0)
                await one.has(0)
                async with servers(addresses, "b", staging=staging) as (late,):
                    await late.has(0)
                    learner.publish(1)
                    await one.has(1)
                    await late.has(1)
                    assert late.engine.loads == [WHOLE, TRAINED]
                assert one.engine.loads == [WHOLE, TRAINED]
        assert sorted(learner.sent) == [("a", 0, "whole"), ("a", 1, "trained"), ("b", 0, "whole"), ("b", 1, "trained")]

    run(test())


def test_a_newcomer_and_a_member_that_lack_one_version_get_it_in_two_rounds():
    async def test():
        with a_learner() as learner:
            addresses = Addresses(learner.address)
            async with servers(addresses, "a") as (one,):
                learner.publish(0)
                await one.has(0)
                held = asyncio.Event()
                collective = one.engine.collective

                async def slow(method, *args, timeout_s):
                    if method == "rl_load":
                        await held.wait()
                    return await collective(method, *args, timeout_s=timeout_s)

                one.engine.collective = slow
                learner.publish(1)  # is being loaded when the newcomer and the next version come
                async with servers(addresses, "b") as (late,):
                    await until_stat(learner.sender, "weights/members", 2.0)
                    await asyncio.to_thread(learner.publish, 2)
                    held.set()
                    await one.has(2)
                    await late.has(2)
        assert learner.sent[1] == ("a", 1, "trained")
        assert sorted(learner.sent[2:]) == [("a", 2, "trained"), ("b", 2, "whole")]

    run(test())


@pytest.mark.xdist_group("ranks")
def test_a_server_killed_between_everything_and_the_next_version_gets_everything_again():
    async def test():
        with a_learner() as learner:
            async with servers(Addresses(learner.address), "a") as (one,):
                for number, version in enumerate((0, 1)):
                    async with a_process(learner.address, "b", "none") as process:
                        await until_stat(learner.sender, "weights/members", 2.0)
                        if number == 0:
                            learner.publish(version)
                        assert await line(process) == "version 0 right"
                        await one.has(0)
                        process.send_signal(signal.SIGKILL)
                        await until_stat(learner.sender, "weights/members", 1.0)
                learner.publish(1)
                await one.has(1)
        assert sorted(learner.sent) == [("a", 0, "whole"), ("a", 1, "trained"), ("b", 0, "whole"), ("b", 0, "whole")]

    run(test())


@pytest.mark.parametrize("restored", [3, 5], ids=["another version", "the same version, other weights"])
@pytest.mark.parametrize("transport", ["broadcast", "safetensors"])
def test_another_learner_sends_everything_to_all(restored, transport, tmp_path):
    """It went back to a checkpoint, so version numbers come again with other weights."""

    async def test():
        addresses = Addresses()
        keys = {"transport": transport, "folder": tmp_path / "weights", "probe_every": 0}
        async with servers(addresses, "a", "b", staging="full") as (one, two):
            with a_learner(**keys) as learner:
                await addresses.set(learner.address)
                for version in (4, 5):
                    learner.publish(version)
                    await one.has(version)
                    await two.has(version)
            with a_learner(**keys) as learner:
                learner.publish(restored, content=77)
                await addresses.set(learner.address)
                async with asyncio.timeout(WAIT_S):
                    while not (one.engine.holds(77) and two.engine.holds(77)):
                        await asyncio.sleep(0.02)
                learner.publish(restored + 1)
                await one.has(restored + 1)
                await two.has(restored + 1)
            assert one.engine.loads == two.engine.loads == [WHOLE, TRAINED, WHOLE, TRAINED]
        if transport == "safetensors":
            assert len(list((tmp_path / "weights").glob("*frozen*"))) == 1, "the first learner's are removed"

    run(test())


def test_a_member_that_was_left_out_holds_them_still():
    async def test():
        with a_learner() as learner:
            async with servers(Addresses(learner.address), "a") as (one,):
                learner.publish(0)
                await one.has(0)
                members = learner.sender._distributor.members
                members._remove(next(iter(members)))  # as after a cut network
                learner.publish(1)
                await one.has(1)
        assert learner.sent == [("a", 0, "whole"), ("a", 1, "trained")]

    run(test())


def test_what_was_never_verified_is_not_held():
    """The checksums of the first version get lost: nothing was loaded, so everything comes again."""
    lost = []

    def lose(member, message):
        if isinstance(message, Checksums) and not lost:
            return lost.append(message)
        return message

    async def test():
        with a_learner(timeout_s=paced(1.0)) as learner:
            intercept(learner.sender, lose)
            async with servers(Addresses(learner.address), "a") as (one,):
                learner.publish(0)
                await one.has(0)
                learner.publish(1)
                await one.has(1)
                assert one.engine.loads == [WHOLE, TRAINED]
        assert lost and learner.sent == [("a", 0, "whole"), ("a", 0, "whole"), ("a", 1, "trained")]

    run(test())


@pytest.mark.parametrize("staging", ["full", "bucket"])
def test_a_thread_that_has_reported_does_not_hang(staging, monkeypatch):
    """The next round may begin before the thread of the last one has ended, and uses the same group."""
    told, over = receiving.tell, threading.Event()

    def tell(notify, message):
        told(notify, message)
        over.wait(WAIT_S)

    monkeypatch.setattr(receiving, "tell", tell)

    async def test():
        with a_learner() as learner:
            async with servers(Addresses(learner.address), "a", staging=staging) as (one,):
                try:
                    for version in (0, 1):
                        learner.publish(version)
                        await one.has(version)
                finally:
                    over.set()
            assert learner.sent == [("a", 0, "whole"), ("a", 1, "trained")]
            assert learner.sender.stats()["weights/failed"] == 0

    run(test())


class TornOnce(StagingEngine):
    """An engine whose first broadcast after `torn_after` breaks in the middle."""

    def __init__(self, torn_after):
        self.torn_after = torn_after
        super().__init__()

    def loader(self, worker):
        whole = super().loader(worker)

        def load(weights):
            if self.version == self.torn_after:
                self.torn_after = None
                whole(islice(weights, 4))
                raise ChannelError("torn")
            return whole(weights)

        return load


@pytest.mark.parametrize(
    ("torn_after", "loads"), [(-1, [WHOLE[:4], WHOLE, TRAINED]), (0, [WHOLE, TRAINED[:4], TRAINED])]
)
def test_a_torn_broadcast_into_place_is_sent_again_as_it_was(torn_after, loads):
    async def test():
        with a_learner() as learner:
            engine = TornOnce(torn_after)
            async with servers(Addresses(learner.address), "a", staging="bucket", engine=engine) as (one,):
                for version in (0, 1):
                    learner.publish(version)
                    await one.has(version)
            assert one.engine.loads == loads

    run(test())


def test_they_are_gathered_once_on_every_rank_and_written_once(tmp_path):
    with a_learner(transport="safetensors", folder=tmp_path / "weights") as learner:
        follower = Follower(SPECS, config(), 0, frozen=FROZEN)
        for version in (0, 1, 2):
            policies = [VersionedPolicy(version, frozen=FROZEN) for _ in range(2)]
            learner.sender.publish(policies[0], version)
            follower.publish(policies[1], version)
            expected = [spec.name for spec in SPECS] if version == 0 else TRAINED
            assert policies[0].gathered == policies[1].gathered == expected
        first, second = (copy.weights for copy in learner.sender._copies._copies)
        frozen = first.plan.frozen
        assert [b.data_ptr() for b in first.buckets[:frozen]] == [b.data_ptr() for b in second.buckets[:frozen]]

    async def test():
        addresses = Addresses(learner.address)
        for version in range(3, 6):
            learner.publish(version)
            async with servers(addresses, f"s{version}") as (one,):
                await one.has(version)

    with a_learner(transport="safetensors", folder=tmp_path / "weights") as learner:
        run(test())
        (folder,) = (tmp_path / "weights").glob("frozen-*")
        numbers = {file.stat().st_ino for file in folder.iterdir()}
        assert len(numbers) == frozen and len(list((tmp_path / "weights").glob("v*"))) == 2


def test_plans_that_differ_are_refused():
    async def test():
        with a_learner() as learner:
            async with servers(Addresses(), "a") as (one,):
                prepare = one.engine.rl_prepare
                one.engine.rl_prepare = lambda *args: (prepare(*args)[0], "other", "full")
                await one.receiver._where.__self__.set(learner.address)
                with pytest.raises(WeightsError, match=r"plans of the weights are .*'other'.* here"):
                    await one.has(0)

    run(test())


PLAIN = [Spec("a", (300, 1000), torch.float32), Spec("b", (5,), torch.bfloat16), Spec("c", (400, 1000), torch.bfloat16)]


BEFORE = (
    "df870e3622d88ab9",
    "f864129d91d6935666f97e1ddbf8be59faf803378ef3c627fff43c42c51d217c",
    [-6704136335869668352, -7107346354877802521],
)


class Counting:
    """A policy whose weights count from 0 to 250 again and again."""

    def full_weights(self, without=()):
        for name, shape, dtype in PLAIN:
            yield name, (torch.arange(torch.Size(shape).numel()) % 251).to(dtype).view(shape)

    def logprobs_of(self, tokens):
        return [0.0] * (len(tokens) - 1)


def test_nothing_frozen_changes_no_byte_and_no_round():
    """The digest and the received bytes are those of protocol 3, the checksums those of protocol 6."""

    async def test():
        with a_learner(specs=PLAIN, frozen=()) as learner:
            engines = [StagingEngine(), StagingEngine()]
            for engine in engines:
                engine.probe = lambda tokens, images=(): asyncio.sleep(0, [0.0] * (len(tokens) - 1))
            async with (
                servers(Addresses(learner.address), "a", engine=engines[0]),
                servers(Addresses(learner.address), "b", engine=engines[1]),
            ):
                await until_stat(learner.sender, "weights/members", 2.0)
                learner.sender.publish(Counting(), 0)
                await until_stat(learner.sender, "weights/servers", 2.0)
            plan, buckets = learner.sender._copies.plan, engines[0].staging[0]._buckets
            assert plan.trained is plan and sorted(learner.sent) == [("a", 0, "whole"), ("b", 0, "whole")]
            received = hashlib.sha256(b"".join(bucket.numpy().tobytes() for bucket in buckets.buckets))
            assert (plan.digest, received.hexdigest(), buckets.checksums().tolist()) == BEFORE

    run(test())
