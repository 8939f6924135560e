"""Both ends of the buffer for `__main__.py`: rollout servers and a learner without models, at full speed.

The servers are clients of one process; the learner is a process of its own (`python -m benchmarks.buffer.clients
ADDRESS FINGERPRINT KEYS`), which prints a line `version groups` for each batch it got. It waits for the buffer until
killed.
"""

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.buffer.peers import IN_FLIGHT, packed
from buffer.keys import load_client_keys
from buffer.wire.client import Connection, RolloutClient, heartbeats
from buffer.wire.protocol import Ack, Part, Put, Stored, Take, Trained, WorkItem
from configs.inner_command import inner_words


@dataclass
class GroupTraffic:
    """`clients` rollout servers and a learner, at full speed or at `groups_s`, for `seconds`."""

    address: str
    fingerprint: str
    keys: Path
    """The folder of the run's keys."""
    clients: int
    seconds: float
    groups_s: float | None = None
    version: int = 0
    taken: int = 0
    puts: list[float] = field(default_factory=list)
    """Seconds from Put to Stored."""

    async def run(self) -> float:
        """Groups per second, Put to Take."""
        words = ["-m", "benchmarks.buffer.clients", self.address, self.fingerprint, str(self.keys)]
        keys = load_client_keys(self.keys, "rollout")
        learner = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        assert learner.stdout
        try:
            async with AsyncExitStack() as stack:
                connect = [
                    Connection(self.address, f"rollout-{i}", "rollout", self.fingerprint, keys=keys)
                    for i in range(self.clients)
                ]
                servers = await asyncio.gather(*(stack.enter_async_context(client) for client in connect))
                tasks = [asyncio.create_task(self.roll(client, i)) for i, client in enumerate(servers)]
                tasks.append(asyncio.create_task(self.listen(learner.stdout)))
                return await self._measured(tasks)
        finally:
            learner.kill()
            await learner.wait()

    async def _measured(self, tasks: list["asyncio.Task[None]"]) -> float:
        while not self.taken and not any(task.done() for task in tasks):  # the learner starts
            await asyncio.sleep(0.05)
        await asyncio.sleep(min(1.0, self.seconds / 4))
        began, before = time.monotonic(), self.taken
        self.puts.clear()
        await asyncio.wait(tasks, timeout=self.seconds, return_when="FIRST_COMPLETED")
        rate = (self.taken - before) / (time.monotonic() - began)
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return rate

    async def roll(self, client: Connection, number: int) -> None:
        samples = RolloutClient(client, lambda: self.version)
        beating = asyncio.create_task(heartbeats(samples, 0.5, dict, lambda revoked: None))
        due, seen = time.monotonic() + number / (self.groups_s or 1e9), -1
        in_flight, put = set[asyncio.Task[None]](), asyncio.Event()

        def on_put(task: asyncio.Task[None]) -> None:
            in_flight.remove(task)
            put.set()

        try:
            async with asyncio.TaskGroup() as tasks:  # as `rollout.loop.roll` does
                while items := await samples.ask(IN_FLIGHT - len(in_flight)):
                    if seen != self.version:
                        seen = self.version
                        samples.nudged.set()
                    for item in items:
                        if self.groups_s:
                            due = max(due + self.clients / self.groups_s, time.monotonic() - 1.0)
                            await asyncio.sleep(max(0.0, due - time.monotonic()))
                        task = tasks.create_task(self.put(samples, item))
                        in_flight.add(task)
                        task.add_done_callback(on_put)
                    while len(in_flight) >= IN_FLIGHT:
                        put.clear()
                        await put.wait()
        finally:
            beating.cancel()

    async def put(self, samples: RolloutClient, item: WorkItem) -> None:
        put = Put(item=item.item, lease=item.lease, samples=packed(item.version))
        began = time.perf_counter()
        await samples.client.expect(put, Stored)
        samples.holding.discard(item.lease)
        self.puts.append(time.perf_counter() - began)

    async def listen(self, lines: asyncio.StreamReader) -> None:
        """Read the lines that the learner prints."""
        while line := await lines.readline():
            self.version, self.taken = map(int, line.split())


async def learn(address: str, fingerprint: str, folder: str) -> None:
    """Take batch after batch without waiting for the answer to Trained, as `LearnerClient` does."""
    trained, version, taken = None, 0, 0
    keys = load_client_keys(Path(folder), "learner")
    async with Connection(address, "learner-0", "learner", fingerprint, keys=keys) as client:
        while True:
            part = await client.expect(Take(version=version, rank=0, world=1), Part)
            version, taken = version + 1, taken + len(set(part.rows.item.numpy().tolist()))
            if trained:
                await trained
            trained = asyncio.create_task(client.expect(Trained(version=version - 1, oldest_kept=version - 1), Ack))
            print(version, taken, flush=True)


if __name__ == "__main__":
    inner_words("ADDRESS", "FINGERPRINT", "KEYS")
    uvloop.run(learn(*sys.argv[1:]))
