"""`python -m tests.system.chaos_rollout RUN NAME`: a rollout server of the chaos test, all real but engine and wire.

`roll`, `follow`, `Episodes`, the single-turn task or an agent with its door, the reward workers, `RolloutClient` and
heartbeats are those of `python -m rollout`. The engine answers with random digits and takes its time, so that kills hit
unfinished groups. Waits for the buffer, for a first policy, then for work; ends when the buffer has no more.
"""

import asyncio
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import uvloop
import zmq
import zmq.asyncio

from buffer.curve import client_keys_for
from buffer.wire.client import Connection, RolloutClient, heartbeats
from configs.checks import max_sample_tokens
from configs.entrypoint import StopSignals, configure_logging
from configs.inner_command import inner_words
from configs.resume import fingerprint
from configs.schema import Config
from rollout.cage.user_task import UserTask
from rollout.concurrency import start
from rollout.drain import REPORT_S, Drain
from rollout.episodes.episode import Episodes, Failure
from rollout.episodes.sampler import Sampler
from rollout.episodes.setup import open_sessions
from rollout.errors import PromptError
from rollout.evaluation.evaluator import Evaluator
from rollout.loop import PolicyUpdates, follow, roll
from rollout.rewards.workers import RewardPool
from rollout.tasks import Completion, EpisodeError, Generate, Problem, Trajectory
from rollout.tasks.trajectory import single_turn
from tests.system.chaos_run import AGENT, FLAKY, LONGEST_PROMPT, SAME, Run

SLOW_S, SLOWEST_S, SLOWEST_SHARE = 0.6, 5.0, 0.04
"""Longest time a sample takes until the kills are over; for a few, longer than a learner needs to restart."""
END = ord(".")


