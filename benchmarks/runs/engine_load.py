"""Load on an engine of vLLM as a rollout server puts it there, without server, learner and rewards.

For benchmarks that compare two ways of sampling window by window: `beside_neighbours` tells by how much one is faster.
"""

import asyncio
import random
from collections.abc import Sequence
from math import sqrt

from benchmarks.runs.processes import PROMPT_TOKENS
from rollout.engine.vllm_engine import Engine

LOADS: dict[str, dict[str, int]] = {
    "Qwen2.5-1.5B": {"running": 512, "mean": 1000, "cut": 4096},
    "Qwen2.5-7B": {"running": 512, "mean": 512, "cut": 2048},
    "speck": {"running": 64, "mean": 40, "cut": 160},
}
"""By shape: sequences that run at a time, mean of their geometric lengths, and where these are cut."""
SAMPLES = 16
"""Requests of a group, which have one prompt."""


class EngineLoad:
    """Keeps an engine's places taken by groups of SAMPLES requests, until cancelled."""

    def __init__(self, engine: Engine, load: dict[str, int]) -> None:
        self.engine, self.load, self.taken, self.ended = engine, load, 0, 0
        self._draw, self._freed = random.Random(0), asyncio.Event()

    async def run(self) -> None:
        """A group whenever a place is free."""
        async with asyncio.TaskGroup() as requests:
            while True:
                while self.taken < self.load["running"]:
                    prompt = self._draw.choices(range(3, 500), k=PROMPT_TOKENS)
                    for _ in range(SAMPLES):
                        self.taken += 1
                        requests.create_task(self._one(prompt))
                    await asyncio.sleep(0)
                self._freed.clear()
                await self._freed.wait()

    async def _one(self, prompt: list[int]) -> None:
        length = 1 + int(self._draw.expovariate(1.0 / self.load["mean"]))
        await self.engine.generate(prompt, min(length, self.load["cut"]), 1.0)
        self.taken, self.ended = self.taken - 1, self.ended + 1
        self._freed.set()


def beside_neighbours(rates: Sequence[float], second: Sequence[bool]) -> list[float]:
    """How many times as fast the second way is, for each window but the first and the last of those whose `rates` are
    given in order of time: beside the geometric mean of the two around it, which are of the other way, so a speed that
    rises or falls steadily drops out. `second`: which windows are of that way."""
    inner = [rates[at] / sqrt(rates[at - 1] * rates[at + 1]) for at in range(1, len(rates) - 1)]
    return [ratio if second[at] else 1.0 / ratio for at, ratio in enumerate(inner, 1)]
