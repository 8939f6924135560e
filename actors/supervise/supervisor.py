"""The supervisor of a run, from the first keeper to the last: decides what an event of a process means for the run.

Consumes the keepers' events and the launcher's signals, in one queue, and waits for nothing else. The first event that
ends the run (the learner is done, a process refuses its input or cannot be kept, a signal) gives its verdict; then
learner, servers, reward servers and buffer are drained in this order. A signal during the drain kills them. Built by
`launch.py`.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from actors.process import FINAL, Event, Process
from actors.supervise.nodes import Placed
from configs.entrypoint import BAD_INPUT, DATA_ENDED, DONE, FAILED, GIVEN_UP, StopSignals

FAILED_DRAIN_S = 30.0
"""Most time for each drain of a run that failed: nobody waits for a checkpoint that may never come."""
LAST_EVENTS_S = 5.0
"""Time for the last events of processes that have ended."""
DRAIN_ORDER = ("learner", "rollout", "reward", "buffer")
"""The learner's last version may still need servers and buffer."""


@dataclass(frozen=True)
class Verdict:
    """The launcher's exit code, and why the run ends, in words."""

    code: int
    why: str
    last: str = ""
    """What is said once everything has ended."""


class Supervisor:
    """`place` makes a keeper; `show_event` and `say` are the display's."""

    def __init__(
        self,
        processes: Sequence[Process],
        place: Callable[[Process], Awaitable[Placed]],
        show_event: Callable[[Process, Event], None],
        say: Callable[[str], None],
    ) -> None:
        self.processes = processes
        self._place, self._show_event, self._say = place, show_event, say
        self._keepers: dict[str, Placed] = {}
        self._ended: set[str] = set()
        """Names of processes that will not be started again."""
        self._news: asyncio.Queue[tuple[Process, Event] | int] = asyncio.Queue()
        """Final events, and numbers of signals."""

    async def run(self) -> int:
        """Place, watch, judge, drain. Returns the exit code; no process is left then."""
        followers = []
        with StopSignals(drain=self._news.put_nowait, force=self._news.put_nowait):
            for process in self.processes:
                self._keepers[process.name] = await self._place(process)
                followers.append(asyncio.create_task(self._follow(process)))
            while (verdict := self._judge(await self._next(followers))) is None:
                pass
            self._say(verdict.why)
            await self._end(verdict)
            await asyncio.wait(followers, timeout=LAST_EVENTS_S)
        if verdict.last:
            self._say(verdict.last)
        return verdict.code

    async def _next(self, followers: Sequence[asyncio.Task[None]]) -> tuple[Process, Event] | int:
        """The next news. Raises what a follower raised."""
        news = asyncio.create_task(self._news.get())
        await asyncio.wait({news, *(task for task in followers if not task.done())}, return_when="FIRST_COMPLETED")
        for task in followers:
            if task.done():
                task.result()
        return await news

    async def _follow(self, process: Process) -> None:
        """Show a process's events until the final one."""
        after, keeper = 0, self._keepers[process.name]
        while process.name not in self._ended:
            for event in await keeper.events(after):
                after = event.number
                self._show_event(process, event)
                if event.kind in FINAL:
                    self._ended.add(process.name)
                    self._news.put_nowait((process, event))

    def _judge(self, news: tuple[Process, Event] | int) -> Verdict | None:
        """The verdict if `news` ends the run."""
        if isinstance(news, int):
            what = "the learner finishes its version and writes a checkpoint"
            return Verdict(128 + news, f"{signal.Signals(news).name}: draining; {what} (Ctrl-C again to force quit)")
        process, event = news
        if event.kind == "refused":
            return Verdict(BAD_INPUT, f"{process.name} refused its input:\n{event.text}")
        if event.kind == "gave_up":
            why = f"{process.name} could not be kept: {event.text}"
            if process.role not in ("rollout", "reward") or not self._alive(process.role):
                return Verdict(FAILED, why)
            self._say(f"{why}\nthe run goes on with the other servers")
        if process.role == "learner" and event.kind == "ended":
            if event.code in (DATA_ENDED, GIVEN_UP):
                why = "the learner ended the run; draining servers and buffer"
                return Verdict(FAILED if event.code == GIVEN_UP else DATA_ENDED, why, event.text)
            return Verdict(DONE, "the learner is done; draining servers and buffer")
        return None

    def _alive(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role and process.name not in self._ended]

    async def _end(self, verdict: Verdict) -> None:
        """Drain all processes; at a signal, kill them."""
        draining = asyncio.create_task(self._drain(failed=verdict.code in (FAILED, BAD_INPUT)))
        forced = asyncio.create_task(self._next_signal())
        await asyncio.wait({draining, forced}, return_when="FIRST_COMPLETED")
        forced.cancel()
        if draining.done():
            return draining.result()
        draining.cancel()
        self._say("killing all processes")
        await asyncio.gather(*(keeper.kill() for keeper in self._keepers.values()))

    async def _next_signal(self) -> None:
        while not isinstance(await self._news.get(), int):
            pass

    async def _drain(self, failed: bool) -> None:
        for role in DRAIN_ORDER:
            if alive := self._alive(role):
                self._say(f"draining {', '.join(process.name for process in alive)}")
            timeouts = {p.name: min(p.drain_s, FAILED_DRAIN_S) if failed else p.drain_s for p in alive}
            await asyncio.gather(*(self._keepers[name].drain(timeout_s) for name, timeout_s in timeouts.items()))