class Engine:
    """Stands for `Engine` of vllm_engine.py. Tokens are codes of characters, each stamped with its version."""

    def __init__(self, run: Run) -> None:
        self.run, self.version, self.first, self.vocabulary = run, 0, asyncio.Event(), 128
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.salt, self.routes = "", None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self._resumed.clear()
        yield
        self._resumed.set()

    async def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int] = (),
        images: Sequence[object] = (),
        salt: str | None = None,
        routed: int = 0,
    ) -> Completion:
        equal = "".join(map(chr, prompt)).startswith(SAME)
        text = "x" * random.randrange(max_tokens - 3) + f"={1 if equal else random.randrange(10)}."
        longest_s = SLOWEST_S if random.random() < SLOWEST_SHARE else SLOW_S
        versions: list[int] = []
        for half in (len(text) // 2, len(text) - len(text) // 2):
            await self._resumed.wait()
            versions += [self.version] * half
            if not self.run.calm.exists():
                await asyncio.sleep(random.uniform(0, longest_s / 2))
        return Completion([ord(c) for c in text], [-0.5] * len(text), versions, "stop")


class Characters:
    """Stands for a tokenizer: a token a character. Its chat template closes an answer by END and writes all else as it
    is, so that what was given of an episode is the problem and what the agent asked."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, chat: Sequence[dict[str, Any]], **options: Any) -> str:
        return "".join(message["content"] + chr(END) * (message["role"] == "assistant") for message in chat)


class Prompts:
    """Stands for `Prompts` of episodes/prompts.py."""

    tokenizer, stops, form = Characters(), (END,), None
    ends, plain, chat_template, system, template_place = (END,), False, None, None, "here"
    template_text = ""
    template_kwargs: ClassVar[dict[str, Any]] = {}

    def close(self) -> None:
        """Nothing renders templates here."""

    def tokens(self, row: dict[str, Any], pictures: Sequence[object] = ()) -> list[int]:
        if len(row["problem"]) > LONGEST_PROMPT:
            raise PromptError(f"prompt longer than data.max_prompt_tokens {LONGEST_PROMPT}")  # as `Prompts` says it
        return [ord(character) for character in row["problem"]]

    def text(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens)).rstrip(".")


class Receiver:
    """Stands for `Receiver`: subscribes to the versions of the learner that the buffer names."""

    def __init__(self, buffer: RolloutClient, engine: Engine) -> None:
        self.buffer, self.engine = buffer, engine
        self._released, self._yielded = asyncio.Event(), False
        self._released.set()

    def hold(self, loading: bool = False) -> bool:
        """Yield no newer version until `release`; False: one that was yielded is not in use yet."""
        if self._yielded and not loading:
            return False
        self._released.clear()
        return True

    def release(self) -> None:
        self._released.set()

    async def policies(self) -> AsyncGenerator["Policy", None]:
        context, address = zmq.asyncio.Context.instance(), await self.buffer.where(None)
        while True:
            moved = asyncio.create_task(self.buffer.where(address))
            with context.socket(zmq.SUB) as wire:
                wire.subscribe(b"")
                wire.connect(address)
                while not moved.done():
                    received = asyncio.ensure_future(wire.recv())
                    await asyncio.wait({received, moved}, return_when=asyncio.FIRST_COMPLETED)
                    if received.done():
                        await self._released.wait()
                        self._yielded = True
                        yield Policy(int(received.result()), self)
                        self._yielded = False
                    else:
                        received.cancel()
            address = moved.result()


class Policy:
    """A version without weights."""

    def __init__(self, version: int, receiver: Receiver) -> None:
        self.version, self.receiver = version, receiver

    async def load(self) -> None:
        await asyncio.sleep(random.uniform(0, 0.02))

    async def loaded(self) -> None:
        self.receiver.engine.first.set()


def following(config: Config, buffer: RolloutClient, engine: Engine) -> Coroutine[Any, Any, None]:
    """The loop `follow` of a server that evaluates nothing."""
    evaluator = Evaluator(config, None, engine, buffer, None, None, [])  # type: ignore[arg-type]
    updates = PolicyUpdates(Receiver(buffer, engine), config.run.versions, buffer.nudged.set)  # type: ignore[arg-type]
    return follow(updates, engine, evaluator)  # type: ignore[arg-type]


async def task(problem: Problem, generate: Generate) -> Trajectory:
    """The single turn, unless the row says that it fails."""
    kind = problem.row["answer"].partition(":")[0]
    if kind == "dead" or (kind == FLAKY and random.random() < 0.2):
        raise EpisodeError("the task gave up")
    return await single_turn(problem, generate)


async def main(run: Run, name: str) -> None:
    """Build the parts and run the loops until there is no more work."""
    config, engine = run.config(), Engine(run)
    keys = client_keys_for(config.buffer.address, config.run.path, "rollout")
    client = Connection(config.buffer.address, name, "rollout", fingerprint(config), keys=keys)
    drain = Drain(config.rollout.drain_s)
    with StopSignals(drain.begin, drain.force):
        try:
            await work(run, config, engine, client, drain)
        except asyncio.CancelledError:  # it was stopped before it had anything to drain
            if drain.episodes is not None:
                raise


async def work(run: Run, config: Config, engine: Engine, client: Connection, drain: Drain) -> None:
    """The loops, until there is no more work or the drain has ended."""
    answer, prompts = config.sampling.max_tokens, Prompts()
    by_agents = config.rollout.task.startswith(str(AGENT))
    agents = UserTask(config, open_sessions(config, prompts)) if by_agents else nullcontext(task)  # type: ignore[arg-type]
    async with RewardPool(config.reward) as rewards, agents as played, client:
        buffer = RolloutClient(client, lambda: engine.version)
        sampler = Sampler(engine, prompts, 1.0, answer, max_sample_tokens(config))
        episodes = Episodes(prompts, played, sampler, rewards, config.batch.samples)
        revoke = partial(episodes.abandon, failure=Failure("the buffer took the lease back"))
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(following(config, buffer, engine)),
                tasks.create_task(heartbeats(buffer, config.rollout.heartbeat_s, dict, revoke)),
            ]
            drain.episodes = episodes
            await drain.wait(first := asyncio.ensure_future(engine.first.wait()))
            first.cancel()
            await roll(partial(drain.ask, buffer), buffer, episodes, start(config, True, lambda tokens: 64)[0])
            for other in others:
                other.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await buffer.leave()


if __name__ == "__main__":
    inner_words("RUN", "NAME")
    configure_logging()
    with suppress(KeyboardInterrupt):
        uvloop.run(main(Run(Path(sys.argv[1])), sys.argv[2]))
