"""`python -m rollout CONFIG [--name rollout-0]`: a rollout server; also runs `evaluate`, `reward` and `teacher`.

Waits for users' code, the buffer, vLLM and the first policy. Exit codes: 0 done or drained, 1 failed, 2 input refused
or another initial model than the learner's, 130 forced.
"""

import asyncio
import logging
import os
import sys
import time
import zlib
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import uvloop

from buffer.curve import client_keys_for
from buffer.keys import KeysError, load_client_keys
from buffer.wire.client import Connection, RefusedError, RolloutClient, heartbeats
from configs.checks import own_hosts
from configs.entrypoint import (
    BAD_INPUT,
    DONE,
    FAILED,
    StopSignals,
    code_of,
    configure_logging,
    process_name,
    run_and_exit,
    split_flags,
    tie_children,
    without_collections,
)
from configs.libraries import refuse
from configs.load import read
from configs.plain_text import print_visible
from configs.resume import fingerprint
from configs.schema import Config
from configs.start_phases import StartPhases
from configs.variables import around_proxy
from rollout import evaluate
from rollout.concurrency import SparePlaces, start
from rollout.drain import FORCED, REPORT_S, Drain
from rollout.engine import reward_server, teacher_server
from rollout.engine.arguments import on_cpu
from rollout.engine.early_process import EarlyProcess
from rollout.episodes.episode import Failure
from rollout.episodes.first_shown import FirstShown
from rollout.episodes.setup import RolloutSetup, check_server
from rollout.errors import EngineDead, first_error
from rollout.evaluation.evaluator import Evaluator
from rollout.evaluation.players import ProblemSet, load_sets
from rollout.loop import PolicyUpdates, follow, roll, until_last

if TYPE_CHECKING:
    from rollout.engine.vllm_engine import Engine

log = logging.getLogger("rollout")
PROG = "python -m rollout"
COMMANDS = {each.PROG.split()[-1]: (each.PROG, each.main) for each in (evaluate, reward_server, teacher_server)}
"""By word: the command's name in messages, and what runs it."""
ALIVE_EVERY_S = 5.0
SIGNALS_S = 0.1
T = TypeVar("T")
REVOKED = Failure("the buffer took the lease back")


def main(argv: Sequence[str]) -> int:
    configure_logging()
    prog, command = COMMANDS.get(argv[0] if argv else "", (PROG, None))
    try:
        return command(argv[1:]) if command else run_server(argv)
    except (ValueError, KeysError) as error:
        print_visible(f"{prog}: {error}", sys.stderr)
        return code_of(error)
    except Exception as error:
        return explain_failure(error, prog)


def explain_failure(error: Exception, prog: str = PROG) -> int:
    """Report what ended `prog`; BAD_INPUT if a restart would end in the same way."""
    cause = first_error(error)
    if isinstance(cause, RefusedError):
        print_visible(f"{prog}: the buffer refuses this server: {cause}", sys.stderr)
        return BAD_INPUT
    if getattr(cause, "final", False):  # importing WeightsError imports torch
        print_visible(f"{prog}: {cause}", sys.stderr)
        return BAD_INPUT
    log.error("%s: %s", type(cause).__name__, cause, exc_info=None if isinstance(cause, EngineDead) else error)
    return FAILED


def run_server(argv: Sequence[str]) -> int:
    flags, rest = split_flags(argv, PROG, name={"default": "rollout-0", "type": process_name})
    config = read(rest, f"{PROG} [--name rollout-0]", check_server)
    os.environ.update(around_proxy(os.environ, own_hosts(config)))
    refuse()
    with EarlyProcess.of(config) or nullcontext() as early:
        sets = load_sets(config) if config.eval.every else []
        setup = RolloutSetup.load(config, flags.name).with_teachers(config)
        return uvloop.run(serve(config, flags.name, setup, sets, StartPhases("imports"), early))


