"""`python -m tests.system.chaos_rollout RUN NAME`: a rollout server of the chaos test, all real but engine and wire.

`roll`, `follow`, `Episodes`, `Places`, the single-turn task, the reward workers, `RolloutClient` and heartbeats are those of
`python -m rollout`. The engine answers with random digits and takes its time, so that kills hit groups in the making.
Waits for the buffer, for a first policy, then for work; ends when the buffer has no more.
"""

import asyncio
import logging
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from buffer.wire.client import Connection, RolloutClient, heartbeats
from configs.load import fingerprint
from rollout.episodes.episode import Completion, EpisodeError, Episodes, Generate, Problem, Trajectory, sampler
from rollout.loop import follow, roll
from rollout.places import Places
from rollout.rewards.workers import RewardPool
from rollout.tasks.single_turn import single_turn
from tests.system.chaos_run import FLAKY, LONGEST_PROMPT, SAME, Run

SLOW_S, SLOWEST_S, SLOWEST_SHARE = 0.6, 5.0, 0.04
"""Longest time a sample takes until the kills are over; and that of a few, which outlast the restart of a learner."""
END = ord(".")


class Engine:
    """Stands for `rollout.engine.Engine`. Tokens are codes of characters, stamped with the version of their moment."""

    def __init__(self, run: Run) -> None:
        self.run, self.version, self.first = run, 0, asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self._going.clear()
        yield
        self._going.set()

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        equal = "".join(map(chr, prompt)).startswith(SAME)
        text = "x" * random.randrange(max_tokens - 3) + f"={1 if equal else random.randrange(10)}."
        longest_s = SLOWEST_S if random.random() < SLOWEST_SHARE else SLOW_S
        versions: list[int] = []
        for half in (len(text) // 2, len(text) - len(text) // 2):
            await self._going.wait()
            versions += [self.version] * half
            if not self.run.calm.exists():
                await asyncio.sleep(random.uniform(0, longest_s / 2))
        return Completion([ord(c) for c in text], [-0.5] * len(text), versions, "stop")


class Prompts:
    """Stands for `rollout.prompts.Prompts`."""

    def tokens(self, row: dict[str, Any]) -> list[int]:
        if len(row["problem"]) > LONGEST_PROMPT:
            raise EpisodeError(f"prompt too long; data.max_prompt_tokens is {LONGEST_PROMPT}", permanent=True)
        return [ord(character) for character in row["problem"]]

    def text(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens)).rstrip(".")


class Receiver:
    """Stands for `learner.weights.receiver.Receiver`: hears versions of the learner that the buffer names."""

    def __init__(self, samples: RolloutClient, engine: Engine) -> None:
        self.samples, self.engine = samples, engine

    async def policies(self) -> AsyncGenerator["Policy", None]:
        context, address = zmq.asyncio.Context.instance(), await self.samples.where(None)
        while True:
            moved = asyncio.create_task(self.samples.where(address))
            with context.socket(zmq.SUB) as wire:
                wire.subscribe(b"")
                wire.connect(address)
                while not moved.done():
                    heard = asyncio.ensure_future(wire.recv())
                    await asyncio.wait({heard, moved}, return_when=asyncio.FIRST_COMPLETED)
                    if heard.done():
                        yield Policy(int(heard.result()), self)
                    else:
                        heard.cancel()
            address = moved.result()


class Policy:
    """A version, nothing more."""

    def __init__(self, version: int, receiver: Receiver) -> None:
        self.version, self.receiver = version, receiver

    async def load(self) -> None:
        await asyncio.sleep(random.uniform(0, 0.02))

    async def loaded(self) -> None:
        self.receiver.samples.nudged.set()
        self.receiver.engine.first.set()


async def task(problem: Problem, generate: Generate) -> Trajectory:
    """The single turn, after trouble where the row says so."""
    kind = problem.row["answer"].partition(":")[0]
    if kind == "dead" or (kind == FLAKY and random.random() < 0.2):
        raise EpisodeError("the task gave up")
    return await single_turn(problem, generate)


async def main(run: Run, name: str) -> None:
    """Build the parts and run the loops until there is no more work."""
    config, engine = run.config(), Engine(run)
    client = Connection(config.buffer.address, name, "rollout", fingerprint(config))
    async with RewardPool(config.reward) as rewards, client:
        samples = RolloutClient(client, lambda: engine.version)
        generate = sampler(engine, config.sampling.max_tokens, 1.0, [END])
        episodes = Episodes(Prompts(), task, generate, rewards, config.batch.samples)
        revoke = partial(episodes.abandon, reason="the buffer took the lease back")
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(follow(Receiver(samples, engine), engine)),
                tasks.create_task(heartbeats(samples, config.rollout.heartbeat_s, dict, revoke)),
            ]
            await engine.first.wait()
            await roll(samples, episodes, Places(config.rollout.groups_in_flight))
            for other in others:
                other.cancel()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    with suppress(KeyboardInterrupt):
        uvloop.run(main(Run(Path(sys.argv[1])), sys.argv[2]))
