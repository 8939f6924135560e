"""One machine, without Ray: keepers in the launcher's own process, and whole GPUs.

A keeper has only threads, so it cannot die alone; when the launcher dies, guards end its processes.
"""

import asyncio
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from actors.doctor.host import VISIBLE, gpu_names
from actors.doctor.run_file import misfits
from actors.process import Event, Process
from actors.supervise.keeper import Keeper
from configs.entrypoint import DONE
from configs.load import ConfigError
from configs.schema import Config

T = TypeVar("T")
EVENTS_S = 30.0
CALLS = 4
"""Blocking calls at a time: one for events, two drains, one kill."""
OPEN_FILES = 65536
"""Soft limit, where the hard limit allows it."""


class GpuPool:
    """Free GPUs. One event loop uses it; any thread may read `free`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._order = {name: number for number, name in enumerate(names)}
        self._free, self._waiting = list(names), list[PlainKeeper]()

    @property
    def free(self) -> int:
        return len(self._free)

    def ask(self, keeper: "PlainKeeper") -> None:
        self._waiting.append(keeper)
        self._hand_out()

    def withdraw(self, keeper: "PlainKeeper") -> bool:
        was_waiting = keeper in self._waiting
        if was_waiting:
            self._waiting.remove(keeper)
        return was_waiting

    def give_back(self, names: Sequence[str]) -> None:
        self._free = sorted([*self._free, *names], key=self._order.__getitem__)
        self._hand_out()

    def _hand_out(self) -> None:
        for keeper in list(self._waiting):
            number = keeper.process.gpus
            if number <= len(self._free):
                taken, self._free = self._free[:number], self._free[number:]
                self._waiting.remove(keeper)
                keeper.begin(taken)


class PlainKeeper:
    """Keeps `process`, once `pool` has GPUs for it. Needs a running event loop."""

    def __init__(self, process: Process, pool: GpuPool) -> None:
        self.process, self._pool, self._gpus = process, pool, list[str]()
        self.keeper: Keeper | None = None
        """None while it waits for GPUs."""
        self._begun = asyncio.Event()
        """Set once it waits no more, with or without GPUs."""
        self._last = Event(0, "ended", "it was waiting for GPUs", DONE)
        self._said_what_for = self._released = False
        self._calls = ThreadPoolExecutor(CALLS, f"calls-{process.name}")
        pool.ask(self)

    def begin(self, gpus: list[str]) -> None:
        process, self._gpus = self.process, gpus
        if gpus:
            process = replace(process, env={**process.env, VISIBLE: ",".join(gpus)})
        try:
            self.keeper = Keeper(process)
        except (OSError, RuntimeError) as error:  # no folder for its log, or no thread
            self._last = Event(0, "gave_up", f"the launcher cannot keep it: {error}")
        self._begun.set()

    async def events(self, after: int) -> list[Event]:
        if not self._begun.is_set() and not self._said_what_for:
            self._said_what_for = True
            number = self.process.gpus
            return [Event(after + 1, "line", f"waits for {number} free GPU{'s' * (number > 1)}")]
        await self._begun.wait()
        if self.keeper is None:
            return [replace(self._last, number=after + 1)]
        return await self._call(self.keeper.events, after, EVENTS_S)

    async def drain(self, timeout_s: float) -> None:
        if not self._withdrawn() and self.keeper is not None:
            await self._call(self.keeper.drain, timeout_s)

    async def kill(self) -> None:
        """Does nothing once released, because the process is gone."""
        if not self._released and not self._withdrawn() and self.keeper is not None:
            await self._call(self.keeper.kill)

    def release(self) -> None:
        self._released = True
        self._withdrawn()
        gpus, self._gpus = self._gpus, []
        self._pool.give_back(gpus)
        self._calls.shutdown(wait=False)

    def _withdrawn(self) -> bool:
        if was_waiting := self._pool.withdraw(self):
            self._begun.set()
        return was_waiting

    async def _call(self, call: Callable[..., T], *arguments: float) -> T:
        """A drain takes minutes, and no keeper may wait for another one's."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, call, *arguments)


class OneMachine:
    """This machine's GPUs, and a run's keepers on them."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self.gpus = [len(gpus)]
        self._pool = GpuPool(gpus)

    @classmethod
    def take(cls, config: Config) -> "OneMachine":
        """Raises ConfigError."""
        names = gpu_names()
        if found := list(misfits(config, len(names))):
            raise ConfigError(found)
        raise_open_files()
        return cls(names)

    def pack(self) -> None:
        """Do nothing: processes read the run's folder where it is."""

    async def place(self, process: Process) -> PlainKeeper:
        return PlainKeeper(process, self._pool)

    def room(self, gpus: int) -> int | None:
        return self._pool.free // gpus if gpus else None

    async def watch(self, say: Callable[[str], None]) -> None:
        """Do nothing: there are no other machines."""


def raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