async def serve(
    config: Config,
    name: str,
    setup: RolloutSetup,
    sets: list[ProblemSet],
    phases: StartPhases,
    early: EarlyProcess | None,
) -> int:
    with without_collections():
        from rollout.engine.vllm_engine import Engine

    drain = Drain(config.rollout.drain_s)
    with StopSignals(drain.begin, drain.force) as signals:
        keys = client_keys_for(config.buffer.address, config.run.path, "rollout")
        connection = Connection(config.buffer.address, name, "rollout", fingerprint(config), keys=keys)
        try:
            async with setup:
                log.info("%s waits for the buffer at %s", name, config.buffer.address)
                async with connection:
                    phases.end("reward workers and buffer")
                    log.info("%s starts vLLM, which may take a minute or two", name)
                    engine = await unless_signalled(Engine.start(config, seed(config, name), early))
                    phases.end("vLLM")
                    try:
                        await work(config, setup, connection, engine, drain, sets, phases)
                    finally:
                        await engine.close()
        except asyncio.CancelledError:
            if not signals.count:
                raise
            return FORCED if signals.count > 1 else DONE
    return DONE


async def unless_signalled(starting: Awaitable[T]) -> T:
    """Await `starting`, which blocks the event loop. On failure, handle pending signals first: Ctrl-C ends vLLM's
    process too."""
    try:
        return await starting
    except RuntimeError:
        await asyncio.sleep(SIGNALS_S)
        raise


def seed(config: Config, name: str) -> int:
    return (config.run.seed * 1_000_003 + zlib.crc32(name.encode())) % 2**31


async def work(
    config: Config,
    setup: RolloutSetup,
    connection: Connection,
    engine: "Engine",
    drain: Drain,
    sets: list[ProblemSet],
    phases: StartPhases,
) -> None:
    from learner.weights.receiver.follow import Receiver

    buffer = RolloutClient(connection, lambda: engine.version)
    form = setup.prompts.form
    keys = load_client_keys(connection.keys.folder, "rollout", server="learner")
    receiver = Receiver(buffer.where, engine, connection.name, config.weights, form=form, keys=keys)
    updates = PolicyUpdates(receiver, config.run.versions, buffer.nudged.set)
    episodes = setup.episodes(config, engine, config.sampling.temperature, config.batch.samples)
    episodes.first, episodes.teachers = FirstShown(setup.prompts), setup.teachers
    revoke = partial(episodes.abandon, failure=REVOKED)
    drain.episodes = episodes

    places, rule = start(config, on_cpu(config), engine.sequences_by_kv)
    spare = SparePlaces(places, config.eval.share)
    evaluator = Evaluator(config, setup, engine, buffer, receiver, spare, sets)

    def stats() -> dict[str, float]:
        measured = engine.stats()
        rule.adapt(time.monotonic(), places, measured, buffer.learner_waits and engine.version > 0)
        numbers = {"places": places.limit, "places_taken": places.taken, "parked": places.parked, **rule.limits(places)}
        evaluating = {"evaluating": spare.taken} if spare.taken else {}
        taught = setup.teachers.stats() if setup.teachers else {}
        return {**measured, **episodes.stages.stats(), **numbers, **evaluating, **taught}

    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(follow(updates, engine, evaluator)),
            tasks.create_task(evaluator.take_over()),
            tasks.create_task(heartbeats(buffer, config.rollout.heartbeat_s, stats, revoke)),
            tasks.create_task(check_alive(engine, config.weights.timeout_s)),
            tasks.create_task(engine.died()),
            first := tasks.create_task(updates.first.wait()),
        ]
        await drain.wait(first)
        if first.done():
            phases.end("first policy")
            log.info("%s has started in %s", connection.name, phases)
        await roll(partial(drain.ask, buffer), buffer, episodes, places)
        if buffer.finished:
            log.info("%s", buffer.finished.why)
        if buffer.finished and (buffer.finished.outcome == "versions" or (sets and buffer.finished.last)):
            updates.expect(buffer.finished.last or config.run.versions)
            last = tasks.create_task(until_last(updates, evaluator, config.learner.timeout_s))
            await drain.wait(last)
            last.cancel()
        for other in others:
            other.cancel()
    with suppress(TimeoutError):  # then its leases expire
        async with asyncio.timeout(REPORT_S):
            await buffer.leave()


async def check_alive(engine: "Engine", timeout_s: float) -> None:
    """Raise EngineDead once vLLM is silent for `timeout_s`."""
    while True:
        await engine.alive(timeout_s)
        await asyncio.sleep(ALIVE_EVERY_S)


if __name__ == "__main__":
    tie_children()
    run_and_exit(main, log)
