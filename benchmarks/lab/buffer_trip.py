"""Functions and files that a reader meets on the buffer's trip, counted by a profiler.

`python -m benchmarks.lab.buffer_trip [--list]` runs the real buffer (socket, ledger, SQLite file) and its real clients
in this process, and lets one group through: Ask to Work, Put to Stored, Take to Part, Trained to its Ack. It prints
for each leg how many of our functions ran and in how many files; `--list` prints their names.

A function counts if a reader who follows the group must visit it. So a comprehension or a lambda counts as a part of
the function or class that it stands in, and methods that a dataclass or a NamedTuple generates do not count. Another
group makes the trip first, uncounted: what runs once per process, as opening the first segment, is no part of a trip.
The task that looks at strangers' connections runs by the clock, whatever is under way, and does not count either. What
an idle turn of the event loop runs counts where a leg runs it too; it is also printed apart, because it belongs to no
request. Waits for nothing but the answers.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from buffer.curve import LOCAL, buffer_keys
from buffer.keys import load_client_keys, make_keys
from buffer.ledger.rules import Ledger
from buffer.store.sqlite import Store
from buffer.wire.client import Connection, LearnerClient, RolloutClient
from buffer.wire.handlers import Handlers
from buffer.wire.limits import Limits
from buffer.wire.message import Array
from buffer.wire.requests import PendingRequests
from buffer.wire.sample import Sample
from buffer.wire.server import BufferServer, ListeningClock

ROOT = Path(__file__).parents[2]
CORE = ("buffer", "configs")
"""Folders whose functions count."""
PROBLEMS = [{"problem": f"problem {row}", "answer": str(row)} for row in range(1000)]
FINGERPRINT = "f" * 16
SETTLE_S = 0.2
"""Pause before each leg, so that it does not count what the one before has left to do."""
IDLE, IDLE_S = "an idle turn", 1.2
"""Time in which the event loop turns at least once."""
BY_THE_CLOCK = "BufferServer._watch_strangers"
"""The task whose functions do not count."""

Counted = Callable[[str], AbstractContextManager[None]]
"""What runs in the block belongs to this leg."""


class Profiler:
    """Notes which of our functions run, in all threads that begin after it was made."""

    def __init__(self) -> None:
        self.seen: dict[str, set[CodeType]] = defaultdict(set)
        """Code by leg."""
        self._leg = ""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._leg and not runs_by_the_clock():
            self.seen[self._leg].add(frame.f_code)

    @contextmanager
    def counted(self, leg: str) -> Iterator[None]:
        """What runs in the block belongs to this leg."""
        self._leg = leg
        try:
            yield
        finally:
            self._leg = ""

    def close(self) -> None:
        """Note nothing any more."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def functions(self, leg: str) -> set[tuple[str, str]]:
        """(file, function) of this leg."""
        return {named for code in self.seen[leg] if (named := named_function(code))}


