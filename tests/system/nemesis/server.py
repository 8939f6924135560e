"""`python -m tests.system.nemesis.server OUTER NAME`: a rollout server, all real but its engine and tokenizer.

Both loops, episodes, the samples wire and the weights wire are those of `python -m rollout`; the engine answers with
random digits (`chaos_rollout.py`) and holds the weights that arrive. Its history gets all
that it generates, delivers and loads. Waits for the buffer, for a first policy, then for work.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvloop

from buffer.curve import split
from buffer.wire.client import Connection, RefusedError, RolloutClient, heartbeats
from buffer.wire.protocol import Stored, WorkItem
from buffer.wire.sample import Sample
from configs.checks import max_sample_tokens
from configs.entrypoint import BAD_INPUT, DONE, StopSignals, configure_logging
from configs.inner_command import inner_words
from configs.load import ConfigError
from configs.resume import fingerprint
from configs.schema import Config
from learner.weights.channel import backend_of
from learner.weights.receiver.follow import Receiver
from learner.weights.receiver.staging import Staging
from rollout.concurrency import start
from rollout.drain import Drain
from rollout.episodes.episode import Episodes, Failure
from rollout.episodes.sampler import Sampler
from rollout.evaluation.evaluator import Evaluator
from rollout.loop import PolicyUpdates, follow, roll
from rollout.tasks import Generate, Problem, Trajectory
from rollout.tasks.trajectory import single_turn
from tests.system import chaos_rollout
from tests.system.nemesis.history import Acknowledged, Generated, History, Loaded, digest
from tests.system.nemesis.keys import buffer_keys, weights_keys
from tests.system.nemesis.run import NemesisRun
from tests.system.nemesis.weights import logprobs, policy_of


class Engine(chaos_rollout.Engine):
    """The chaos test's engine with weights: stands for vLLM and its one worker."""

    def __init__(self, run: NemesisRun, history: History) -> None:
        super().__init__(run)  # type: ignore[arg-type]
        self.history, self.policy = history, ""
        self.held: dict[str, torch.Tensor] = {}
        self.staging = Staging(torch.device("cpu"), 0, self.put_in_place)

    def put_in_place(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.held |= {name: tensor.clone() for name, tensor in weights}

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return [getattr(self, method)(*args)]

    async def probe(self, tokens: list[int], images: Sequence[Any] = ()) -> list[float]:
        return logprobs(self.policy, tokens)

    def rl_describe(self) -> dict[str, str]:
        return {"backend": backend_of(torch.device("cpu"))}

    def rl_prepare(self, welcome: bytes, staging: str) -> tuple[str, str, str]:
        return self.staging.prepare(welcome, staging)

    def rl_receive(self, go: bytes, notify: str) -> None:
        self.staging.receive(go, notify)

    def rl_abort(self) -> bool:
        return self.staging.abort()

    def rl_load(self, version: int) -> None:
        self.put_in_place(self.staging.weights(version))
        self.policy = policy_of(self.held)
        self.history.add(Loaded, version=version, policy=self.policy)

    def rl_stamp(self, version: int) -> None:
        """The loop sets `version`."""


class RecordedClient(RolloutClient):
    """Writes down what it delivers, before and after."""

    def __init__(self, client: Connection, server_version: Callable[[], int], history: History) -> None:
        super().__init__(client, server_version)
        self.history = history

    async def put(self, item: WorkItem, samples: Sequence[Sample]) -> Stored:
        oldest = min(int(each.versions.numpy()[each.sampled.numpy().astype(bool)].min()) for each in samples)
        made = {"dispatched": item.version, "oldest": oldest, "samples": [digest(each.pack()) for each in samples]}
        self.history.add(Generated, item=item.item, lease=item.lease, **made)
        stored = await super().put(item, samples)
        self.history.add(Acknowledged, item=item.item, lease=item.lease, accepted=stored.accepted)
        return stored


def through_proxy(where: Callable[[str | None], Coroutine[Any, Any, str]], port: int) -> Any:
    """`where` for a `Receiver` that reaches each learner through the proxy at `port`: a learner at port P of this
    machine is at the loopback address 127.1.(P / 256).(P % 256) of the proxy, so a new one has a new address."""
    seen: dict[str, str] = {}

    async def proxied(known: str | None) -> str:
        address = await where(seen.get(known or ""))
        number = int(split(address)[1])
        alias = f"tcp://127.1.{number >> 8}.{number & 255}:{port}"
        seen[alias] = address
        return alias

    return proxied


async def task(problem: Problem, generate: Generate) -> Trajectory:
    """The single turn, scored."""
    made = await single_turn(problem, generate)
    made.score = random.random()
    return made


async def main(run: NemesisRun, name: str) -> int:
    """Build the parts, and run the loops until the server is drained. Returns the exit code."""
    torch.set_num_threads(1)
    config, history = run.config(), run.history(name)
    address = f"tcp://127.0.0.1:{run.port_of(name, 'buffer')}"
    client = Connection(address, name, "rollout", fingerprint(config), keys=buffer_keys(config, "rollout"))
    drain = Drain(config.rollout.drain_s)
    with StopSignals(drain.begin, drain.force) as signals:
        try:
            async with client:
                await work(run, config, Engine(run, history), client, drain)
        except asyncio.CancelledError:
            if not signals.count:
                raise
    return DONE


async def work(run: NemesisRun, config: Config, engine: Engine, client: Connection, drain: Drain) -> None:
    """The loops, until the drain has ended."""
    prompts = chaos_rollout.Prompts()
    buffer = RecordedClient(client, lambda: engine.version, engine.history)
    sampler = Sampler(engine, prompts, 1.0, config.sampling.max_tokens, max_sample_tokens(config))  # type: ignore[arg-type]
    episodes = Episodes(prompts, task, sampler, None, config.batch.samples)  # type: ignore[arg-type]
    where = through_proxy(buffer.where, run.port_of(client.name, "weights"))
    receiver = Receiver(where, engine, client.name, config.weights, keys=weights_keys(config), heartbeat_s=0.5)
    updates = PolicyUpdates(receiver, config.run.versions, buffer.nudged.set)
    evaluator = Evaluator(config, None, engine, buffer, receiver, None, [])  # type: ignore[arg-type]
    revoke = partial(episodes.abandon, failure=Failure("the buffer took the lease back"))
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(follow(updates, engine, evaluator)),  # type: ignore[arg-type]
            tasks.create_task(heartbeats(buffer, config.rollout.heartbeat_s, dict, revoke)),
        ]
        drain.episodes = episodes
        await drain.wait(first := asyncio.ensure_future(updates.first.wait()))
        first.cancel()
        await roll(partial(drain.ask, buffer), buffer, episodes, start(config, True, lambda tokens: 64)[0])
        for other in others:
            other.cancel()
    await buffer.leave()


if __name__ == "__main__":
    inner_words("OUTER", "NAME")
    configure_logging()
    try:
        sys.exit(uvloop.run(main(NemesisRun(Path(sys.argv[1])), sys.argv[2])))
    except (ConfigError, RefusedError) as refused:
        print(f"python -m rollout: {refused}", file=sys.stderr)
        sys.exit(BAD_INPUT)
