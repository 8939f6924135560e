"""Adds and drains rollout servers of a live run, as a person or the rule wants it.

`python -m actors scale` sets the number wanted in the buffer. With `rollout.servers: {min, max}` and no number of a
person, `actors/scaling/rule.py` decides.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from actors.process import FINAL, Process
from actors.scaling.rule import Look, Rule, Wish
from actors.supervise.nodes import Patience
from actors.supervise.supervisor import Supervisor
from actors.watch.run_state import silent
from actors.watch.state_poll import StatePoll
from buffer.wire.connection import RefusedError
from buffer.wire.protocol import Ack, Kept, Scale, State
from configs.schema import Config, ServerRange

MOST_SERVERS = 4096
"""A larger number is a slip of the keyboard."""


class Fleet:
    """Adds and drains servers. `server` makes a process by number; `room` says how many more fit, None: any. `wanted`
    is the run file's or the rule's number."""

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        server: Callable[[int], Process],
        room: Callable[[], int | None],
        say: Callable[[str], None],
        wanted: int,
    ) -> None:
        self.config, self._supervisor, self._server, self._ask_room, self._say = config, supervisor, server, room, say
        self.room: int | None = 0
        servers = config.rollout.servers
        self.wanted = sum(process.role == "rollout" for process in supervisor.processes)
        self._own = wanted
        """Wanted where no person says otherwise."""
        self._rule = None
        if isinstance(servers, ServerRange):
            self._rule = Rule(servers.min, servers.max, config.batch.max_staleness)
        self._numbers = count(self.wanted)
        """No name is used twice in a launch."""
        self._drains: set[asyncio.Task[None]] = set()

    async def follow(self, poll: StatePoll) -> None:
        ask_room, patience, wish = partial(asyncio.to_thread, self._ask_room), Patience(self._say), None
        while True:
            state, connection = await poll.answer()
            self.room = await patience.ask(ask_room, self.room)
            wish = self.adapt(state, time.monotonic()) or wish
            if state.kept != (kept := self.kept()):
                await connection.expect(kept, Ack)
            if wish:
                with suppress(RefusedError):  # the buffer has just started: the next time
                    await connection.expect(Scale(servers=wish.servers, by="rule", why=wish.why), Ack)
                    wish = None

    def adapt(self, state: State, now: float) -> Wish | None:
        """Returns a new wish of the rule. Room is for the first servers until they are placed."""
        if self._supervisor.ending or not self._supervisor.placed.is_set():
            return None
        held = state.wanted_servers if state.wanted_by_person else None
        wish = self._ask_rule(state, now) if held is None else None
        if wish:
            self._own = wish.servers
        elif held and self._rule:  # the rule goes on from a person's number
            self._own = held
        own = "as the rule said last" if self._rule else "as the run file says"
        self._want(held or self._own, wish.why if wish else "asked for by hand" if held else own)
        for name in self._staying()[self.wanted :]:
            drain = asyncio.create_task(self._supervisor.drain_server(name, self._server(0).drain_s))
            self._drains.add(drain)
            drain.add_done_callback(self._drains.discard)
        missing, room = self.wanted - len(self._staying()), self._free()
        for _ in range(missing if room is None else min(missing, room)):
            self._supervisor.add(self._server(next(self._numbers)))
        return wish

    def kept(self) -> Kept:
        least, most, bound = self._bounds()
        return Kept(
            servers=self._supervisor.servers(),
            left=self._supervisor.left,
            wanted=self.wanted,
            least=least,
            most=most,
            bound=bound,
            advice=self._rule.advice if self._rule else "",
        )

    def _want(self, servers: int, why: str) -> None:
        if servers != self.wanted:
            self._say(f"servers: {self.wanted} -> {servers} ({why})")
            self.wanted = servers

    def _ask_rule(self, state: State, now: float) -> Wish | None:
        """The rule is not asked while servers are on their way."""
        if self._rule is None:
            return None
        gone, kept = silent(state, self.config), self._supervisor.servers()
        lives = {name: life for name, life in kept.items() if life not in FINAL}
        works = [name for name, life in lives.items() if life == "started" and name not in gone]
        known = [state.servers[name] for name in works if name in state.servers]
        if len(works) < len(lives) or len(known) < len(works) or any(one["version"] is None for one in known):
            self._rule.changing(now)
            return None
        stats, free, before = [one["stats"] for one in known], self._free(), self._rule.advice
        look = Look(
            at=now,
            version=state.trained + 1,
            learner_waits=any(waiter.kind == "Take" for waiter in state.waiters),
            places=sum(one.get("places", 0.0) for one in stats),
            parked=sum(one.get("parked", 0.0) for one in stats),
            leased=state.counts.get("leased", 0),
            made=state.lengths.get("generated", [0])[0],
        )
        wish = self._rule.look(look, len(works), self._rule.most if free is None else free)
        if self._rule.advice and not before:
            self._say(f"servers: {self.wanted} stay: {self._rule.advice}")
        if wish and wish.servers > len(works):  # beside those that gave up
            wish = replace(wish, servers=min(wish.servers + len(kept) - len(lives), self._rule.most))
        return wish

    def _staying(self) -> list[str]:
        """Servers that are not drained. A server that gave up is last and keeps its place: others would give up too."""
        lives = self._supervisor.servers()
        return sorted((name for name in lives if lives[name] != "draining"), key=lambda name: lives[name] in FINAL)

    def _free(self) -> int | None:
        """Room beyond servers being placed; None: any number."""
        placing = sum(life == "placing" for life in self._supervisor.servers().values())
        return None if self.room is None else max(0, self.room - placing)

    def _bounds(self) -> tuple[int, int, str]:
        servers, port = self.config.rollout.servers, self.config.rollout.chat.port
        least, most, bound = 1, MOST_SERVERS, "more are a slip of the keyboard"
        if isinstance(servers, ServerRange):
            least, most, bound = servers.min, servers.max, f"rollout.servers has min {servers.min}, max {servers.max}"
        if port:
            most, bound = 1, f"rollout.chat.port is {port}, for one server"
        placed = sum(life not in ("placing", *FINAL) for life in self._supervisor.servers().values())
        if self.room is not None and placed + self.room < most:
            most, bound = placed + self.room, f"there are GPUs for {placed + self.room} of them"
        return least, max(most, least), bound
