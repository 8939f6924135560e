"""The supervisor of a run, from the first keeper to the last: decides what an event of a process means for the run.

Consumes the keepers' events and the launcher's signals, in one queue, and waits for nothing else. The first event that
ends the run (the learner is done, a process refuses its input or cannot be kept, a signal) gives its verdict; then
learner, servers, reward and teacher servers and buffer are drained in this order. A signal during the drain kills them.
While the run goes on, `fleet.py` has servers added and drained. Built by `launch.py`.
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
"""Most time for each drain of a run that failed: nobody waits for a checkpoint that may never come."""
LAST_EVENTS_S = 5.0
"""Time for the last events of processes that have ended."""
LOST_S = 15.0
"""A keeper that does not answer for so long after the end of a drain is lost, with its machine."""
DRAIN_ORDER = ("learner", *SERVERS, "buffer")
"""The learner's last version may still need servers and buffer."""


@dataclass(frozen=True)
class Verdict:
    """The launcher's exit code, and why the run ends, in words."""

    code: int
    why: str
    last: str = ""
    """What is said once everything has ended."""
    healthy: bool = False
    """The run failed, but not its processes: they have their whole time to end."""


class Supervisor:
    """`place` makes a keeper; `show_event` and `say` are the display's."""

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
        """State of each rollout server, by name."""
        self._added: set[str] = set()
        """Names of servers that were added while the run went on."""
        self._drains: dict[str, asyncio.Task[None]] = {}
        """Tasks that drain servers, or have drained them, while the run goes on."""
        self._ended: set[str] = set()
        """Names of processes that will not be started again."""
        self._news: asyncio.Queue[tuple[Process, Event] | int | BaseException] = asyncio.Queue()
        """Final events, numbers of signals, and why a task of ours failed."""
        self.placed = asyncio.Event()
        """Those that the run begins with are, or will not be."""
        self.left: list[str] = []
        """Servers that were drained while the run went on, and are gone."""
        self.ending = False
        """The verdict is there: nothing is added any more."""

    async def run(self) -> int:
        """Place, watch, judge, drain. Returns the exit code; no process is left then."""
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
        """The rollout servers, the oldest first, those that have left apart."""
        return dict(self._lives)

    def add(self, process: Process) -> None:
        """Keep one more rollout server from now on, unless the run ends."""
        if not self.ending:
            self.processes.append(process)
            self._added.add(process.name)
            self._lives[process.name] = "placing"
            self._watch(process, self._place_and_follow(process))

    async def drain_server(self, name: str, within_s: float) -> None:
        """Have a rollout server finish its groups or give them back, `within_s` seconds at most; it does not come back.

        Returns once it is gone, also where its machine is. A server that is drained already goes on with that.
        """
        if name in self._lives and name not in self._drains:
            self._lives[name] = "draining"
            self._drains[name] = asyncio.create_task(self._leave(name, within_s))
            self._drains[name].add_done_callback(self.notice_failure)
        if name in self._drains:
            await asyncio.shield(self._drains[name])

    def notice_failure(self, task: asyncio.Task[None]) -> None:
        """A task of the launcher has ended: if it failed, so does the run."""
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
        """Show a process's events until the final one."""
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
        """The verdict if `news` ends the run."""
        if isinstance(news, BaseException):
            where = "".join(f" at {at.filename}:{at.lineno}" for at in extract_tb(news.__traceback__)[-1:])
            return Verdict(FAILED, f"the launcher failed{where}: {in_a_line(news)}; draining", healthy=True)
        if isinstance(news, int):
            what = "the learner finishes its version and writes a checkpoint"
            return Verdict(128 + news, f"{signal.Signals(news).name}: draining; {what} (Ctrl-C again to force quit)")
        process, event = news
        if process.name in self._drains:  # it was to end, however it did
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
            keeper.release()  # else it holds its GPUs, and on a cluster Ray makes another one, which starts it again
        return None

    def _others(self, process: Process) -> list[Process]:
        """Processes that go on and do the same."""
        return [other for other in self._alive(process.role) if other.pool == process.pool]

    def _alive(self, role: str) -> list[Process]:
        """Processes that go on, those that are drained apart."""
        gone = self._ended | self._drains.keys()
        return [process for process in self.processes if process.role == role and process.name not in gone]

    async def _end(self, verdict: Verdict) -> None:
        """Drain all processes; at a signal, kill them."""
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
