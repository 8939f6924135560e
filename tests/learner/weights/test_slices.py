"""Workers that stage only what they load: every byte of their models is what whole tensors would have made it, at each
number of learner ranks and workers, whoever dies when."""

import asyncio
import signal
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from learner.weights.buckets import Buckets
from learner.weights.plan import Plan, Spec
from learner.weights.protocol import ServerWelcome, TensorSpec, pack
from learner.weights.receiver.staging import Staging
from learner.weights.receiver.workers import Workers
from learner.weights.rows import scratch_bytes
from learner.weights.sender.publish import Sender
from learner.weights.slices import Region, Regions, SlicedCopy, arrival_bytes, staged_bytes
from rollout.engine.region_copies import RegionCopies
from tests.harness.keys import server_keys
from tests.harness.row_ranks import ForkedRank, RowLearner, row_learner, run_learner, run_rank
from tests.harness.scenes import GRACE_S
from tests.harness.server_process import ServerProcess
from tests.harness.sliced_engine import ParallelModel, SlicedEngine, dirty
from tests.harness.weights_server import HEARTBEAT_S, SPECS, WAIT_S, Addresses, VersionedPolicy, config, servers
from tests.learner.weights.test_row_wire import ODD, PATIENT_S, publish
from tests.learner.weights.test_wire import line, run, until_stat

CPU = torch.device("cpu")


@contextmanager
def learner_of(ranks, specs=SPECS, whole=(), frozen=(), **keys):
    """A learner of so many ranks, each of which sends; one rank sends everything."""
    if ranks > 1:
        with row_learner(ranks, specs, whole=whole, frozen=frozen, **keys) as learner:
            yield learner
        return
    given = dict(heartbeat_s=HEARTBEAT_S, frozen=frozen, keys=server_keys("learner"))
    sender = Sender(specs, config(**keys), 0, CPU, **given)

    def send(version):
        sender.publish(VersionedPolicy(version, specs, frozen=frozen), version)

    try:
        yield SimpleNamespace(sender=sender, address=sender.address, publish=send)
    finally:
        sender.close()


def modes(server):
    return {staging.mode for staging in server.engine.staging}


@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))])
def test_every_worker_has_what_whole_tensors_would_give_it(ranks):
    """One worker and two; uneven rows, and weights that all ranks or all workers have."""

    async def test():
        with learner_of(ranks, ODD, whole=("norm",), timeout_s=PATIENT_S) as learner:
            addresses = Addresses(learner.address)
            async with (
                servers(addresses, "one", staging="slices", engine=SlicedEngine(1, ODD)) as (one,),
                servers(addresses, "two", staging="slices", engine=SlicedEngine(2, ODD)) as (two,),
            ):
                await until_stat(learner.sender, "weights/members", 2.0)
                for version in (0, 1, 2):
                    await publish(learner, version)
                    await one.has(version)
                    await two.has(version)
                assert modes(one) == modes(two) == {"slices"}
                assert one.engine.pauses == two.engine.pauses == 0
            assert learner.sender.stats()["weights/failed"] == 0

    run(test())


def test_what_is_frozen_is_staged_once_and_stays():
    frozen = ("embed", "layer.0", "layer.1", "norm")

    async def test():
        with learner_of(2, frozen=frozen, timeout_s=PATIENT_S) as learner:
            addresses = Addresses(learner.address)
            async with servers(addresses, "one", staging="slices", engine=SlicedEngine()) as (one,):
                for version in (0, 1):
                    await publish(learner, version)
                    await one.has(version)
                async with servers(addresses, "late", staging="slices", engine=SlicedEngine()) as (late,):
                    await late.has(1)
                    await publish(learner, 2)
                    await one.has(2)
                    await late.has(2)
                assert set(one.engine.loads[0]) >= set(frozen) and set(one.engine.loads[-1]).isdisjoint(frozen)
            assert learner.sender.stats()["weights/failed"] == 0

    run(test())


