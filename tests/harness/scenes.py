"""What may happen on the weights wire, acted out by real processes on the devices of a `Cluster`.

Run over gloo by `tests/learner/weights/test_scenes.py`, over NCCL by `tests/gpu/test_weights_nccl.py`. A server has
loaded a version when it prints that each of its weights is right.
"""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buffer.wire.message import Message
from learner.weights.protocol import Checksums
from learner.weights.sender.members import Member
from learner.weights.sender.publish import Sender
from tests.harness.server_process import START_S, Cluster, ServerProcess
from tests.harness.weights_server import VersionedPolicy

GRACE_S = 30.0
"""How much longer than the timeout the learner may take to go on without a server that died."""


def expect_version(servers: list[ServerProcess], version: int, within_s: float = START_S) -> None:
    """Wait until all of `servers` have loaded `version`."""
    end = time.monotonic() + within_s
    for server in servers:
        server.expect(f"version {version} right", max(end - time.monotonic(), 0.01))


def killed(cluster: Cluster, mode: str) -> None:
    """A server dies between Ready and the last bucket: the others load that version within the timeout and the next one
    too, and so does the server that takes its place."""
    with cluster.sender():
        victim, *others = cluster.start_all(mode)
        cluster.publish(0)
        victim.expect(mode, START_S)
        cluster.kill(victim)
        expect_version(others, 0, cluster.timeout_s + GRACE_S)
        cluster.publish(1)
        expect_version(others, 1, cluster.timeout_s)
        expect_version([cluster.start(0)], 1)


def killed_before_it_receives(cluster: Cluster, folder: Path) -> None:
    killed(cluster, "go")


def killed_in_mid_broadcast(cluster: Cluster, folder: Path) -> None:
    killed(cluster, "half")


def a_newcomer_in_mid_run(cluster: Cluster, folder: Path) -> None:
    """It gets the current version at once, and no other server gets it again."""
    with cluster.sender():
        first = [cluster.start(device) for device in range(max(1, len(cluster.servers) - 1))]
        for version in (0, 1):
            cluster.publish(version)
            expect_version(first, version)
        if len(cluster.servers) == 1:
            cluster.kill(first.pop())
        expect_version([newcomer := cluster.start(len(cluster.servers) - 1)], 1)
        cluster.publish(2)
        expect_version([*first, newcomer], 2)


def kills_and_joins(cluster: Cluster, folder: Path) -> None:
    """Six in a plain run; HEADRACE_CHURN=50 is the long form."""
    draw = random.Random(1)
    with cluster.sender():
        steady = [cluster.start(device) for device in range(1, len(cluster.servers))]
        for number in range(int(os.environ.get("HEADRACE_CHURN", "6"))):
            mode = draw.choice(["go", "half", "none"])
            victim = cluster.start(0, mode)
            if number and mode == "none":
                expect_version([victim], 2 * number - 1)  # the newest there is
            cluster.publish(2 * number)
            if mode == "none":
                expect_version([victim], 2 * number)
            else:
                victim.expect(mode, START_S)
            cluster.kill(victim)
            expect_version(steady, 2 * number, cluster.timeout_s + GRACE_S)
            cluster.publish(2 * number + 1)
            expect_version(steady, 2 * number + 1, cluster.timeout_s)


def bucket_by_bucket(cluster: Cluster, folder: Path) -> None:
    """A server receives right into place, beside servers that have room for a copy."""
    with cluster.sender() as sender:
        streaming = cluster.start(0, staging="bucket")
        servers = [streaming, *(cluster.start(device) for device in range(1, len(cluster.servers)))]
        for version in (0, 1, 2):
            cluster.publish(version)
            expect_version(servers, version)
        assert sender.stats()["weights/failed"] == 0


def through_files(cluster: Cluster, folder: Path) -> None:
    """No group is formed, so two servers can share a device."""
    with cluster.sender(transport="safetensors", folder=folder) as sender:
        servers = cluster.start_all()
        for version in (0, 1):
            cluster.publish(version)
            expect_version(servers, version)
        expect_version([cluster.start(0, staging="bucket")], 1)
        assert sender.stats()["weights/failed"] == 0


