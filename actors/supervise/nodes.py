"""News of a cluster's nodes: one is lost, has joined, or leaves because its machine is taken away.

`NodeWatch` looks at Ray's nodes each second, because Ray reports no change, and has processes on a leaving node drained
in time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from actors.process import Process
from actors.supervise.placement import Placed

T = TypeVar("T")
LOOK_EVERY_S = 1.0
PATIENCE_S = 60.0
REMIND_S = 60.0
"""Until the first reminder; doubles each time."""
STARTS_S = 10.0
"""A keeper that takes longer to start waits for a node."""
NOTICE_S = 30.0
"""Assumed notice where Ray knows no deadline."""
CALL_S = 2.0
"""Part of a notice for calls that pass it on."""


class ClusterNode(NamedTuple):
    """A node as Ray lists it."""

    address: str
    gpus: int
    alive: bool
    leaves_at: float | None
    """Unix time; 0: soon, None: it stays."""


@dataclass(frozen=True)
class NodeNews:
    """What became of a node."""

    kind: Literal["lost", "joined", "leaving"]
    node: str
    address: str
    gpus: int
    deadline_s: float = 0.0


class OnNodes(Placed, Protocol):
    """A keeper, or a gang, on nodes."""

    process: Process

    @property
    def nodes(self) -> Collection[str]:
        """Ids of its nodes, lost ones included."""
        ...

    async def leave(self, node: str, within_s: float) -> None:
        """Be gone from `node` in `within_s`, and go on elsewhere."""
        ...


def news(before: Mapping[str, ClusterNode], after: Mapping[str, ClusterNode], now: float) -> Iterator[NodeNews]:
    """`now` in Unix time."""
    for node, is_ in after.items():
        was = before.get(node)
        if is_.alive and (was is None or not was.alive):
            yield NodeNews("joined", node, is_.address, is_.gpus)
        if is_.alive and is_.leaves_at is not None and (was is None or was.leaves_at is None):
            left_s = max(0.0, is_.leaves_at - now) if is_.leaves_at else NOTICE_S
            yield NodeNews("leaving", node, is_.address, is_.gpus, left_s)
    for node, was in before.items():
        if was.alive and not (node in after and after[node].alive):
            yield NodeNews("lost", node, was.address, was.gpus)


class Patience:
    """While Ray fails, PATIENCE_S at most, its last answer holds."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._say, self._now = say, now
        self._failing_since: float | None = None

    async def ask(self, question: Callable[[], Awaitable[T]], last: T) -> T:
        try:
            answer = await question()
        except Exception as error:  # Ray has no class for what passes
            if self._failing_since is None:
                self._failing_since = self._now()
                self._say(f"Ray does not answer; the launcher asks again for {PATIENCE_S:.0f} s: {in_a_line(error)}")
            if self._now() >= self._failing_since + PATIENCE_S:
                raise
            return last
        self._failing_since = None
        return answer


class NodeWatch:
    def __init__(
        self,
        look: Callable[[], Awaitable[Mapping[str, ClusterNode]]],
        keepers: Callable[[], Collection[OnNodes]],
        say: Callable[[str], None],
        hear: Callable[[NodeNews], None] = lambda news: None,
    ) -> None:
        self._look, self._keepers, self._say, self._hear = look, keepers, say, hear
        self.known: Mapping[str, ClusterNode] = {}
        self._changed = asyncio.Condition()
        self._patience = Patience(say)
        self._leaving: set[asyncio.Task[None]] = set()
        self._waits: dict[str, tuple[float, float]] = {}  # by process: since when, next reminder

    async def watch(self) -> None:
        while True:
            before, self.known = self.known, await self._patience.ask(self._look, self.known)
            for each in news(before, self.known, time.time()) if before else ():
                self._tell(each)
                self._hear(each)
            self._remind(time.monotonic())
            async with self._changed:
                self._changed.notify_all()
            for task in [task for task in self._leaving if task.done()]:
                self._leaving.discard(task)
                if error := task.exception():
                    self._say(f"{task.get_name()} could not be drained and ends with its node: {in_a_line(error)}")
            await asyncio.sleep(LOOK_EVERY_S)

    async def gone(self, node: str, limit_s: float) -> None:
        """A node that is there NOTICE_S after `limit_s` was a false alarm."""
        try:
            async with asyncio.timeout(max(0.0, limit_s) + NOTICE_S), self._changed:
                await self._changed.wait_for(lambda: not self._is_alive(node))
        except TimeoutError:
            self._say(f"node {self.known[node].address} is still there after its notice; it is used again")

    def _is_alive(self, node: str) -> bool:
        return node in self.known and self.known[node].alive

    def _tell(self, news: NodeNews) -> None:
        there = [keeper for keeper in self._keepers() if news.node in keeper.nodes]
        there.sort(key=lambda keeper: keeper.process.name)
        names = ", ".join(keeper.process.name for keeper in there)
        name = f"node {news.address}" + (f" ({news.gpus} GPUs)" if news.gpus else "")
        if news.kind == "joined":
            waiting = ", ".join(self._waits)
            self._say(f"{name} has joined" + (f"; {waiting} may start there" if waiting else ""))
        elif news.kind == "lost":
            self._say(f"{name} is lost" + (f", and with it {names}" if names else ""))
        else:
            drained = f"; {names} drained and placed elsewhere" if names else ""
            self._say(f"{name} leaves in {news.deadline_s:.0f} s{drained}")
            for keeper in there:
                leaving = keeper.leave(news.node, max(0.0, news.deadline_s - CALL_S))
                self._leaving.add(asyncio.create_task(leaving, name=keeper.process.name))

    def _remind(self, now: float) -> None:
        waiting = {keeper.process.name: keeper.process for keeper in self._keepers() if self._is_homeless(keeper)}
        for name in [name for name in self._waits if name not in waiting]:
            since, again = self._waits.pop(name)
            if again > since + STARTS_S:
                self._say(f"{name} is on a node again, after {now - since:.0f} s")
        for name, process in waiting.items():
            since, again = self._waits.setdefault(name, (now, now + STARTS_S))
            if now >= again:
                self._say(f"{name} waits for {needs(process)}, since {now - since:.0f} s")
                self._waits[name] = since, now + max(REMIND_S, now - since)

    def _is_homeless(self, keeper: OnNodes) -> bool:
        return not keeper.nodes or any(not self._is_alive(node) for node in keeper.nodes)


def in_a_line(error: BaseException) -> str:
    """Before its last line, an error of Ray has the stack of the other machine."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no words'])[-1].strip()}"


def needs(process: Process) -> str:
    """The nodes that a process takes, in words."""
    share = process.gpus // process.nodes
    with_ = f" with {share} free GPU{'s' * (share > 1)}" if share else ""
    return f"{process.nodes} nodes{with_}{' each' * bool(share)}" if process.nodes > 1 else f"a node{with_}"
