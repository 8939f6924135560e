"""The launcher's ends of actors on other nodes, which may be lost."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from actors.process import FINAL, Event, Process
from actors.supervise.cluster.node_keeper import Whereabouts
from actors.supervise.gang import LostMember
from configs.entrypoint import DONE
from configs.variables import open_private, private_folder

EVENTS_S = 30.0
STARTED_S = 20.0
"""Processes start in order, but one that waits for a node must not hold up the rest."""
ANSWER_S = 40.0
"""For a keeper's answer, beyond its own limit."""


class RemoteKeeper:
    """A `NodeKeeper` as a Ray actor. Raises RayError when Ray is gone."""

    def __init__(self, process: Process, make: Callable[[], Any], is_alive: Callable[[str], bool]) -> None:
        self.process, self._make, self._is_alive = process, make, is_alive
        self._actor = make()
        self._place: Whereabouts | None = None
        self._seen = 0  # last event of the keeper at `_place`
        self._moving = self._ended = False
        self._stopped = False
        """It moves to no other node."""

    @property
    def nodes(self) -> list[str]:
        return [self._place.node] if self._place else []

    async def started(self) -> None:
        """Wait for a keeper; what hinders one is an event."""
        import ray

        with suppress(TimeoutError, ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
            async with asyncio.timeout(STARTED_S):
                self._place = await _answer(self._actor.place.remote())

    async def events(self, after: int) -> list[Event]:
        import ray

        life = self._place.life if self._place else ""
        try:
            place, found = await _answer(self._actor.events.remote(life, self._seen, EVENTS_S))
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            if self._ended:
                return [Event(after + 1, "ended", "it was waiting for a node", DONE)]
            why = str(error).strip().splitlines()[-1]
            return [Event(after + 1, "gave_up", f"Ray could not make its keeper: {why}")]
        if place.life != life:
            self._moving &= self._place is None
            self._place, self._seen = place, 0
        events: list[Event] = []
        for event in (event for event in found if event.number > self._seen):
            self._seen = event.number
            if event.kind in FINAL and self._moving and not self._stopped:
                event = Event(0, "failed", "drained because its node leaves; it starts on another one", event.code)
                self._replace()
            if event.kind == "started" and self._place is not None and self._place.node:
                event = replace(event, text=f"{event.text} on {place.address}")
            self._ended |= event.kind in FINAL
            events.append(replace(event, number=after + 1 + len(events)))  # each keeper numbers for itself
        if not place.shared:
            log_lines(self.process, events)
        return events

    async def leave(self, node: str, within_s: float) -> None:
        """`events` then starts the process on another node."""
        if not (self._ended or self._stopped):
            self._moving = True
            await self._end(within_s, self._actor.drain.options(max_task_retries=0), within_s)

    def _replace(self) -> None:
        import ray

        ray.kill(self._actor)
        self._actor, self._place, self._seen, self._moving = self._make(), None, 0, False

    async def drain(self, timeout_s: float) -> None:
        """A keeper that waits for a node is given up."""
        self._stopped = True
        await self._end(timeout_s, self._actor.drain, timeout_s)

    async def kill(self) -> None:
        self._stopped = True
        await self._end(0.0, self._actor.kill)

    def release(self) -> None:
        import ray

        self._ended = self._stopped = True
        ray.kill(self._actor)

    async def _end(self, limit_s: float, method: Any, *arguments: float) -> None:
        import ray

        if self._place is None or not self._is_alive(self._place.node):
            self._ended = True
            ray.kill(self._actor)
            return
        with suppress(TimeoutError, ray.exceptions.RayActorError):
            async with asyncio.timeout(limit_s + ANSWER_S):
                await _answer(method.remote(*arguments))


class RemoteMember:
    """A `GangMember` as a Ray actor: see `gang.KeptNode`."""

    def __init__(self, process: Process, actor: Any) -> None:
        self.process, self._actor = process, actor
        self._place: Whereabouts | None = None

    async def place(self) -> tuple[Whereabouts, str]:
        import ray

        try:
            self._place, unfit = await _answer(self._actor.place.options(max_task_retries=-1).remote())
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            why = str(error).strip().splitlines()[-1]
            return Whereabouts("", "", "", True), f"Ray could not make its keeper: {why}"
        assert self._place is not None
        return self._place, unfit

    async def host(self) -> int:
        return int(await self._call(self._actor.host))

    async def start(self, env: dict[str, str], flags: Sequence[str]) -> None:
        await self._call(self._actor.start, env, flags)

    async def events(self, after: int) -> tuple[list[Event], list[str], bool]:
        if (answer := await self._call(self._actor.events, after, EVENTS_S)) is None:
            raise LostMember("its keeper was killed")
        events: list[Event] = answer[0]
        if self._place and not self._place.shared:
            log_lines(self.process, events)
        return events, answer[1], answer[2]

    async def drain(self, timeout_s: float) -> None:
        await self._call(self._actor.drain, timeout_s)

    async def kill(self) -> None:
        await self._call(self._actor.kill)

    def release(self) -> None:
        import ray

        ray.kill(self._actor)

    async def _call(self, method: Any, *arguments: object) -> Any:
        import ray

        if self._place is None:
            raise LostMember("it has no node")
        try:
            return await _answer(method.remote(*arguments))
        except ray.exceptions.RayActorError as error:
            self._place = None
            raise LostMember(type(error).__name__) from None


def _answer(reference: Any) -> Any:
    """Cancelling the future leaves the call alone."""
    return asyncio.wrap_future(reference.future())


def log_lines(process: Process, events: Sequence[Event]) -> None:
    """For a node without the run's folder."""
    with suppress(OSError):  # what a full disk does not take is left out
        private_folder(process.log.parent)
        with open(process.log, "a", encoding="utf-8", opener=open_private) as file:
            for event in events:
                head = "" if event.kind == "line" else f"--- {process.name} {event.kind}: "
                file.write(f"{head}{event.text}\n")