def runs_by_the_clock() -> bool:
    """Whether the calling thread runs the task BY_THE_CLOCK now."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and getattr(task.get_coro(), "__qualname__", "") == BY_THE_CLOCK


def named_function(code: CodeType) -> tuple[str, str] | None:
    """(file, function) of our own code, without the parts that Python names itself; None for code of others.

    Example: `Store.load.<locals>.<listcomp>` counts as `Store.load`; `Sample.<lambda>`, a field's default, not at all.
    """
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in CORE:
        return None
    function = code.co_qualname.partition(".<locals>.<")[0]
    return None if "<" in function.replace("<locals>", "") else (str(path.relative_to(ROOT)), function)


def made_group(version: int, prompt: int) -> list[Sample]:
    """Two samples, one of them solved: a prompt of so many tokens, and an answer of two."""
    return [
        Sample(
            tokens=Array.of(np.array([5] * prompt + [12, 2], np.int32)),
            sampled=Array.of(np.array([0] * prompt + [1, 1], np.uint8)),
            behaviour_logprobs=Array.of(np.array([0] * prompt + [-0.7, -0.1], np.float32)),
            versions=Array.of(np.array([-1] * prompt + [version, version], np.int32)),
            reward=float(number),
            finish="stop",
        )
        for number in range(2)
    ]


async def trip(profiler: Profiler, folder: Path) -> None:
    """Take two batches of one group through the buffer; the second one counts."""
    requests, clock = made_buffer(folder / "buffer.sqlite")
    keys = make_keys(folder / "keys")
    async with BufferServer(LOCAL, 2**24, buffer_keys(LOCAL, folder), clock) as server:
        serving = asyncio.create_task(server.serve(requests))
        rollout = Connection(LOCAL, "rollout-0", "rollout", FINGERPRINT, keys=load_client_keys(keys, "rollout"))
        async with rollout as connection:
            samples = RolloutClient(connection, lambda: 0)
            learner = await asyncio.to_thread(
                LearnerClient, LOCAL, "learner-0", FINGERPRINT, 0, 1, keys=load_client_keys(keys, "learner")
            )
            await asyncio.to_thread(learner.rewind, 0)
            await legs(lambda leg: nullcontext(), samples, learner, 0)
            with profiler.counted(IDLE):
                await asyncio.sleep(IDLE_S)
            await legs(profiler.counted, samples, learner, 1)
            await asyncio.to_thread(learner.close)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        requests.handlers.store.close()


async def legs(counted: Counted, samples: RolloutClient, learner: LearnerClient, version: int) -> None:
    """Take batch `version` through the four legs. Its samples are longer than those of the batch before."""
    with counted("Ask to Work"):
        (item,) = await samples.ask(1) or []
    await asyncio.sleep(SETTLE_S)
    with counted("Put to Stored"):
        assert (await samples.put(item, made_group(0, prompt=2 + version))).accepted
    await asyncio.sleep(SETTLE_S)
    with counted("Take to Part"):
        assert await asyncio.to_thread(learner.take, version)
    await asyncio.sleep(SETTLE_S)
    with counted("Trained"):
        await asyncio.to_thread(learner.trained, version, 0)
        await asyncio.to_thread(answered, learner)
    await asyncio.sleep(SETTLE_S)


def answered(learner: LearnerClient) -> None:
    """Wait for the answer to Trained."""
    assert learner._trained
    learner._trained.result(60)


def made_buffer(path: Path) -> tuple[PendingRequests, ListeningClock]:
    """The pending requests of a new ledger, and its clock."""
    store, clock = Store(path, problems=PROBLEMS), ListeningClock()
    ledger = Ledger(len(PROBLEMS), 1, 2, recall=store.closed)
    ledger.restore(store.load(), clock.now())
    ledger.upcoming(1)
    limits = Limits("trip", FINGERPRINT, samples=2, max_bytes=2**30, max_message=2**24, keep="checkpoints")
    return PendingRequests(Handlers(ledger, store, PROBLEMS, limits), limits.max_message), clock


def table(profiler: Profiler, is_listed: bool) -> None:
    """Print the counts, and the names where they are asked for."""
    idle = profiler.functions(IDLE)
    legs = {leg: profiler.functions(leg) for leg in profiler.seen if leg != IDLE}
    everything = set[tuple[str, str]]().union(*legs.values())
    print(f"{'leg':<16}{'functions':>10}{'files':>7}{'without those of an idle turn':>32}{'files':>7}")
    for leg, found in [*legs.items(), ("all together", everything), (IDLE, idle)]:
        own = found - idle
        print(f"{leg:<16}{len(found):>10}{num_files(found):>7}{len(own):>32}{num_files(own):>7}")
    for file in sorted({file for file, _ in everything}) if is_listed else ():
        names = sorted(name for where, name in everything if where == file)
        print(f"\n{file} ({len(names)})")
        for name in names:
            ran = [leg.split()[0] for leg, found in legs.items() if (file, name) in found]
            print(f"    {name:<48}{' '.join(ran)}{' idle' * ((file, name) in idle)}")


def num_files(functions: set[tuple[str, str]]) -> int:
    return len({file for file, _ in functions})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the names of the functions too")
    wanted = parser.parse_args()
    profiler = Profiler()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(trip(profiler, Path(folder)), 60))
    profiler.close()
    table(profiler, wanted.list)


if __name__ == "__main__":
    main()
