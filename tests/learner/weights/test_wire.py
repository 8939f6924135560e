"""The weights wire over real sockets and real gloo groups: a sender, and servers in this loop or in processes of
their own."""

import asyncio
import re
import signal
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest
import torch
import zmq
import zmq.asyncio

from learner.weights.probe import LIKELY, RANDOM, PolicyText, ProbeRow, shown_tokens
from learner.weights.protocol import Checksums, Probe
from learner.weights.receiver.learner_connection import LearnerConnection
from learner.weights.receiver.staged import WeightsError
from learner.weights.sender.publish import Follower, Sender
from tests.buffer.wire.test_foreign_bytes import PROBES, answer_to
from tests.harness.keys import client_keys, server_keys, unlock
from tests.harness.scenes import GRACE_S, intercept
from tests.harness.server_process import ServerProcess
from tests.harness.tiny_vlm import tiny_tokenizer
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
from tests.learner.weights.test_probe import FORM

CPU = torch.device("cpu")


@contextmanager
def a_sender(heartbeat_s=HEARTBEAT_S, **keys):
    sender = Sender(SPECS, config(**keys), 0, CPU, heartbeat_s=heartbeat_s, keys=server_keys("learner"))
    try:
        yield sender
    finally:
        sender.close()


@asynccontextmanager
async def a_process(address, name, mode):
    process = await asyncio.to_thread(ServerProcess, address, name, mode, "cpu", "auto")
    try:
        yield process
    finally:
        await asyncio.to_thread(process.kill)


async def line(process):
    return await asyncio.to_thread(process.next_line, WAIT_S + 15)


async def until_stat(sender, key, value):
    async with asyncio.timeout(WAIT_S):
        while sender.stats().get(key) != value:
            await asyncio.sleep(0.02)


def run(test):
    return asyncio.run(test)


def test_servers_join_and_hold_each_version():
    async def test():
        with a_sender() as sender:
            addresses = Addresses(sender.address)
            async with servers(addresses, "rollout-0", "rollout-1", workers=2) as (one, two):
                for version in (0, 1, 2):
                    sender.publish(VersionedPolicy(version), version)
                    await one.has(version)
                    await two.has(version)
                await asyncio.to_thread(sender.close, 5.0)
                stats = sender.stats()
        assert sender._distributor._transport._channel is None, (
            "a sender gives its group up when it closes, and does not leave that to the collector"
        )
        assert stats["weights/version"] == 2 and stats["weights/failed"] == 0
        assert stats["weights/probe"] < 1e-9
        assert addresses.asked[0] is None

    run(test())


def test_a_newcomer_is_served_at_once_and_others_are_not_served_again():
    async def test():
        with a_sender() as sender:
            sender.publish(VersionedPolicy(7), 7)
            addresses = Addresses(sender.address)
            async with servers(addresses, "rollout-0") as (one,):
                await one.has(7)
                async with servers(addresses, "rollout-1") as (late,):
                    await late.has(7)
                    sender.publish(VersionedPolicy(8), 8)
                    await one.has(8)
                    await late.has(8)
                assert one.seen == [7, 8]

    run(test())


def test_a_slow_server_skips_to_the_newest():
    async def test():
        with a_sender() as sender:
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                gate = asyncio.Event()
                collective = one.engine.collective

                async def slow(method, *args, timeout_s):
                    if method == "rl_load":
                        await gate.wait()
                    return await collective(method, *args, timeout_s=timeout_s)

                one.engine.collective = slow
                for version in range(5):
                    await asyncio.to_thread(sender.publish, VersionedPolicy(version), version)
                    await asyncio.sleep(0.05)
                gate.set()
                await one.has(4)
                assert one.seen[-1] == 4 and len(one.seen) <= 3

    run(test())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mode", ["go", "half"])
def test_a_server_killed_between_ready_and_the_last_bucket_costs_the_others_no_version(mode):
    async def test():
        with a_sender() as sender:
            async with (
                servers(Addresses(sender.address), "rollout-0") as (one,),
                a_process(sender.address, "rollout-9", mode) as victim,
            ):
                await until_stat(sender, "weights/members", 2.0)
                sender.publish(VersionedPolicy(0), 0)
                assert await line(victim) == mode
                victim.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                await one.has(0)
                assert time.monotonic() - killed < config().timeout_s + GRACE_S
                started = time.monotonic()
                sender.publish(VersionedPolicy(1), 1)
                assert time.monotonic() - started < config().timeout_s  # it waits for no server
                await one.has(1)

    run(test())


