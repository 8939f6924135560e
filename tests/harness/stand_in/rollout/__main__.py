"""`python -m rollout RUN.yaml --name NAME` as a stand-in: groups of random tokens and rewards, of the newest version.

It asks the buffer which versions were trained instead of receiving policies. Ends when the buffer has no more work.
"""

import asyncio
import random
import sys

import numpy as np

from buffer.curve import client_keys_for
from buffer.wire.client import Connection, RolloutClient, heartbeats
from buffer.wire.message import Array
from buffer.wire.protocol import State, Status
from buffer.wire.sample import Sample
from configs.entrypoint import configure_logging, split_flags
from configs.load import load
from configs.resume import fingerprint

GROUP_S = 0.05
"""Time that a group takes."""


def sample(version: int) -> Sample:
    """Two tokens of prompt and up to ten of answer."""
    answer = random.randint(1, 10)
    size = 2 + answer
    sampled = np.array([0, 0] + [1] * answer, np.uint8)
    return Sample(
        tokens=Array.of(np.random.randint(0, 64, size).astype(np.int32)),
        sampled=Array.of(sampled),
        behaviour_logprobs=Array.of(np.where(sampled, -1.0, 0.0).astype(np.float32)),
        versions=Array.of(np.where(sampled, version, -1).astype(np.int32)),
        reward=random.random(),
        finish="stop",
    )


async def main(argv: list[str]) -> None:
    """Work until the buffer has no more."""
    flags, rest = split_flags(argv, "python -m rollout", name={"default": "rollout-0"})
    config, version = load(rest), 0
    keys = client_keys_for(config.buffer.address, config.run.path, "rollout")
    async with Connection(config.buffer.address, flags.name, "rollout", fingerprint(config), keys=keys) as connection:
        buffer = RolloutClient(connection, lambda: version)

        async def follow() -> None:
            nonlocal version
            while True:
                version = max((await connection.expect(Status(), State)).trained + 1, 0)
                buffer.nudged.set()
                await asyncio.sleep(0.1)

        others = [
            asyncio.create_task(follow()),
            asyncio.create_task(heartbeats(buffer, 0.5, dict, lambda leases: None)),
        ]
        while work := await buffer.ask(4):
            for item in work:
                await asyncio.sleep(GROUP_S)
                await buffer.put(item, [sample(item.version) for _ in range(config.batch.samples)])
        for other in others:
            other.cancel()


if __name__ == "__main__":
    configure_logging()
    asyncio.run(main(sys.argv[1:]))
