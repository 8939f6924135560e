"""The learner of several nodes as one process. A generation is the ranks of all nodes, started together.

A member on each node runs `python -m learner` for its share of the ranks. The first that ends, or is lost with its
node, ends the generation, because a rank that started again alone would meet nobody. The next one starts once every
member answers again, after the pauses and with the give-up rule of a keeper.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from actors.process import FINAL, Event, EventKind, Process
from actors.supervise.cluster.node_keeper import Whereabouts
from actors.supervise.keeper import Ends
from buffer.wire.awake import wait_awake
from configs.entrypoint import DONE, ENDINGS, unless

TOGETHER_S = 120.0
"""Other nodes get this time to end once the learner is done on one."""
LEAVE_MARGIN_S = 3.0
"""Part of a notice for calls between nodes."""
LOST = 137
"""Exit code of a member that is lost with its node."""


class LostMember(Exception):
    """A member or its node is gone; Ray makes another where there is room."""


class KeptNode(Protocol):
    """A `GangMember` on its node. All but `place` raise LostMember."""

    async def place(self) -> tuple[Whereabouts, str]:
        """As `GangMember.place`, once there is a node."""
        ...

    async def host(self) -> int: ...

    async def start(self, env: dict[str, str], flags: Sequence[str]) -> None: ...

    async def events(self, after: int) -> tuple[list[Event], list[str], bool]: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def kill(self) -> None: ...

    def release(self) -> None: ...


class GenerationEnd(NamedTuple):
    """How a member's process ended in a generation."""

    code: int
    why: str
    """Empty unless a node is lost."""
    lines: Sequence[str] = ()
    progressed: bool = False
    where: str = ""