@pytest.mark.xdist_group("ranks")
def test_a_server_that_hangs_costs_one_timeout():
    async def test():
        with a_sender() as sender:
            async with (
                servers(Addresses(sender.address), "rollout-0") as (one,),
                a_process(sender.address, "rollout-9", "none") as stopped,
            ):
                await until_stat(sender, "weights/members", 2.0)
                sender.publish(VersionedPolicy(0), 0)
                assert await line(stopped) == "version 0 right"
                stopped.send_signal(signal.SIGSTOP)
                sender.publish(VersionedPolicy(1), 1)
                started = time.monotonic()
                await one.has(1)
                assert time.monotonic() - started < config().timeout_s + GRACE_S
                stopped.send_signal(signal.SIGCONT)
                assert await line(stopped) == "version 1 right"  # it joins again by itself

    run(test())


def test_a_learner_that_comes_back_elsewhere_is_found_and_its_versions_count():
    async def test():
        addresses = Addresses()
        async with servers(addresses, "rollout-0") as (one,):
            with a_sender() as sender:
                await addresses.set(sender.address)
                sender.publish(VersionedPolicy(5), 5)
                await one.has(5)
                first = sender.address
            with a_sender() as sender:
                sender.publish(VersionedPolicy(3), 3)
                await addresses.set(sender.address)
                await one.has(3)
        assert one.seen == [5, 3] and addresses.asked == [None, first]

    run(test())


@pytest.mark.parametrize("kind", [Checksums, Probe])
def test_a_learner_that_dies_between_the_broadcast_and_what_verifies_it(kind):
    """Without checksums the version is never loaded; without a probe it stays. The next learner's version follows."""

    async def test():
        addresses = Addresses()
        async with servers(addresses, "rollout-0") as (one,):
            with a_sender() as sender:
                intercept(sender, lambda member, message: None if isinstance(message, kind) else message)
                await addresses.set(sender.address)
                sender.publish(VersionedPolicy(5), 5)
                async with asyncio.timeout(WAIT_S):
                    while one.engine.staging[0]._version != 5 or (kind is Probe and one.engine.version != 5):
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                assert one.engine.version == (5 if kind is Probe else -1) and not one.seen
            with a_sender() as sender:
                sender.publish(VersionedPolicy(3), 3)
                await addresses.set(sender.address)
                await one.has(3)
        assert one.seen == ([5, 3] if kind is Probe else [3])

    run(test())


@pytest.mark.xdist_group("ranks")
def test_a_learner_and_a_server_that_are_killed_are_missed_long_before_their_silence_tells():
    hours_s = 10_000.0

    async def test():
        with a_sender(hours_s) as sender:
            addresses = Addresses(sender.address)
            async with servers(addresses, "rollout-0") as (one,):
                await until_stat(sender, "weights/members", 1.0)
                async with a_process(sender.address, "rollout-9", "go") as victim:
                    await until_stat(sender, "weights/members", 2.0)
                    victim.kill()
                    await until_stat(sender, "weights/members", 1.0)
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
                sender._distributor.members._by_route.clear()  # as one that is killed, it says Bye to nobody
                await asyncio.to_thread(sender.close)
                with a_sender(hours_s) as successor:
                    successor.publish(VersionedPolicy(1), 1)
                    await addresses.set(successor.address)
                    await one.has(1)

    run(test())


def test_a_learner_silent_for_a_while_is_joined_again_where_it_was():
    async def test():
        with a_sender() as sender:
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
                sender._distributor.members._remove(next(iter(sender._distributor.members)))  # as after a cut network
                sender.publish(VersionedPolicy(1), 1)
                await one.has(1)

    run(test())


def test_a_wrong_bucket_ends_the_server_with_both_checksums():
    async def test():
        with a_sender() as sender:
            async with servers(Addresses(sender.address), "rollout-0", "rollout-1") as (one, two):
                await until_stat(sender, "weights/members", 2.0)
                staging = one.engine.staging[0]
                take = staging._take
                staging._take = lambda *args: [12345 if i == 1 else s for i, s in enumerate(take(*args))]
                sender.publish(VersionedPolicy(0), 0)
                with pytest.raises(WeightsError, match=r"bucket 1: checksum 12345 here, -?\d+ at the learner"):
                    await one.has(0)
                await two.has(0)
                assert not one.engine.weights[0]

    run(test())


@pytest.mark.parametrize("version", [0, 5])
def test_a_probe_that_differs_ends_the_server_with_both_values(version):
    """At version 0 the failure is final: a restart would load the same model."""

    async def test():
        with a_sender() as sender:
            async with servers(Addresses(sender.address), "rollout-0", error=0.5) as (one,):
                sender.publish(VersionedPolicy(version), version)
                with pytest.raises(
                    WeightsError, match=r"differ by 0\.5 nat.*weights\.probe_tolerance 0\.02.*at the learner"
                ) as error:
                    await one.has(version)
                await until_stat(sender, "weights/failed", 1.0)
        assert error.value.final is (version == 0)
        advice = re.search(
            r", most at position \d+ \(-?[\d.]+ here, -?[\d.]+ at the learner\)\. vLLM and", str(error.value)
        )
        assert (advice is not None) is (version == 0)

    run(test())