def cut(plan, seed):
    """Rows, columns, or all of each tensor, or nothing; some of them twice."""
    draw, found = torch.Generator().manual_seed(seed), []
    for slot in plan.slots:
        shape, kind = slot.spec.shape, int(torch.randint(5, (), generator=draw))
        whole = torch.empty(shape, device="meta")
        part = [whole, whole[shape[0] // 2 :], whole[: shape[0] // 3], whole[..., shape[-1] // 2 :], None][kind]
        if part is not None:
            found.append(Region(slot.spec.name, part.storage_offset(), tuple(part.shape), part.stride()))
    return found


@pytest.mark.parametrize("bucket_bytes", [1 << 16, 1 << 18, 1 << 22])
@pytest.mark.parametrize("scratch", [0, 1 << 12])
def test_parts_and_checksums_are_those_of_whole_buckets(bucket_bytes, scratch):
    """Buckets of unequal sizes pass through one buffer or two."""
    specs = [
        *(Spec(f"w{i}", (37 + 90 * i, 65), torch.bfloat16) for i in range(9)),
        Spec("large", (999, 301), torch.float32),
        Spec("last", (5,), torch.float32),
    ]
    plan = Plan.of(specs, bucket_bytes, frozen=("w3", "large"))
    for seed in range(4):
        draw, whole, regions = torch.Generator().manual_seed(seed), Buckets(plan, CPU), cut(plan, seed)
        sliced = SlicedCopy(plan, CPU, regions, scratch)
        for first in (0, plan.frozen):
            for _, view in whole.views(first=first):
                view.copy_(torch.randn(view.shape, generator=draw))
            sums = []
            for bucket in range(first, len(plan.sizes)):
                sliced.weights.buckets[bucket].copy_(whole.buckets[bucket])
                sums.append(sliced.keep(bucket))
            assert sliced.checksums(sums) == whole.checksums(first).tolist()
            tensors = dict(whole.views())
            staged = list(sliced.staged(first))
            assert {region.name for region, _ in sliced.staged()} == {region.name for region in regions}
            for region, part in staged:
                tensor = tensors[region.name]
                begin = tensor.storage_offset() + region.offset
                assert torch.equal(part, tensor.as_strided(region.shape, region.strides, begin))
        held = sum(part.nbytes for _, part in sliced.staged())
        assert held <= staged_bytes(plan, regions) < held + 256 * len(regions) + 1
        buffers = {bucket.data_ptr() for bucket in sliced.weights.buckets}
        assert len(buffers) == (1 if scratch else min(2, len(plan.sizes)))


def test_finding_the_regions_changes_nothing_and_touches_no_weights():
    model = ParallelModel(SPECS, 1, 2)
    dirty(model)
    regions = RegionCopies(model).find(SPECS, model.load_weights)
    assert not regions.problem and all(bool((each == 7).all()) for each in model.parameters())
    halves = {region.name: region for region in regions.found}
    assert halves["embed"] == Region("embed", 64 * 1024, (32, 1024), (1024, 1))
    assert halves["layer.2"] == Region("layer.2", 500, (300, 500), (1000, 1))
    assert halves["norm"] == Region("norm", 0, (7,), (1,))
    sizes = [staged_bytes(Plan.of(SPECS, 1 << 20), found.found) for found in (regions, Regions((halves["norm"],)))]
    assert sizes[0] < 0.75 * Plan.of(SPECS, 1 << 20).total_bytes and sizes[1] == 256


class Deriving(ParallelModel):
    """Its loader computes something from a weight."""

    def load_weights(self, weights):
        return super().load_weights((name, tensor * 2 if name == "norm" else tensor) for name, tensor in weights)


class Refusing(ParallelModel):
    def load_weights(self, weights):
        raise ValueError("norm: no such weight")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Deriving, "load_weights also runs aten.mul.Tensor"),
        (Refusing, "norm: no such weight"),
    ],
)
def test_a_worker_whose_loads_are_not_copies_stages_whole_tensors(kind, why):
    model = kind(SPECS, 0, 2)
    dirty(model)
    staging = Staging(CPU, 0, model.load_weights, lambda specs, _: RegionCopies(model).find(specs, model.load_weights))
    plan = Plan.of(SPECS, 1 << 20)
    tensors = [TensorSpec(name=name, shape=list(shape), dtype=str(dtype)[6:]) for name, shape, dtype in SPECS]
    digests = {"digest": plan.digest, "trained": plan.trained.digest}
    welcome = pack(ServerWelcome(tensors=tensors, bucket_bytes=1 << 20, heartbeat_s=1.0, **digests))
    with pytest.raises(ValueError, match=f"weights.staging: slices cannot be: {why}; set auto"):
        staging.prepare(welcome, "slices")
    assert staging.prepare(welcome, "auto")[2] == "full"
    assert all(bool((each == 7).all()) for each in model.parameters())


