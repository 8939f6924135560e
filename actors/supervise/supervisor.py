"""The supervisor of a run: decides what an event of a process means for the run.

It waits for one queue of events and signals. The first that ends the run gives the verdict; then learner, servers and
buffer are drained in this order. A signal during the drain kills them.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import extract_tb

from actors.process import FINAL, SERVERS, Event, Process
from actors.supervise.nodes import in_a_line
from actors.supervise.placement import Placed
from buffer.wire.protocol import ServerLife
from configs.entrypoint import BAD_INPUT, DATA_ENDED, DONE, FAILED, GIVEN_UP, StopSignals

FAILED_DRAIN_S = 30.0
"""Limit of a drain: a failed run's checkpoint may never come."""
LAST_EVENTS_S = 15.0
LOST_S = 15.0
"""A keeper silent for so long after a drain is lost with its machine."""
DRAIN_ORDER = ("learner", *SERVERS, "buffer")
"""The learner's last version may still need servers and buffer."""


@dataclass(frozen=True)
class Verdict:
    """How the run ends."""

    code: int
    why: str
    last: str = ""
    healthy: bool = False
    """The processes get their whole time to end."""


class Supervisor:
    """Keeps a run's processes; `place` makes a keeper for each."""

    def __init__(
        self,
        processes: Sequence[Process],
        place: Callable[[Process], Awaitable[Placed]],
        show_event: Callable[[Process, Event], None],
        say: Callable[[str], None],
    ) -> None:
        self.processes = list(processes)
        self._place, self._show_event, self._say = place, show_event, say
        self._keepers: dict[str, Placed] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._lives: dict[str, ServerLife] = {p.name: "placing" for p in processes if p.role == "rollout"}
        self._added: set[str] = set()
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._ended: set[str] = set()
        self._news: asyncio.Queue[tuple[Process, Event] | int | BaseException] = asyncio.Queue()
        """Final events, numbers of signals, errors of tasks."""
        self.placed = asyncio.Event()
        """The first processes are placed, or will not be."""
        self.left: list[str] = []
        self.ending = False

    async def run(self) -> int:
        """Returns the exit code; no process is left then."""
        with StopSignals(drain=self._news.put_nowait, force=self._news.put_nowait):
            placing = asyncio.create_task(self._place_first(tuple(self.processes)))  # servers may be added meanwhile
            placing.add_done_callback(self.notice_failure)
            while (verdict := self._judge(await self._news.get())) is None:
                pass
            self.ending = True
            self._say(verdict.why)
            placing.cancel()
            await asyncio.wait({placing})
            self.placed.set()
            await self._end(verdict)
            if self._followers:
                await asyncio.wait(self._followers.values(), timeout=LAST_EVENTS_S)
        if verdict.last:
            self._say(verdict.last)
        return verdict.code

    def servers(self) -> dict[str, ServerLife]:
        """The oldest first, without those that have left."""
        return dict(self._lives)

    def add(self, process: Process) -> None:
        if not self.ending:
            self.processes.append(process)
            self._added.add(process.name)
            self._lives[process.name] = "placing"
            self._watch(process, self._place_and_follow(process))

    async def drain_server(self, name: str, within_s: float) -> None:
        """Returns once the server or its machine is gone. A second call waits for the first drain."""
        if name in self._lives and name not in self._drains:
            self._lives[name] = "draining"
            self._drains[name] = asyncio.create_task(self._leave(name, within_s))
            self._drains[name].add_done_callback(self.notice_failure)
        if name in self._drains:
            await asyncio.shield(self._drains[name])

    def notice_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._news.put_nowait(error)

    async def _leave(self, name: str, within_s: float) -> None:
        await self.placed.wait()
        follower, keeper = self._followers.get(name), self._keepers.get(name)
        if follower and keeper:
            self._say(f"draining {name}")
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s + LOST_S):
                    await keeper.drain(within_s)
            await asyncio.wait({follower}, timeout=LAST_EVENTS_S)
        self._forget(name)
        if keeper := self._keepers.pop(name, None):
            keeper.release()
        del self._lives[name]
        self.left.append(name)

    def _watch(self, process: Process, following: Coroutine[None, None, None]) -> None:
        follower = self._followers[process.name] = asyncio.create_task(following)
        follower.add_done_callback(self.notice_failure)

    def _forget(self, name: str) -> None:
        self._ended.add(name)
        if name in self._followers:
            self._followers[name].cancel()

    async def _place_first(self, processes: Sequence[Process]) -> None:
        for process in processes:
            self._keepers[process.name] = await self._place(process)
            self._watch(process, self._follow(process))
        self.placed.set()

    async def _place_and_follow(self, process: Process) -> None:
        self._keepers[process.name] = await self._place(process)
        await self._follow(process)

    async def _follow(self, process: Process) -> None:
        after, keeper = 0, self._keepers[process.name]
        while process.name not in self._ended:
            for event in await keeper.events(after):
                after = event.number
                self._show_event(process, event)
                if event.kind != "line" and self._lives.get(process.name, "draining") != "draining":
                    self._lives[process.name] = event.kind
                if event.kind in FINAL:
                    self._ended.add(process.name)
                    self._news.put_nowait((process, event))

    def _judge(self, news: tuple[Process, Event] | int | BaseException) -> Verdict | None:
        if isinstance(news, BaseException):
            where = "".join(f" at {at.filename}:{at.lineno}" for at in extract_tb(news.__traceback__)[-1:])
            return Verdict(FAILED, f"the launcher failed{where}: {in_a_line(news)}; draining", healthy=True)
        if isinstance(news, int):
            what = "the learner finishes its version and writes a checkpoint"
            return Verdict(128 + news, f"{signal.Signals(news).name}: draining; {what} (Ctrl-C again to force quit)")
        process, event = news
        if process.name in self._drains:  # it was to end
            return None
        if event.kind == "refused" and process.name not in self._added:
            return Verdict(BAD_INPUT, f"{process.name} refused its input:\n{event.text}")
        if event.kind in ("gave_up", "refused"):
            why = f"{process.name} could not be kept: {event.text}"
            if process.role not in SERVERS or not self._others(process):
                return Verdict(FAILED, why)
            self._say(f"{why}\nthe run goes on with the other servers")
        if process.role == "learner" and event.kind == "ended":
            if event.code in (DATA_ENDED, GIVEN_UP):
                why = "the learner ended the run; draining servers and buffer"
                return Verdict(FAILED if event.code == GIVEN_UP else DATA_ENDED, why, event.text)
            return Verdict(DONE, "the learner is done; draining servers and buffer")
        if process.role in SERVERS and (keeper := self._keepers.pop(process.name, None)):
            keeper.release()  # else it holds its GPUs, and Ray makes another keeper, which starts it again
        return None

    def _others(self, process: Process) -> list[Process]:
        return [other for other in self._alive(process.role) if other.pool == process.pool]

    def _alive(self, role: str) -> list[Process]:
        gone = self._ended | self._drains.keys()
        return [process for process in self.processes if process.role == role and process.name not in gone]

    async def _end(self, verdict: Verdict) -> None:
        draining = asyncio.create_task(self._drain(verdict.code in (FAILED, BAD_INPUT) and not verdict.healthy))
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
        for name in {process.name for process in self.processes} - self._keepers.keys() - self._ended:
            self._forget(name)
        for role in DRAIN_ORDER:
            if alive := self._alive(role):
                self._say(f"draining {', '.join(process.name for process in alive)}")
            timeouts = {p.name: min(p.drain_s, FAILED_DRAIN_S) if failed else p.drain_s for p in alive}
            drains = [self._keepers[name].drain(timeout_s) for name, timeout_s in timeouts.items()]
            await asyncio.gather(*drains, *(self._drains.values() if role == "rollout" else ()))
