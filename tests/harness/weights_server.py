"""Stand-ins for both ends of the weights wire: a policy whose weights encode its version, an engine without vLLM, and a
rollout server (`serve`) that tests can kill at a chosen moment (`server_process.py`).

The server prints one line for each event.
"""

import asyncio
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import torch

from configs.schema import WeightsConfig
from learner.weights.buckets import Buckets
from learner.weights.channel import Channel, ChannelError, WorkerChannels, backend_of, own_stream
from learner.weights.plan import Spec
from learner.weights.protocol import TO_SERVER, unpack
from learner.weights.receiver.follow import Receiver
from learner.weights.receiver.staging import Staging
from learner.weights.rows import shares_of
from tests.harness.keys import client_keys

HEARTBEAT_S = 0.5
WAIT_S = 120
PERIOD = 4099
FROZEN_VERSION = 1000
"""What is frozen has the same values at every version: those of this one, which no test publishes."""


def specs(scale: int) -> list[Spec]:
    """6.5 MiB times `scale`: several tensors per bucket of `scale` MiB, one tensor larger than a bucket, one of an odd
    size."""
    return [
        Spec("embed", (scale * 96, 1024), torch.float32),
        *(Spec(f"layer.{i}", (scale * 300, 1000), torch.bfloat16) for i in range(6)),
        Spec("big", (scale * 700, 1000), torch.float32),
        Spec("norm", (7,), torch.bfloat16),
    ]


SPECS = specs(1)
SCALE = {"cpu": 1, "cuda": 50}
"""Large enough that NCCL cannot have sent the last buckets ahead of a receiver that stops after four."""