def test_auto_takes_slices_where_they_need_less_memory():
    names = ("embed", "big", *(f"layer.{i}" for i in (0, 1, 2, 4)))
    specs = [Spec(name, (300, 1000), torch.bfloat16) for name in names]
    for workers, rows, mode in ((1, 1, "full"), (2, 1, "slices"), (2, 3, "slices")):
        model = ParallelModel(specs, 0, workers)
        copies = RegionCopies(model)
        staging = Staging(CPU, 0, model.load_weights, lambda s, _, m=model, c=copies: c.find(s, m.load_weights))
        plan = Plan.of(specs, 1 << 18, ranks=rows)
        tensors = [TensorSpec(name=name, shape=list(shape), dtype="bfloat16") for name, shape, _ in specs]
        digests = {"digest": plan.digest, "trained": plan.trained.digest, "ranks": rows}
        welcome = pack(ServerWelcome(tensors=tensors, bucket_bytes=1 << 18, heartbeat_s=1.0, **digests))
        assert staging.prepare(welcome, "auto") == (plan.digest, plan.digest, mode)
        before = staging._buckets
        staging.prepare(welcome, "auto")
        assert staging._buckets is before, "its room is kept for a learner with the same plan"
        if mode == "slices":
            found = copies.find(specs, model.load_weights).found
            room = staged_bytes(plan, found) + arrival_bytes(plan, scratch_bytes(plan))
            assert room < plan.total_bytes + 2 * scratch_bytes(plan)


class PreparedWorkers:
    """Workers of which each takes one of its `modes`, or the one that is wanted of all."""

    def __init__(self, *modes):
        self.modes, self.wanted = modes, []

    async def collective(self, method, welcome, staging, timeout_s):
        self.wanted.append(staging)
        return [("whole", "trained", mode if staging == "auto" else staging) for mode in self.modes]


@pytest.mark.parametrize(
    ("modes", "asked", "streams"),
    [
        (("slices", "slices"), ["auto"], False),
        (("slices", "full"), ["auto"], False),
        (("slices", "bucket"), ["auto", "bucket"], True),
        (("bucket", "bucket"), ["auto"], True),
    ],
)
def test_a_server_streams_if_one_of_its_workers_has_no_room(modes, asked, streams):
    engine = PreparedWorkers(*modes)
    workers = Workers(engine, 1.0, "auto")
    tensors = [TensorSpec(name="w", shape=[1], dtype="bfloat16")]
    welcome = ServerWelcome(tensors=tensors, bucket_bytes=1, digest="whole", trained="trained", heartbeat_s=1.0)
    run(workers.prepare(welcome))
    assert engine.wanted == asked and workers.streams is streams


def test_parameters_that_moved_are_found_again():
    model = ParallelModel(SPECS, 1, 2)
    copies, plan = RegionCopies(model), Plan.of(SPECS, 1 << 20)
    sliced = SlicedCopy(plan, CPU, copies.find(SPECS, model.load_weights).found)
    whole = Buckets(plan, CPU)
    whole.fill(VersionedPolicy(3).full_weights())
    for bucket, memory in enumerate(whole.buckets):
        sliced.weights.buckets[bucket].copy_(memory)
        sliced.keep(bucket)
    copies.load(list(sliced.staged()))
    assert model.holds(3)
    parameter = model.get_parameter("norm")
    parameter.data = model.values["norm"] = torch.zeros_like(parameter.data)
    assert not model.holds(3)
    copies.load(list(sliced.staged()))
    assert model.holds(3)
    model.worker = 0  # takes other rows by now
    parameter.data = model.values["norm"] = torch.zeros_like(parameter.data)
    with pytest.raises(ValueError, match="vLLM loads other parts of the weights than before: they moved"):
        copies.load(list(sliced.staged()))