def a_broadcast_that_stalls(cluster: Cluster, folder: Path) -> None:
    """All servers send heartbeats, but one stops to receive: at the timeout the group is aborted on every side, and the
    next group brings the version to all, that server included."""
    with cluster.sender() as sender:
        stalled, *others = cluster.start_all("stall")
        started = time.monotonic()
        cluster.publish(0)
        stalled.expect("stall", START_S)
        expect_version([stalled, *others], 0, cluster.timeout_s + GRACE_S)
        assert time.monotonic() - started > cluster.timeout_s * 0.9
        assert sender.stats()["weights/failed"] >= 1
        cluster.publish(1)
        expect_version([stalled, *others], 1, cluster.timeout_s + GRACE_S)


def checksums_that_get_lost(cluster: Cluster, folder: Path) -> None:
    """A server has all buckets but not the learner's checksums: it loads nothing, and the learner sends the version
    again after the timeout."""
    lost: list[Message] = []
    with cluster.sender() as sender:
        first, *others = cluster.start_all()
        name = next(iter(sender._distributor.members)).name

        def lose(member: Member, message: Message) -> Message | None:
            if isinstance(message, Checksums) and member.name == name and not lost:
                return lost.append(message)
            return message

        intercept(sender, lose)
        started = time.monotonic()
        cluster.publish(0)
        expect_version([first, *others], 0, cluster.timeout_s + GRACE_S)
        assert lost and time.monotonic() - started > cluster.timeout_s * 0.9
        cluster.publish(1)
        expect_version([first, *others], 1, cluster.timeout_s + GRACE_S)


def wrong_checksums(cluster: Cluster, folder: Path) -> None:
    """The server that gets them ends without having loaded anything; the others go on."""
    with cluster.sender() as sender:
        first, *others = cluster.start_all()
        name = next(iter(sender._distributor.members)).name

        def change(member: Member, message: Message) -> Message | None:
            if isinstance(message, Checksums) and member.name == name:
                return message.model_copy(update={"checksums": [1, *message.checksums[1:]]})
            return message

        intercept(sender, change)
        cluster.publish(0)
        expect_version(others, 0, cluster.timeout_s)
        cluster.until(lambda: sender.stats()["weights/failed"] >= 1, cluster.timeout_s + GRACE_S)
        assert first.silent()


def a_late_probe(cluster: Cluster, folder: Path) -> None:
    """Servers swap before the learner's forward pass is done; it is compared afterwards, and the next version
    follows."""
    gate = threading.Event()
    with cluster.sender() as sender:
        servers = cluster.start_all()
        publishing = threading.Thread(
            target=sender.publish, args=(VersionedPolicy(0, cluster.specs, gate, cluster.frozen), 0)
        )
        publishing.start()
        expect_version(servers, 0)
        assert "weights/version" not in sender.stats()  # no server has said Loaded
        gate.set()
        publishing.join()
        cluster.until(lambda: sender.stats().get("weights/probe_version") == 0, cluster.timeout_s)
        cluster.publish(1)
        expect_version(servers, 1, cluster.timeout_s)


def intercept(sender: Sender, change: Callable[[Member, Message], Message | None]) -> None:
    """Pass what the learner says to its members through `change`; None is not sent."""
    members = sender._distributor.members
    say = members.say

    def changed(member: Member, message: Message) -> None:
        if (left := change(member, message)) is not None:
            say(member, left)

    members.say = changed  # type: ignore[method-assign]


SCENES: dict[str, Any] = {
    scene.__name__: scene
    for scene in (
        killed_before_it_receives,
        killed_in_mid_broadcast,
        a_newcomer_in_mid_run,
        kills_and_joins,
        bucket_by_bucket,
        through_files,
        a_broadcast_that_stalls,
        checksums_that_get_lost,
        wrong_checksums,
        a_late_probe,
    )
}
