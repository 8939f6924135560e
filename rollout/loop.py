"""The two loops of a rollout server. If either fails, the process ends with the cause."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from buffer.wire.awake import wait_awake
from buffer.wire.client import RolloutClient
from buffer.wire.protocol import WorkItem
from rollout.concurrency import GroupPlaces, Places
from rollout.episodes.episode import Episodes

if TYPE_CHECKING:
    from learner.weights.receiver.follow import Receiver
    from rollout.engine.vllm_engine import Engine
    from rollout.evaluation.evaluator import Evaluator

log = logging.getLogger(__name__)
Ask = Callable[[int], Awaitable[list[WorkItem] | None]]
"""Returns 1 to this many items, or None at the end."""


async def roll(ask: Ask, buffer: RolloutClient, episodes: Episodes, places: Places) -> None:
    async with asyncio.TaskGroup() as groups:
        while True:
            room = await places.room()
            with places.asking():
                items = await ask(room)
            if items is None:
                break
            for item in items:
                held = places.take()
                group = groups.create_task(make_group(item, buffer, episodes, held))
                group.add_done_callback(held.free_all)
        places.begin_lull()


async def make_group(item: WorkItem, buffer: RolloutClient, episodes: Episodes, held: GroupPlaces) -> None:
    outcome = await episodes.run(item, held.free_one)
    await outcome.deliver(buffer, item)


async def follow(weights: "PolicyUpdates", engine: "Engine", evaluator: "Evaluator") -> None:
    """Load each new policy; unfinished sequences go on under it. An evaluation keeps its policy until it ends."""
    async with aclosing(weights.receiver.policies()) as policies:
        async for policy in policies:
            async with evaluator.steady:
                await policy.load()
                engine.version = policy.version
                due = await evaluator.claim()
                await policy.loaded()
                weights.note(policy.version)
                if due is not None:
                    await evaluator.evaluate(due)


async def until_last(weights: "PolicyUpdates", evaluator: "Evaluator", timeout_s: float) -> None:
    """Wait until the last policy is in use and evaluated, or for `timeout_s` without progress.

    Time in which this process is stopped does not count.
    """
    waits = True
    while waits and not weights.last.is_set():
        last = asyncio.ensure_future(weights.last.wait())
        try:
            await wait_awake([last], timeout_s)
        finally:
            last.cancel()
        waits = evaluator.steady.locked()
        waits = await evaluator.idle() or waits
    await evaluator.idle()


class PolicyUpdates:
    """`first` is set once a policy is in use, `last` once version `versions` is. `beat` sends a heartbeat at once:
    the buffer may hold an Ask back until this server has a newer version."""

    def __init__(self, receiver: "Receiver", versions: int, beat: Callable[[], None]) -> None:
        self.receiver, self.versions, self._beat = receiver, versions, beat
        self.newest, self.first, self.last = -1, asyncio.Event(), asyncio.Event()

    def note(self, version: int) -> None:
        self.newest = version
        self.first.set()
        self._beat()
        log.info("generating with version %d", version)
        self.expect(self.versions)

    def expect(self, versions: int) -> None:
        self.versions = versions
        if self.newest >= versions:
            self.last.set()