class Gang:
    """Keeps `process` on its members' nodes. `gone(node, limit_s)` waits until a leaving node has left;
    `flags(address)` are further flags, by the first node's address. Needs a running event loop."""

    def __init__(
        self,
        process: Process,
        members: Sequence[KeptNode],
        gone: Callable[[str, float], Coroutine[Any, Any, None]],
        flags: Callable[[str], Sequence[str]] = lambda address: (),
    ) -> None:
        self.process, self._members, self._gone, self._flags = process, members, gone, flags
        self.places: list[Whereabouts] = []
        self._events: list[Event] = []
        self._number = 0  # of the last event
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._leaving: dict[str, float] = {}
        """Nodes that leave, and when each is gone."""
        self._limit_s = 0.0
        self._ends = Ends(process)
        self._keeping = asyncio.create_task(self._keep())
        self._keeping.add_done_callback(lambda task: asyncio.ensure_future(self._notify()))

    @property
    def nodes(self) -> list[str]:
        return [place.node for place in self.places]

    async def events(self, after: int) -> list[Event]:
        """Raises what failed in the gang itself."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._number > after or self._keeping.done())
            if self._keeping.done():
                self._keeping.result()
            found = [event for event in self._events if event.number > after]
            self._events = found  # the supervisor has seen the others
        return found

    async def drain(self, timeout_s: float) -> None:
        self._stopping.set()
        self._limit_s = timeout_s
        await self._each(lambda member: member.drain(timeout_s))
        await wait_awake({self._keeping}, timeout_s)
        await self.kill()

    def release(self) -> None:
        for member in self._members:
            member.release()

    async def kill(self) -> None:
        self._stopping.set()
        self._limit_s = 0.0
        await self._each(lambda member: member.kill())
        await asyncio.wait({self._keeping})

    async def leave(self, node: str, within_s: float) -> None:
        """Drain this generation; begin the next one when `node` has left."""
        now = time.monotonic()
        self._leaving[node] = now + within_s
        self._limit_s = max(0.0, min(self._leaving.values()) - now - LEAVE_MARGIN_S)
        await self._each(lambda member: member.drain(self._limit_s))

    async def _keep(self) -> None:
        while True:
            gathered = await unless(self._stopping, self._gather())
            if not gathered:
                return await self._report("ended", "it was waiting for its nodes", DONE)
            if unfit := "\n".join(filter(None, (why for _, why in gathered))):
                return await self._report("refused" if not self._ends.worked else "gave_up", unfit)
            if self._leaving:
                await self._move("a node leaves")
                continue
            started = time.monotonic()
            end = await self._generation()
            code = end.code
            if self._stopping.is_set():
                return await self._report("ended", f"exit code {code}", code)
            if self._leaving and code in (DONE, LOST):
                await self._move("its version is saved because a node leaves")
                continue
            if end.why:
                await self._report("failed", f"{end.why}; all ranks begin again together", code)
                continue
            kind, text, delay_s = self._ends.judge(code, time.monotonic() - started, end.lines, end.progressed)
            if end.where and kind in ("failed", "gave_up"):
                text = f"{end.where} ended first and the others with it: {text}"
            await self._report(kind, text, code)
            if kind in FINAL:
                return
            await unless(self._stopping, asyncio.sleep(delay_s))

    async def _gather(self) -> list[tuple[Whereabouts, str]]:
        found = await asyncio.gather(*(member.place() for member in self._members))
        self.places = [place for place, _ in found]
        return found

    async def _generation(self) -> GenerationEnd:
        followers: list[asyncio.Task[GenerationEnd]] = []
        try:
            await self._start()
            followers = [asyncio.create_task(self._follow(number)) for number in range(len(self._members))]
            done, rest = await asyncio.wait(followers, return_when="FIRST_COMPLETED")
            first = min(followers.index(task) for task in done)
            end = followers[first].result()
            if rest and (end.code in ENDINGS.values() or self._stopping.is_set() or self._leaving):
                await asyncio.wait(rest, timeout=max(TOGETHER_S, self._limit_s))
        except LostMember as error:
            end = GenerationEnd(LOST, str(error))
        await self._each(lambda member: member.kill())
        if followers:
            await asyncio.wait(followers)
            if end.code in ENDINGS.values():  # rank 0, on the first node, says why the run ended
                end = followers[0].result() if followers[0].result().code == end.code else end
        return end

    async def _start(self) -> None:
        """Raises LostMember."""
        first = self.places[0]
        shared = {"MASTER_ADDR": first.address, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        shared["MASTER_PORT"] = str(await self._members[0].host())
        several = len(self._members) > 1
        flags = self._flags(first.address)
        for number, member in enumerate(self._members):
            env = {**shared, "NODE_RANK": str(number)} if several else {}
            await member.start(env, flags)
        if self._stopping.is_set() or self._leaving:  # too early for these processes
            await self._each(lambda member: member.drain(self._limit_s))

    async def _follow(self, number: int) -> GenerationEnd:
        after, place = 0, self.places[number]
        where = f"node {number} ({place.address})"
        while True:
            try:
                events, lines, progressed = await self._members[number].events(after)
            except LostMember as error:
                return GenerationEnd(LOST, f"{where} is lost: {error}")
            for event in events:
                after = event.number
                if event.kind in FINAL:
                    ended = where if len(self._members) > 1 else ""
                    return GenerationEnd(event.code or DONE, "", lines, progressed, ended)
                plain = event.kind == "line" and not number  # rank 0 speaks for all
                await self._report(event.kind, event.text if plain else f"{where}: {event.text}")

    async def _move(self, why: str) -> None:
        await self._report("failed", f"{why}; it begins again once that node has left")
        while self._leaving and not self._stopping.is_set():
            node, until = next(iter(self._leaving.items()))
            await unless(self._stopping, self._gone(node, until - time.monotonic()))
            del self._leaving[node]

    async def _each(self, call: Callable[[KeptNode], Awaitable[None]]) -> None:
        """A lost member has nothing left to end."""
        found = await asyncio.gather(*map(call, self._members), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, LostMember):
                raise error

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _report(self, kind: EventKind, text: str, code: int | None = None) -> None:
        async with self._changed:
            self._number += 1
            self._events.append(Event(self._number, kind, text, code))
            self._changed.notify_all()