def test_the_probe_is_asked_on_schedule_on_every_rank_and_all_ranks_gather():
    asked = []
    with a_sender(probe_every=3) as sender:
        follower = Follower(SPECS, config(probe_every=3), 0)
        for version in (1, 2, 3, 4, 6):
            policies = VersionedPolicy(version), VersionedPolicy(version)
            sender.publish(policies[0], version)
            follower.publish(policies[1], version)
            assert policies[0].asked == policies[1].asked
            asked.append(policies[0].asked)
    assert asked == [1, 0, 1, 0, 1]


def test_unknown_peers_are_refused_in_words_and_do_no_harm():
    async def test():
        with a_sender() as sender, zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.setsockopt(zmq.RCVTIMEO, 60_000)
            unlock(peer, server="learner").connect(sender.address)
            for frames in ([b"junk"], [b"a", b"b", b"c"], [b""]):
                peer.send_multipart(frames)
                assert b"Refused" in await asyncio.to_thread(peer.recv)
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)

    run(test())


def test_a_connection_that_is_cancelled_while_it_closes_closes_its_socket():
    """A loop that ends cancels all tasks, also one that a cancellation has ended before."""

    async def test():
        with a_sender() as sender, zmq.asyncio.Context() as context:
            connection = LearnerConnection(context, sender.address, client_keys(server="learner"), HEARTBEAT_S)
            await asyncio.sleep(0)
            closing = asyncio.create_task(connection.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert connection._socket.closed

    run(test())


def test_what_ends_the_serving_thread_is_raised_in_publish():
    with a_sender() as sender:
        sender.close()
        with pytest.raises(RuntimeError, match="closed"):
            sender.publish(VersionedPolicy(0), 0)


class SeeingEngine(StagingEngine):
    """An engine whose log-probabilities depend on the picture, as `ShownPolicy`'s do."""

    async def probe(self, tokens, images=()):
        shift = sum(int(image.picture.pixels[0, 0, 0]) + image.start for image in images)
        return [value - shift for value in await super().probe(tokens)]


class ShownPolicy(VersionedPolicy):
    """Its row is (tokens, image), and a text without one behind it."""

    def logprobs_of(self, row):
        tokens, image, text = row
        shown = [value - int(image.picture.pixels[0, 0, 0]) - image.start for value in super().logprobs_of(tokens)]
        return [*shown, 0.0, *super().logprobs_of(text)]


@pytest.mark.parametrize("staging", ["full", "bucket"])
def test_a_probe_with_a_picture_is_drawn_at_both_ends(staging):
    tokens, image = shown_tokens(tiny_tokenizer(), 60, FORM)
    compared = len(tokens) - image.start - image.picture.num_tokens - 1
    texts = [PolicyText(LIKELY, tokens, compared, True, [image]), PolicyText(RANDOM, [5, 6, 7], 2)]
    shown = ProbeRow(texts, (tokens, image, [5, 6, 7]))

    async def test():
        sender = Sender(SPECS, config(), 0, CPU, shown, heartbeat_s=HEARTBEAT_S, keys=server_keys("learner"))
        keys = {"staging": staging, "engine": SeeingEngine()}
        try:
            async with (
                servers(Addresses(sender.address), "a", form=FORM, **keys) as (one,),
                servers(Addresses(sender.address), "b", engine=SeeingEngine()) as (blind,),
                servers(Addresses(sender.address), "c", form=replace(FORM, patch=7), engine=SeeingEngine()) as (other,),
            ):
                await until_stat(sender, "weights/members", 3.0)
                sender.publish(ShownPolicy(0), 0)
                await one.has(0)
                with pytest.raises(WeightsError, match=r"the probe has a picture, and this server's model sees none"):
                    await blind.has(0)
                    await blind.task
                await other.has(0)  # its pixels are the same: how they are cut is the model's own business
                await until_stat(sender, "weights/probe_version", 0.0)  # in the same round, or in another one
                assert sender.stats()["weights/probe"] < 1e-9
        finally:
            sender.close()

    run(test())


def test_foreign_bytes_end_no_learner_and_a_server_joins_beside_them():
    """Some bytes look like an older ZMTP protocol to libzmq, such as a browser's HTTP request."""

    async def test():
        with a_sender() as sender:
            for data in PROBES.values():
                await answer_to(data, sender.address, 1)
            async with servers(Addresses(sender.address), "rollout-0") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)

    run(test())
