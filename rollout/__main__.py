"""`python -m rollout CONFIG [--name rollout-0]`: a rollout server. (`python -m rollout evaluate`: see `evaluate.py`.)

Waits, in this order: for the buffer to greet it, for vLLM to start, for the learner's first policy (the weights it
starts with are dummies and never generate). Then it makes groups and follows policies until the buffer has no more
problems and the last policy has arrived. Exit codes: 0 done or drained, 1 died of what it says, 2 refused before
anything started, 130 forced.
"""

import asyncio
import logging
import os
import sys
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from buffer.curve import KeysError, client_keys_for
from buffer.wire.client import Connection, RefusedError, RolloutClient, heartbeats
from configs.checks import check
from configs.load import fingerprint, read
from configs.schema import Config
from rollout.drain import FORCED, Drain, Signals
from rollout.episodes.episode import Episodes, first_error, sampler
from rollout.episodes.setup import FILES, Parts
from rollout.interfaces import Policy, Weights
from rollout.loop import follow, roll
from rollout.places import Places

if TYPE_CHECKING:
    from rollout.engine.vllm_engine import Engine

log = logging.getLogger("rollout")
PROG = "python -m rollout"
WATCH_S = 5.0
"""Between two questions whether vLLM lives."""
REVOKED = "the buffer took the lease back"


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    if argv and argv[0] == "evaluate":
        from rollout import evaluate

        return evaluate.main(argv[1:])
    name, rest = option(argv, "--name", "rollout-0")
    config = read(rest, f"{PROG} [--name rollout-0]", partial(check, files=FILES))
    try:
        parts = Parts.of(config)
        code = uvloop.run(serve(config, name, parts))
    except (ValueError, KeysError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    return code


def option(argv: Sequence[str], flag: str, default: str) -> tuple[str, list[str]]:
    """The value of `--flag value` or `--flag=value`, and the rest of the line."""
    words, value = list(argv), default
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            value = words[at + 1]
            del words[at : at + 2]
            break
        if word.startswith(f"{flag}="):
            value = word.partition("=")[2]
            del words[at]
            break
    return value, words


class PolicyUpdates:
    """The learner's policies, and two moments: `first`, when one is in place, and `last`, when none will follow."""

    def __init__(self, weights: Weights, versions: int) -> None:
        self.weights, self.versions = weights, versions
        self.first, self.last = asyncio.Event(), asyncio.Event()

    async def policies(self) -> AsyncGenerator[Policy, None]:
        """Hand each on; asked for the next, the one before is in place."""
        async with aclosing(self.weights.policies()) as policies:
            async for policy in policies:
                yield policy
                self.first.set()
                log.info("version %d generates", policy.version)
                if policy.version >= self.versions:
                    self.last.set()


async def serve(config: Config, name: str, parts: Parts) -> int:
    """From the first signal handler to the last closed process; returns the exit code."""
    from rollout.engine.vllm_engine import Engine, EngineDead

    with Signals() as interrupts:
        log.info("%s asks the buffer at %s to greet it", name, config.buffer.address)
        try:
            async with parts.rewards, connect(config, name) as client:
                engine = await Engine.start(config, seed(config, name))
                try:
                    await work(config, name, parts, client, engine, interrupts)
                finally:
                    await engine.close()
        except asyncio.CancelledError:
            if not interrupts.heard:
                raise
            return FORCED if interrupts.heard > 1 else 0
        except (ValueError, KeysError):
            raise
        except Exception as error:  # the outermost boundary of the process
            cause = first_error(error)
            if isinstance(cause, RefusedError):
                print(f"{PROG}: the buffer at {config.buffer.address} refuses {name}: {cause}", file=sys.stderr)
                return 2
            log.error("%s: %s", type(cause).__name__, cause, exc_info=None if isinstance(cause, EngineDead) else error)
            return 1
    return 0


def connect(config: Config, name: str) -> Connection:
    """The connection to the buffer, with the run's keys where the wire leaves the machine."""
    keys = client_keys_for(config.buffer.address, config.run.path)
    return Connection(config.buffer.address, name, "rollout", fingerprint(config), keys=keys)


def seed(config: Config, name: str) -> int:
    """Another one for each server of a run."""
    return (config.run.seed * 1_000_003 + zlib.crc32(name.encode())) % 2**31


async def work(
    config: Config, name: str, parts: Parts, client: Connection, engine: "Engine", interrupts: Signals
) -> None:
    """Build the parts around the engine and run the loops until the run is over or drained."""
    from learner.weights.receiver.follow import Receiver

    samples = RolloutClient(client, lambda: engine.version)
    receiver = Receiver(samples.where, engine, name, config.weights, client.keys)
    arrivals = PolicyUpdates(receiver, config.run.versions)
    generate = sampler(engine, config.sampling.max_tokens, config.sampling.temperature, parts.prompts.stops)
    episodes = Episodes(parts.prompts, parts.task, generate, parts.rewards, config.batch.samples)
    drain = Drain(samples, episodes, interrupts.now)
    interrupts.gently = drain.begin
    revoke = partial(episodes.abandon, reason=REVOKED)
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(follow(arrivals, engine)),
            tasks.create_task(heartbeats(samples, config.rollout.heartbeat_s, engine.stats, revoke)),
            tasks.create_task(watch(engine, config.weights.timeout_s)),
            tasks.create_task(engine.died()),
        ]
        await either(arrivals.first, drain.begun)
        await roll(drain, episodes, Places(config.rollout.groups_in_flight))
        with suppress(TimeoutError):
            await asyncio.wait_for(either(arrivals.last, drain.begun), config.learner.timeout_s)
        await drain.close()
        for other in others:
            other.cancel()


async def watch(engine: "Engine", limit_s: float) -> None:
    """Raises EngineDead once vLLM does not answer for `limit_s`, also while it has nothing to do."""
    while True:
        await engine.alive(limit_s)
        await asyncio.sleep(WATCH_S)


async def either(*events: asyncio.Event) -> None:
    """Until one of them is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiting in waits:
            waiting.cancel()


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is closed; vLLM's objects complain when the interpreter takes them apart
