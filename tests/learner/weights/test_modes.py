"""The other modes of the weights wire: streaming bucket by bucket into place, and files instead of a broadcast."""

from itertools import islice

import pytest
import torch

from learner.weights.buckets import Buckets
from learner.weights.channel import ChannelError
from learner.weights.plan import Plan
from learner.weights.receiver.staged import WeightsError
from learner.weights.sender.publish import Sender
from tests.harness.keys import server_keys
from tests.harness.weights_server import HEARTBEAT_S, SPECS, Addresses, StagingEngine, VersionedPolicy, config, servers
from tests.learner.weights.test_wire import a_sender, run, until_stat

CPU = torch.device("cpu")


@pytest.fixture
def by_files(tmp_path):
    sender = Sender(
        *(SPECS, config(transport="safetensors"), 0, CPU),
        heartbeat_s=HEARTBEAT_S,
        folder=tmp_path / "weights",
        keys=server_keys("learner"),
    )
    yield sender
    sender.close()


def test_rotating_buckets_allocate_two():
    plan = Plan.of(SPECS, 1 << 20)
    two = Buckets(plan, CPU, rotating=True)
    assert [len(bucket) for bucket in two.buckets] == list(plan.sizes)
    places = {bucket.data_ptr() for bucket in two.buckets}
    assert len(plan.sizes) > 2 and len(places) == 2
    with pytest.raises(ValueError, match="one by one"):  # two of them are gone when the third arrives
        two.checksums()


@pytest.mark.parametrize("workers", [1, 2])
def test_bucket_by_bucket_into_place(workers):
    async def test():
        with a_sender() as sender:
            addresses = Addresses(sender.address)
            async with (
                servers(addresses, "rollout-0", workers=workers, staging="bucket") as (one,),
                servers(addresses, "rollout-1") as (other,),
            ):
                for version in (0, 1, 2):
                    sender.publish(VersionedPolicy(version), version)
                    await one.has(version)
                    await other.has(version)
            assert one.engine.staging[0]._buckets.rotating and not other.engine.staging[0]._buckets.rotating
            assert sender.stats()["weights/failed"] == 0

    run(test())


class Torn(StagingEngine):
    """An engine whose first broadcast of version 1 breaks after three tensors."""

    tears = 1

    def loader(self, worker):
        whole = super().loader(worker)

        def load(weights):
            if self.version == 0 and self.tears:
                self.tears -= 1
                whole(islice(weights, 3))
                raise ChannelError("torn")
            return whole(weights)

        return load


def test_a_torn_policy_never_generates():
    """If a broadcast into place breaks, the server stays paused until it has received a complete version."""

    async def test():
        with a_sender() as sender:
            async with servers(Addresses(sender.address), "rollout-0", staging="bucket", engine=Torn()) as (one,):
                for version in (0, 1):
                    sender.publish(VersionedPolicy(version), version)
                    await one.has(version)
            assert one.seen == [0, 1] and one.engine.tears == 0 and one.engine.pauses == 2 and one.engine.stamped == 1
            assert sender.stats()["weights/failed"] == 1

    run(test())


def test_files_instead_of_a_broadcast_serve_latecomers_too(by_files, tmp_path):
    async def test():
        addresses = Addresses(by_files.address)
        async with servers(addresses, "rollout-0", workers=2) as (one,):
            for version in (0, 1, 2):
                by_files.publish(VersionedPolicy(version), version)
                await one.has(version)
            async with servers(addresses, "rollout-1", staging="bucket") as (late,):
                await late.has(2)
        assert one.seen == [0, 1, 2] and by_files.stats()["weights/failed"] == 0
        kept = sorted(path.name[:7] for path in (tmp_path / "weights").iterdir())
        assert kept == ["v000001", "v000002"]

    run(test())


def test_a_damaged_file_ends_the_server(by_files, tmp_path):
    async def test():
        by_files.publish(VersionedPolicy(0), 0)
        addresses = Addresses(by_files.address)
        async with servers(addresses, "rollout-0") as (one,):
            await one.has(0)
            (file,) = (tmp_path / "weights").glob("v000000-*/model-00001.safetensors")
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
            async with servers(addresses, "rollout-1") as (late,):
                with pytest.raises(WeightsError, match=r"bucket 1: checksum"):
                    await late.has(0)

    run(test())


def test_a_server_that_does_not_see_the_folder_is_refused_with_its_name(by_files, tmp_path):
    async def test():
        async with servers(Addresses(by_files.address), "rollout-0") as (one,):
            await until_stat(by_files, "weights/members", 1.0)
            receive = one.engine.rl_receive
            one.engine.rl_receive = lambda worker, go, notify: receive(
                worker, go.replace(b"/weights/", b"/missing/"), notify
            )
            by_files.publish(VersionedPolicy(0), 0)
            with pytest.raises(WeightsError, match=r"missing.*is the run's folder shared"):
                await one.has(0)

    run(test())
