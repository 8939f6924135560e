"""The two loops of a rollout server: `roll` makes groups, `follow` takes each new policy. Run by `rollout/__main__.py`.

`roll` waits for the buffer (work is admitted as the learner advances) and for a free place among
`groups_in_flight`. `follow` waits for the learner to publish. Either one failing ends the process, with the cause.
"""

import asyncio

from buffer.wire.protocol import WorkItem
from rollout.interfaces import Engine, Episodes, Samples, Weights
from rollout.places import Places


async def roll(samples: Samples, episodes: Episodes, places: Places) -> None:
    """Ask for items, make each a group, put it; until the buffer has no more."""
    async with asyncio.TaskGroup() as tasks:
        while (items := await samples.ask(await places.free())) is not None:
            for item in items:
                places.take()
                tasks.create_task(make(item, samples, episodes)).add_done_callback(places.give)


async def make(item: WorkItem, samples: Samples, episodes: Episodes) -> None:
    """One item: a group that is put, or a failure that is reported. Never a reward of zero for a failure of ours."""
    outcome = await episodes.run(item)
    await outcome.deliver(samples, item)


async def follow(weights: Weights, engine: Engine) -> None:
    """Swap in each new policy as it is published; unfinished sequences go on under the new one."""
    async for policy in weights.policies():
        async with engine.paused():
            await policy.load()
            engine.version = policy.version
        await policy.loaded()
