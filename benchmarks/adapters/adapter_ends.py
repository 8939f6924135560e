"""The processes of `benchmarks.adapters`: `python -m benchmarks.adapters.adapter_ends learner|server JSON`.

Each reads commands from stdin and answers on stdout with lines of JSON that begin with @. The server is the real engine
with random weights, which it makes up itself; the learner has no model, only the real sender of random adapters.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Collection, Iterator
from typing import Any

import torch

from benchmarks.weights.ends import GPU, STALL_S, commands_from_stdin, run_end, say, served, synchronize
from benchmarks.weights.traffic import PROMPT_TOKENS, vocabulary_of
from buffer.keys import load_client_keys, load_server_keys
from configs.inner_command import inner_words
from configs.schema import Config
from learner.weights.plan import LORA_A, LORA_B, Spec
from learner.weights.receiver.follow import Receiver


class RandomAdapter:
    """An adapter of all layers that servers adapt; each version has other values."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from learner.model import loading
        from rollout.engine.arguments import LINEAR_LAYERS

        lora, dtype = config.model.lora, getattr(torch, config.model.dtype)
        assert lora is not None
        self.specs: list[Spec] = []
        for name, weight in loading.build_on_meta(config.model, "sdpa").named_parameters():
            layer = name.removesuffix(".weight")
            if weight.dim() == 2 and layer.rpartition(".")[2] in LINEAR_LAYERS:
                self.specs.append(Spec(layer + LORA_A, (lora.rank, weight.shape[1]), dtype))
                self.specs.append(Spec(layer + LORA_B, (weight.shape[0], lora.rank), dtype))
        self._tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in self.specs}

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """Small random values: B A x is far below W x, as early in training."""
        yield from ((name, tensor.normal_(0.0, 0.01)) for name, tensor in self._tensors.items())

    def logprobs_of(self, tokens: list[int]) -> list[float]:
        raise NotImplementedError("weights.probe_every is 0")


def learner(config: Config) -> None:
    """The stand-in. Its command: `updates N GAP`."""
    from learner.weights.sender.publish import Sender

    device = torch.device("cuda", 0) if GPU else torch.device("cpu")
    adapter = RandomAdapter(config, device)
    wire = Sender(adapter.specs, config.weights, 0, device, keys=load_server_keys(config.run.path / "keys", "learner"))
    say(address=wire.address)
    _, number, gap_s = sys.stdin.readline().split()
    updates = []
    for version in range(int(number) + 1):
        synchronize()
        started = time.monotonic()
        wire.publish(adapter, version)
        served(wire, version)
        updates.append({**wire.stats(), "version": version, "started": started})
        time.sleep(float(gap_s) + 2 * STALL_S)
    say(updates=updates)
    wire.close()


class AdapterServing:
    """A busy engine. `events`: what each swap cost."""

    def __init__(self, engine: Any, config: Config) -> None:
        self.engine, self.config = engine, config
        self.events: list[dict[str, float]] = []

    async def keep_busy(self, number: int, length: int) -> None:
        """One sequence after another; the first is of random length, so that ends are spread evenly."""
        draw, vocabulary = random.Random(number), vocabulary_of(self.config.model.path)
        first = draw.randrange(1, length)
        while True:
            prompt = [draw.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)]
            await self.engine.generate(prompt, first, 1.0)
            first = length

    async def rate(self, seconds: float) -> float:
        """Tokens per second once all sequences run."""
        while self.engine.stats()["running"] < 1:
            await asyncio.sleep(0.1)
        await asyncio.sleep(seconds / 2)
        began, before = time.monotonic(), self.engine.tokens
        await asyncio.sleep(seconds)
        return float((self.engine.tokens - before) / (time.monotonic() - began))

    async def follow(self, address: str) -> None:
        """Load each policy as `rollout.loop.follow` does."""

        async def where(known: str | None) -> str:
            if known:
                await asyncio.Event().wait()
            return address

        keys = load_client_keys(self.config.run.path / "keys", "rollout", server="learner")
        async for policy in Receiver(where, self.engine, "rollout-0", self.config.weights, keys=keys).policies():
            self.engine.stats()  # counts anew from here
            began = time.monotonic()
            await policy.load()
            self.engine.version = policy.version
            swapped = time.monotonic()
            await policy.loaded()
            await asyncio.sleep(STALL_S)
            silence_s = self.engine.stats()["stall_s"]
            await asyncio.sleep(STALL_S)
            event = {"load_s": swapped - began, "silence_s": silence_s, "quiet_s": self.engine.stats()["stall_s"]}
            self.events.append({"version": policy.version, "swapped": swapped, **event})


async def server(config: Config, running: int, length: int) -> None:
    """The server. Its commands: `measure SECONDS`, `follow ADDRESS`, `report`."""
    from rollout.engine.arguments import engine_arguments, environment, on_cpu
    from rollout.engine.vllm_engine import Engine

    cpu = on_cpu(config)
    for key, value in environment(cpu).items():
        os.environ.setdefault(key, value)
    engine = await Engine.launch(engine_arguments(config, 1, cpu) | {"load_format": "dummy"})
    commands, serving = commands_from_stdin(), AdapterServing(engine, config)
    say(started=True)
    async with asyncio.TaskGroup() as tasks:
        while True:
            verb, *words = await commands.get()
            if verb == "measure":
                for number in range(running):
                    tasks.create_task(serving.keep_busy(number, length))
                say(rate=await serving.rate(float(words[0])))
            elif verb == "follow":
                tasks.create_task(serving.follow(words[0]))
            else:
                say(events=serving.events)


if __name__ == "__main__":
    inner_words("ROLE", "CONFIG")
    run_end(learner, server)
