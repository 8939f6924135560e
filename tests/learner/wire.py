"""Stand-ins for both ends of the weights wire: a policy whose weights tell its version, an engine without vLLM, and a
rollout server as a process, `python -m tests.learner.wire ADDRESS NAME MODE`, that can be killed at a chosen moment.

What such a server does it says on stdout, a line each.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from configs.schema import WeightsConfig
from learner.weights.channel import Channel, backend_of
from learner.weights.plan import Spec
from learner.weights.protocol import TO_SERVER, unpack
from learner.weights.receiver import Receiver
from learner.weights.staging import Staging

HEARTBEAT_S = 0.2
SPECS = [
    Spec("embed", (96, 1024), torch.float32),
    *(Spec(f"layer.{i}", (300, 1000), torch.bfloat16) for i in range(6)),
    Spec("big", (700, 1000), torch.float32),
    Spec("norm", (7,), torch.bfloat16),
]
"""Six MiB and a half: several buckets of 1 MiB, one tensor larger than a bucket, one odd size."""


def weight(spec: Spec, version: int) -> torch.Tensor:
    """The tensor of `spec` at `version`; other names and versions give others."""
    seed = sum(map(ord, spec.name)) + 1000 * version
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)).to(spec.dtype)


def logprobs(version: int, tokens: list[int]) -> list[float]:
    """What a policy of `version` says to `tokens[1:]`."""
    return [-0.1 * version - 0.001 * token for token in tokens[1:]]


class VersionedPolicy:
    """A policy of which only the version matters."""

    def __init__(self, version: int) -> None:
        self.version, self.asked = version, 0

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in SPECS:
            yield spec.name, weight(spec, self.version)

    def logprobs_of(self, tokens: list[int]) -> list[float]:
        self.asked += 1
        return logprobs(self.version, tokens)


class StagingEngine:
    """An engine of `workers` workers that only stage and load. `error` is added to what it says to the probe."""

    def __init__(self, workers: int = 1, error: float = 0.0, device: str = "cpu") -> None:
        self.version, self.paused_s, self.stop_s, self.resume_s, self.error = -1, 0.0, 0.0, 0.0, error
        self.device, self.pauses = torch.device(device), 0
        self.staging = [Staging(self.device, worker, self.loader(worker)) for worker in range(workers)]
        self.weights: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return [getattr(self, method)(worker, *args) for worker in range(len(self.staging))]

    async def probe(self, tokens: list[int]) -> list[float]:
        return [value + self.error for value in logprobs(self.version, tokens)]

    @asynccontextmanager
    async def paused(self):
        self.pauses += 1
        yield

    def holds(self, version: int) -> bool:
        """Does each worker have exactly the weights of `version`?"""
        return all(
            set(weights) == {spec.name for spec in SPECS}
            and all(torch.equal(weights[spec.name], weight(spec, version)) for spec in SPECS)
            for weights in self.weights
        )

    def rl_describe(self, worker: int) -> dict[str, str]:
        return {"backend": backend_of(self.device)}

    def rl_prepare(self, worker: int, welcome: bytes, staging: str) -> tuple[str, str]:
        return self.staging[worker].prepare(welcome, staging)

    def rl_receive(self, worker: int, go: bytes, notify: str) -> None:
        self.staging[worker].receive(go, notify)

    def rl_abort(self, worker: int) -> None:
        self.staging[worker].abort()

    def rl_load(self, worker: int, version: int) -> None:
        self.loader(worker)(self.staging[worker].weights(version))

    def loader(self, worker: int) -> Any:
        def load(weights: Iterator[tuple[str, torch.Tensor]]) -> float:
            self.weights[worker] = {}
            for name, tensor in weights:  # what comes before a broadcast breaks is there
                self.weights[worker][name] = tensor.clone()
            return 0.0

        return load


class DyingEngine(StagingEngine):
    """Stops for ever at a chosen moment of receiving, once the process has said so."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def rl_receive(self, worker: int, go: bytes, notify: str) -> None:
        if self.mode == "half":
            message = unpack(go, TO_SERVER)
            channel = Channel(
                message.host, message.port, message.epoch, message.offset, message.world, torch.device("cpu"), 60
            )
            channel.connect()
            next(
                channel.broadcast(
                    [torch.zeros(len(b), dtype=torch.uint8) for b in self.staging[0]._snapshot.buckets[:4]]
                )
            )
        if self.mode in ("go", "half"):
            print(self.mode, flush=True)
            time.sleep(600)
        super().rl_receive(worker, go, notify)


async def follow(receiver: Receiver, engine: StagingEngine, seen: list[int], mail: "asyncio.Queue[int]") -> None:
    """The rollout loop's `follow`, and a letter after each version."""
    async for policy in receiver.policies():
        async with engine.paused():
            await policy.load()
            engine.version = policy.version
        await policy.loaded()
        seen.append(policy.version)
        mail.put_nowait(policy.version)


def config(**keys: Any) -> WeightsConfig:
    """Small buckets and short deadlines."""
    return WeightsConfig(**{"bucket_mib": 1, "deadline_s": 4.0, "probe_every": 1, "probe_tolerance": 0.02} | keys)


async def serve(address: str, name: str, mode: str) -> None:
    """A rollout server as a process."""

    async def where(known: str | None) -> str:
        if known is not None:
            await asyncio.Event().wait()
        return address

    engine = DyingEngine(mode)
    receiver = Receiver(where, engine, name, config(), heartbeat_s=HEARTBEAT_S)
    async for policy in receiver.policies():
        await policy.load()
        engine.version = policy.version
        await policy.loaded()
        print(f"version {policy.version} {'right' if engine.holds(policy.version) else 'wrong'}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(*sys.argv[1:4]))
