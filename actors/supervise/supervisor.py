"""One run from its first keeper to its last: what the launcher decides when something happens to a process.

Consumes the keepers' events and the launcher's signals, in one queue, and waits for nothing else. The first thing that
ends the run (the learner is done, a process has bad input or cannot be kept, a signal) is its verdict; then learner,
servers and buffer are drained in this order. A signal during that kills all of them. Built by `actors/supervise/launch.py`.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from actors.supervise.keeper import BAD_INPUT, FINAL, Event, Process
from actors.supervise.ray_cluster import Kept

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAILED_DRAIN_S = 30.0
"""Bound of every drain of a run that failed: nobody waits for a checkpoint that may never come."""
ORDER = ("learner", "rollout", "buffer")
"""Drained first to last: the learner's last version may still need servers and buffer."""


@dataclass(frozen=True)
class Verdict:
    """Why the run ends, for people, and the launcher's exit code."""

    code: int
    why: str


class Supervisor:
    """`tell(process, event)` and `say(text)` are the display's; `place` makes a keeper."""

    def __init__(
        self,
        processes: Sequence[Process],
        place: Callable[[Process], Awaitable[Kept]],
        tell: Callable[[Process, Event], None],
        say: Callable[[str], None],
    ) -> None:
        self.processes = processes
        self._place, self._tell, self._say = place, tell, say
        self._kept: dict[str, Kept] = {}
        self._final: dict[str, Event] = {}
        self._news: asyncio.Queue[tuple[Process, Event] | int] = asyncio.Queue()

    async def go(self) -> int:
        """Place, watch, judge, drain. Returns the exit code; nothing is left then."""
        followers: list[asyncio.Task[None]] = []
        with self._signals(), _cancelled(followers):
            for process in self.processes:
                self._kept[process.name] = await self._place(process)
                followers.append(asyncio.create_task(self._follow(process)))
            while (verdict := self._judge(await self._next(followers))) is None:
                pass
            self._say(verdict.why)
            await self._end(verdict)
            await asyncio.wait(followers, timeout=5.0)  # for their last words
        return verdict.code

    async def _follow(self, process: Process) -> None:
        """Pass on a process's events until the last one."""
        after, kept = 0, self._kept[process.name]
        while True:
            for event in await kept.events(after):
                after = event.number
                self._tell(process, event)
                if event.kind in FINAL:
                    self._final[process.name] = event
                    self._news.put_nowait((process, event))
                    return

    async def _next(self, followers: list[asyncio.Task[None]]) -> tuple[Process, Event] | int:
        """The next thing that happened; raises what a follower raised."""
        news = asyncio.create_task(self._news.get())
        with _cancelled([news]):
            waiting = {news, *(task for task in followers if not task.done())}
            done, _ = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
            for task in done - {news}:
                task.result()
            return await news

    def _judge(self, news: tuple[Process, Event] | int) -> Verdict | None:
        """Does this end the run?"""
        if isinstance(news, int):
            what = "the learner finishes its version and writes a checkpoint"
            return Verdict(128 + news, f"{signal.Signals(news).name}: draining; {what} (Ctrl-C again to force quit)")
        process, event = news
        if event.kind == "refused":
            return Verdict(BAD_INPUT, f"{process.name} refused its input:\n{event.text}")
        if event.kind == "gave_up":
            words = f"{process.name} could not be kept: {event.text}"
            if process.role != "rollout" or not self._alive("rollout"):
                return Verdict(1, words)
            self._say(f"{words}\nthe run goes on with the other servers")
        if process.role == "learner" and event.kind == "ended":
            return Verdict(0, "the learner is done; draining servers and buffer")
        return None

    def _alive(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role and process.name not in self._final]

    async def _end(self, verdict: Verdict) -> None:
        """Drain what is left; at a signal, kill it."""
        failed = verdict.code in (1, BAD_INPUT)
        draining = asyncio.create_task(self._drain(failed))
        forced = asyncio.create_task(self._signal())
        with _cancelled([draining, forced]):
            done, _ = await asyncio.wait({draining, forced}, return_when="FIRST_COMPLETED")
            if draining in done:
                return draining.result()
            self._say("killing all processes")
            await asyncio.gather(*(self._kept[process.name].kill() for process in self.processes))

    async def _signal(self) -> None:
        while not isinstance(await self._news.get(), int):
            pass

    async def _drain(self, failed: bool) -> None:
        for role in ORDER:
            if alive := self._alive(role):
                self._say(f"draining {', '.join(process.name for process in alive)}")
            bounds = [min(process.drain_s, FAILED_DRAIN_S) if failed else process.drain_s for process in alive]
            calls = [self._kept[process.name].drain(bound) for process, bound in zip(alive, bounds, strict=True)]
            await asyncio.gather(*calls)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._news.put_nowait, int(number))
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


@contextmanager
def _cancelled(tasks: "Sequence[asyncio.Task[Any]]") -> Iterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