@contextmanager
def a_process(address, mode):
    victim = ServerProcess(address, "rollout-9", mode, "cpu", "slices")
    try:
        yield victim
    finally:
        victim.kill()


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mode", ["half", pytest.param("go", marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3))])
def test_a_server_of_two_workers_that_is_killed_costs_the_others_no_version(mode, ranks):
    async def test():
        with learner_of(ranks) as learner, a_process(learner.address, mode) as victim:
            engine = SlicedEngine()
            async with servers(Addresses(learner.address), "one", staging="slices", engine=engine) as (one,):
                await until_stat(learner.sender, "weights/members", 2.0)
                await publish(learner, 0)
                assert await line(victim) == mode
                victim.send_signal(signal.SIGKILL)
                killed = time.monotonic()
                await one.has(0)
                assert time.monotonic() - killed < config().timeout_s + GRACE_S
                await publish(learner, 1)
                await one.has(1)

    run(test())


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_of_two_workers_that_stalls_costs_one_timeout(ranks):
    async def test():
        with learner_of(ranks) as learner, a_process(learner.address, "stall") as stalled:
            engine = SlicedEngine()
            async with servers(Addresses(learner.address), "one", staging="slices", engine=engine) as (one,):
                await until_stat(learner.sender, "weights/members", 2.0)
                await publish(learner, 0)
                assert await line(stalled) == "stall"
                started = time.monotonic()
                await one.has(0)
                assert time.monotonic() - started < config().timeout_s + GRACE_S
                assert await line(stalled) == "version 0 right"

    run(test())


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mode", ["go", "half", "sums"])
def test_a_rank_that_is_killed_leaves_two_workers_with_their_whole_version(mode):
    async def test():
        addresses = Addresses()
        async with servers(addresses, "one", staging="slices", engine=SlicedEngine()) as (one,):
            learner = RowLearner(2, here=1)
            with ForkedRank(run_rank, learner.store.port, 1, 2, mode, 1) as rank:
                await addresses.set(learner.address)
                await until_stat(learner.sender, "weights/members", 1.0)
                await publish(learner, 0)
                await one.has(0)
                publishing = asyncio.create_task(publish(learner, 1))
                assert await asyncio.to_thread(rank.line) == mode
                rank.kill()
                await publishing
                async with asyncio.timeout(WAIT_S):
                    while not learner.sender.stats()["weights/failed"]:
                        await asyncio.sleep(0.05)
            assert one.engine.holds(0) and one.seen == [0]
            await asyncio.to_thread(learner.close)
            with row_learner(2) as successor:
                await addresses.set(successor.address)
                await publish(successor, 1)
                await one.has(1)

    run(test())


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mode", ["go", "half", "sums"])
def test_a_learner_that_is_killed_leaves_two_workers_with_their_whole_version(mode):
    """The next one has another plan: the workers' room is made anew."""

    async def test():
        addresses = Addresses()
        async with servers(addresses, "one", staging="slices", engine=SlicedEngine()) as (one,):
            with ForkedRank(run_learner, 2, mode, 1) as learner:
                await addresses.set(await asyncio.to_thread(learner.line))
                await one.has(0)
                assert await asyncio.to_thread(learner.line) == mode
                await asyncio.sleep(0.1)
            assert one.engine.holds(0) and one.seen == [0], "never a part of version 1"
            with row_learner(3) as successor:
                await addresses.set(successor.address)
                await publish(successor, 5)
                await one.has(5)

    run(test())