def weight(spec: Spec, version: int) -> torch.Tensor:
    """The tensor of `spec` at `version`: random numbers, repeated, that differ from name to name and version to
    version."""
    seed = sum(map(ord, spec.name)) + 1000 * version
    values = torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed)).to(spec.dtype)
    size = torch.Size(spec.shape).numel()
    return values.repeat(-(-size // PERIOD))[:size].view(spec.shape)


def logprobs(version: int, tokens: list[int]) -> list[float]:
    """Log-probabilities of `tokens[1:]` under a policy of `version`."""
    return [-0.1 * version - 0.001 * token for token in tokens[1:]]


class VersionedPolicy:
    """A policy of which only the version matters. Its forward pass waits for `gate`, if there is one."""

    def __init__(
        self,
        version: int,
        specs: list[Spec] = SPECS,
        gate: threading.Event | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        self.version, self.asked, self.specs, self.gate, self.frozen = version, 0, specs, gate, frozen
        self.gathered: list[str] = []

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self.specs:
            if spec.name not in without:
                self.gathered.append(spec.name)
                yield spec.name, weight(spec, FROZEN_VERSION if spec.name in self.frozen else self.version)

    def logprobs_of(self, tokens: list[int]) -> list[float]:
        self.asked += 1
        if self.gate:
            self.gate.wait(WAIT_S)
        return logprobs(self.version, tokens)


class StagingEngine:
    """An engine whose `workers` only stage and load. `error` is added to the log-probabilities of a probe."""

    def __init__(self, workers: int = 1, error: float = 0.0, device: str = "cpu") -> None:
        self.version, self.error = -1, error
        self.device, self.pauses = torch.device(device), 0
        self.specs = specs(SCALE[self.device.type])
        self.staging = [Staging(self.device, worker, self.loader(worker)) for worker in range(workers)]
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]
        self.loads: list[list[str]] = []
        """Names of what came, for each time that a worker loaded."""

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return [getattr(self, method)(worker, *args) for worker in range(len(self.staging))]

    async def probe(self, tokens: list[int], images: Sequence[Any] = ()) -> list[float]:
        return [value + self.error for value in logprobs(self.version, tokens)]

    @asynccontextmanager
    async def paused(self):
        self.pauses += 1
        yield

    def holds(self, version: int) -> bool:
        """Whether each worker has exactly the weights of `version`."""
        frozen = self.staging[0].frozen
        right = {spec.name: weight(spec, FROZEN_VERSION if spec.name in frozen else version) for spec in self.specs}
        return all(
            set(weights) == set(right) and all(torch.equal(weights[name].cpu(), right[name]) for name in right)
            for weights in self.weights
        )

    def rl_describe(self, worker: int) -> dict[str, str]:
        return {"backend": backend_of(self.device)}

    def rl_prepare(self, worker: int, welcome: bytes, staging: str) -> tuple[str, str, str]:
        return self.staging[worker].prepare(welcome, staging)

    def rl_receive(self, worker: int, go: bytes, notify: str) -> None:
        self.staging[worker].receive(go, notify)

    def rl_abort(self, worker: int) -> bool:
        return self.staging[worker].abort()

    def rl_load(self, worker: int, version: int) -> None:
        self.loader(worker)(self.staging[worker].weights(version))

    def rl_stamp(self, worker: int, version: int) -> None:
        self.stamped = version

    def loader(self, worker: int) -> Any:
        def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            kept, names = self.staging[worker].frozen, list[str]()
            self.weights[worker] = {name: old for name, old in self.weights[worker].items() if name in kept}
            self.loads.append(names)
            for name, tensor in weights:  # those before a broadcast breaks stay
                names.append(name)
                self.weights[worker][name] = tensor.clone()

        return load


class DyingEngine(StagingEngine):
    """Prints `mode` and hangs at that moment of receiving. `go`: the whole process hangs at once. `half`: the receiving
    thread hangs after four buckets, and heartbeats go on. `stall`: like `half`, but only in the first broadcast and
    only until that is given up."""

    def __init__(self, mode: str, device: str = "cpu") -> None:
        super().__init__(device=device)
        self.mode = mode
        if mode == "stall":
            self.staging = [Stalling(self.device, 0, self.loader(0))]

    def rl_receive(self, worker: int, go: bytes, notify: str) -> None:
        if self.mode == "half":  # in a thread: connecting may take longer than the learner waits for a heartbeat
            threading.Thread(target=self.half, args=(worker, go), daemon=True).start()
        elif self.mode == "go":
            print("go", flush=True)
            time.sleep(600)
        else:
            super().rl_receive(worker, go, notify)

    def half(self, worker: int, go: bytes) -> None:
        with own_stream(self.device):
            message = unpack(go, TO_SERVER)
            group = message.source
            rank = group.offset + worker
            where = group.host, group.port, group.epoch, rank, group.world, self.device, 60
            channels = WorkerChannels([Channel(*where, root) for root in range(group.roots)])
            receive_four(channels, self.staging[worker]._buckets)
        if worker == 0:
            print("half", flush=True)
        time.sleep(600)


class Stalling(Staging):
    """Its first broadcast stops after four buckets."""

    stalls, given_up = True, threading.Event()

    def abort(self) -> bool:
        self.given_up.set()
        return super().abort()

    def _take(self, go: Any, weights: Any, channel: Any) -> list[int]:
        if not self.stalls:
            return super()._take(go, weights, channel)
        self.stalls = False
        self.given_up.clear()
        receive_four(channel, weights)
        if self.worker == 0:
            print("stall", flush=True)
        self.given_up.wait()
        raise ChannelError("stalled")


def receive_four(channels: WorkerChannels, weights: Buckets) -> None:
    """Take share in the first four broadcasts only."""
    channels.connect()
    messages, roots = [torch.empty_like(bucket) for bucket in weights.buckets[:4]], [0] * 4
    if weights.plan.ranks > 1:
        shares = shares_of(weights.plan)[:4]
        messages, roots = (
            [weights.buckets[0].new_empty(share.size) for share in shares],
            [share.rank for share in shares],
        )
    for _ in channels.broadcast(messages, None, roots):
        pass


async def follow(
    receiver: Receiver, engine: StagingEngine, seen: list[int], loaded: "asyncio.Queue[int]", hold: Collection[int]
) -> None:
    """The rollout loop's `follow`, which also puts each version into `loaded`, and holds those in `hold`."""
    async with aclosing(receiver.policies()) as policies:
        async for policy in policies:
            await policy.load()
            engine.version = policy.version
            if policy.version in hold:
                assert receiver.hold(loading=True)
            await policy.loaded()
            seen.append(policy.version)
            loaded.put_nowait(policy.version)


class Server:
    """A rollout server in this event loop. `addresses` stands for the buffer, which knows where the learner is."""

    def __init__(self, addresses, name="rollout-0", workers=1, error=0.0, staging="auto", engine=None, form=None):
        self.engine, self.seen, self.loaded = engine or StagingEngine(workers, error), [], asyncio.Queue()
        given = config(staging=staging)
        self.receiver = Receiver(
            addresses.where, self.engine, name, given, HEARTBEAT_S, form, keys=client_keys(server="learner")
        )
        self.hold: set[int] = set()
        self.task = asyncio.create_task(follow(self.receiver, self.engine, self.seen, self.loaded, self.hold))

    async def has(self, version):
        """Wait until `version` is loaded; its weights must be right."""
        try:
            async with asyncio.timeout(WAIT_S):
                while self.engine.version != version:
                    loaded = asyncio.create_task(self.loaded.get())
                    await asyncio.wait({loaded, self.task}, return_when="FIRST_COMPLETED")
                    if self.task.done():
                        loaded.cancel()
                        self.task.result()
        except TimeoutError:
            link, rounds = self.receiver._connection, self.receiver._rounds
            at = f"joined {link.joined}, lost {link.lost}" if link else "not connected"
            raise AssertionError(f"no version {version}: {at}, {rounds.state}, seen {self.seen}") from None
        assert self.engine.holds(version)


class Addresses:
    """Stands for the buffer's `where`."""

    def __init__(self, address=None):
        self.address, self.changed, self.asked = address, asyncio.Condition(), []

    async def where(self, known):
        self.asked.append(known)
        async with self.changed:
            await self.changed.wait_for(lambda: self.address not in (None, known))
        return self.address

    async def set(self, address):
        async with self.changed:
            self.address = address
            self.changed.notify_all()


@asynccontextmanager
async def servers(addresses, *names, **keys):
    made = [Server(addresses, name, **keys) for name in names]
    try:
        yield made
    finally:
        for server in made:
            server.task.cancel()
        await asyncio.gather(*(server.task for server in made), return_exceptions=True)


def config(**keys: Any) -> WeightsConfig:
    """Small buckets and short timeouts."""
    return WeightsConfig(**{"bucket_mib": 1, "timeout_s": 6.0, "probe_every": 1, "probe_tolerance": 0.02} | keys)


async def serve(address: str, name: str, mode: str, device: str = "cpu", staging: str = "auto") -> None:
    """A rollout server as a process."""

    async def where(known: str | None) -> str:
        if known is not None:
            await asyncio.Event().wait()
        return address

    engine = DyingEngine(mode, device)
    if staging == "slices":
        from tests.harness.sliced_engine import DyingSlicedEngine  # which imports this module

        engine = DyingSlicedEngine(mode, device)
    receiver = Receiver(
        where, engine, name, config(staging=staging, timeout_s=30.0), HEARTBEAT_S, keys=client_keys(server="learner")
    )
    async for policy in receiver.policies():
        await policy.load()
        engine.version = policy.version
        print(f"version {policy.version} {'right' if engine.holds(policy.version) else 'wrong'}", flush=True)
        await policy.loaded()
