"""The two loops of a rollout server: `roll` makes groups, `follow` loads each new policy. Run by `rollout/__main__.py`.

`roll` waits for the buffer, which hands out work as the learner advances, and while `groups_in_flight` groups are being
made. `follow` waits for the learner to publish. If either fails, the process ends with the cause.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from buffer.wire.client import RolloutClient
from buffer.wire.protocol import WorkItem
from rollout.episodes.episode import Episodes

if TYPE_CHECKING:
    from learner.weights.receiver.follow import Receiver
    from learner.weights.receiver.staged import StagedPolicy
    from learner.weights.receiver.streamed import StreamedPolicy
    from rollout.engine.vllm_engine import Engine

log = logging.getLogger(__name__)
Ask = Callable[[int], Awaitable[list[WorkItem] | None]]
"""Gives at most this many items to make groups of, at least one; None: there will be no more."""


async def roll(ask: Ask, buffer: RolloutClient, episodes: Episodes, groups_in_flight: int) -> None:
    """Ask for as many items as there is room for and make each a group, until there are no more."""
    in_flight: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as tasks:
        while (items := await ask(groups_in_flight - len(in_flight))) is not None:
            in_flight |= {tasks.create_task(make_group(item, buffer, episodes)) for item in items}
            if len(in_flight) >= groups_in_flight:
                await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
            in_flight = {task for task in in_flight if not task.done()}


async def make_group(item: WorkItem, buffer: RolloutClient, episodes: Episodes) -> None:
    """Deliver the item's group, or report its failure."""
    outcome = await episodes.run(item)
    await outcome.deliver(buffer, item)


async def follow(weights: "PolicyUpdates", engine: "Engine") -> None:
    """Load each new policy as it is published; unfinished sequences go on under it."""
    async for policy in weights.policies():
        await policy.load()
        engine.version = policy.version
        await policy.loaded()


class PolicyUpdates:
    """The learner's policies as they arrive. `first` is set once one is loaded, `last` once version `versions` is."""

    def __init__(self, receiver: "Receiver", versions: int) -> None:
        self.receiver, self.versions = receiver, versions
        self.first, self.last = asyncio.Event(), asyncio.Event()

    async def policies(self) -> AsyncGenerator["StagedPolicy | StreamedPolicy", None]:
        """Each new policy; the caller asks for the next one after it has loaded this one."""
        async with aclosing(self.receiver.policies()) as policies:
            async for policy in policies:
                yield policy
                self.first.set()
                log.info("generating with version %d", policy.version)
                if policy.version >= self.versions:
                    self.last.set()
