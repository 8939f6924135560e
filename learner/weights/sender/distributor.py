"""The serving half of the sender: admits servers and brings each the newest policy, round by round.

Runs in the event loop of a background thread of learner rank 0, started by `publish.Sender`. Waits for a member that does
not hold the newest policy. A round is Offer, Ready, Go, the broadcast, Received, Loaded; each wait ends at the timeout or as
soon as every member concerned has answered or is gone. A member that does not answer is left out; if the broadcast breaks,
the group is given up and the next round forms another of the members that still answer. So one dead server costs at most
one timeout.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from buffer.curve import ServerKeys
from buffer.wire.message import Message
from learner.weights.channel import ChannelError
from learner.weights.plan import Plan, dtype_name
from learner.weights.protocol import (
    PROTOCOL,
    TO_LEARNER,
    Bye,
    Cancel,
    Failed,
    Join,
    Joined,
    JoinRefused,
    KeepAlive,
    Leave,
    Loaded,
    Offer,
    Ready,
    Received,
    Rejoin,
    ServerWelcome,
    TensorSpec,
    pack,
    router,
    unpack,
)
from learner.weights.sender.broadcast import BroadcastGroup
from learner.weights.sender.double_buffer import DoubleBuffer, PublishedPolicy
from learner.weights.sender.files import Files
from learner.weights.sender.members import Member, Members
from learner.weights.sender.timeline import Timeline

log = logging.getLogger(__name__)
ATTEMPTS = 3
"""A server for which so many consecutive rounds fail while no member is missing cannot be reached by broadcast: it is
refused."""


class Distributor:
    """Serves the newest policy of `copies`. All but `timeline` belongs to the event loop that runs `serve`."""

    def __init__(
        self,
        plan: Plan,
        bucket_bytes: int,
        copies: DoubleBuffer,
        group: BroadcastGroup | Files,
        session: str,
        host: str,
        timeout_s: float,
        heartbeat_s: float,
        keys: ServerKeys | None,
    ) -> None:
        self.copies, self.session, self._group = copies, session, group
        self.timeout_s, self.heartbeat_s, self._keys, self._host = timeout_s, heartbeat_s, keys, host
        self.members = Members()
        self.timeline = Timeline(plan.total_bytes)
        self.changed = asyncio.Event()
        tensors = [TensorSpec(name=s.name, shape=list(s.shape), dtype=dtype_name(s.dtype)) for s, *_ in plan.slots]
        self._welcome = ServerWelcome(
            session=session,
            tensors=tensors,
            bucket_bytes=bucket_bytes,
            digest=plan.digest,
            heartbeat_s=heartbeat_s,
        )
        self._round = time.time_ns() >> 20  # greater than the rounds of a learner that died before
        self._busy = False

    async def serve(self, bound: Callable[[str], None]) -> None:
        """Until cancelled; calls `bound` with the address once servers may join."""
        with zmq.asyncio.Context() as context:
            authenticator = AsyncioAuthenticator(context) if self._keys else None
            if authenticator:
                authenticator.start()
                authenticator.configure_curve_callback("*", self._keys)
            self._socket, address = router(context, self._host, self._keys)
            bound(address)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for part in (self._read, self._beat, self._rounds):
                        tasks.create_task(part())
            finally:
                for member in self.members:
                    self._say(member.route, Bye())
                self._group.give_up()
                self._socket.close()
                if authenticator:
                    authenticator.stop()

    async def drained(self) -> None:
        """Return once every member has loaded the newest policy."""
        await self._until(lambda: not self._busy and not self._stale(), None)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._take(frames[0], unpack(frames[-1], TO_LEARNER))
            except ValueError as error:
                log.error("weights: refused a message: %s", error)
                self._say(frames[0], JoinRefused(reason=str(error)))
            self.changed.set()

    def _take(self, route: bytes, message: Message) -> None:
        member = self.members.get(route)
        if isinstance(message, Join):
            self._join(route, member, message)
        elif member is None:
            if not isinstance(message, Leave):
                self._say(route, Rejoin(reason="not a member"))
        elif isinstance(message, Leave):
            self._drop(member, _why(member.answer))
        else:
            member.on_message(message)

    def _join(self, route: bytes, member: Member | None, message: Join) -> None:
        backend = self._group.backend
        if message.protocol != PROTOCOL:
            self._say(route, JoinRefused(reason=f"weights protocol {message.protocol} here, {PROTOCOL} at the learner"))
        elif backend not in ("", message.backend):
            reason = f"{message.name} receives over {message.backend}, the learner sends over {backend}: "
            self._say(route, JoinRefused(reason=reason + "set learner.device and rollout.device alike"))
        elif message.digest != self._welcome.digest:
            self._say(route, self._welcome)
        else:
            if member is None:
                self.members.join(route, message)
                self.timeline.set_members(len(self.members))
                log.info("weights: %s joined, %d worker(s), version %d", message.name, message.workers, message.version)
            self._say(route, Joined(session=self.session))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            for member in self.members.silent(self.heartbeat_s):
                self._drop(member, f"silent for {time.monotonic() - member.heard_at:.1f} s")
            for member in self.members:
                self._say(member.route, KeepAlive())

    def _drop(self, member: Member, reason: str) -> None:
        self.members.drop(member)
        self.timeline.set_members(len(self.members))
        if member in self._group.members:
            self._group.give_up()
        if reason != "left":
            self.timeline.add_failed(1)
            log.warning("weights: %s is left out: %s", member.name, reason)
            self._say(member.route, Rejoin(reason=reason))
        self.changed.set()

    def _stale(self) -> list[Member]:
        newest = self.copies.newest
        return self.members.without((self.session, newest.version)) if newest else []

    async def _rounds(self) -> None:
        while True:
            await self._until(lambda: bool(self._stale()), None)
            with self.copies.hold_newest() as policy:
                if policy is not None:
                    self._busy = True
                    await self._serve_round(policy)
                    self._busy = False
                    self.changed.set()

    async def _serve_round(self, policy: PublishedPolicy) -> None:
        self._round += 1
        started = time.perf_counter()
        ready = await self._gather(self._stale(), Offer(round=self._round, version=policy.version))
        if not ready:
            return
        self._group.form(ready)
        try:
            await self._group.prepare(policy, self.copies)
        except ChannelError as error:
            log.error("weights: %s; again in %g s", error, self.heartbeat_s)
            self.timeline.add_failed(1)
            return await asyncio.sleep(self.heartbeat_s)
        for member in ready:
            self._say(member.route, self._group.go(member, self._round, self.session, policy))
        sending = time.perf_counter()
        broken = await self._broadcast(policy, ready)
        sent_s = time.perf_counter() - sending
        received = await self._answered(ready, Received, Loaded)
        spans = [member.answer.span_s for member in received if isinstance(member.answer, Received)]
        for member in received:
            member.holds = (self.session, policy.version)
        if broken or len(received) < len(ready):
            self._blame(ready, broken)
        loaded = await self._answered(received, Loaded)
        for member in loaded:
            member.failures = 0
        self.timeline.record(policy, loaded, sent_s, max(spans, default=0.0), time.perf_counter() - started)

    async def _gather(self, members: list[Member], offer: Offer) -> list[Member]:
        for member in members:
            member.enter(self._round)
            self._say(member.route, offer)
        return await self._answered(members, Ready)

    async def _answered(self, members: list[Member], *kinds: type[Message]) -> list[Member]:
        """The `members` that answer with one of `kinds` in time. Those that do not answer at all are dropped."""
        await self._until(lambda: all(member.answered_or_gone(*kinds) for member in members), self.timeout_s)
        for member in members:
            if not member.answered_or_gone(*kinds):
                self._drop(member, f"no {kinds[0].__name__} in round {self._round} within {self.timeout_s:g} s")
            elif isinstance(member.answer, Failed) and member.answer.fatal and not member.gone:
                self._drop(member, member.answer.reason)
        return [member for member in members if not member.gone and isinstance(member.answer, kinds)]

    async def _broadcast(self, policy: PublishedPolicy, ready: list[Member]) -> str:
        """Send the buckets; returns why that broke, or an empty string. A member that fails or dies ends it at once."""
        sending = self._group.send(policy, self.copies)
        sending.add_done_callback(lambda _: self.changed.set())

        def over() -> bool:
            return sending.done() or any(member.answered_or_gone() for member in ready)

        await self._until(over, 2 * self.timeout_s)
        if sending.done():
            error = sending.exception()
            if error is None:
                return ""
            if not isinstance(error, ChannelError):
                raise error
            broken = str(error)
        else:
            broken = "a server was lost or failed in the broadcast"
            sending.add_done_callback(lambda future: future.exception())  # retrieved, so that nothing complains
        self._group.give_up()
        for member in ready:
            if not member.gone:
                self._say(member.route, Cancel(round=self._round, reason=broken))
        return broken

    def _blame(self, ready: list[Member], broken: str) -> None:
        """After a round that failed for some: refuse a member for which round after round fails with no member missing."""
        self._group.give_up()
        failed = [member for member in ready if isinstance(member.answer, Failed) and not member.gone]
        log.warning("weights: round %d failed for %d of %d: %s", self._round, len(failed), len(ready), broken)
        self.timeline.add_failed(len(failed))
        if any(member.gone for member in ready):
            return
        for member in failed:
            member.failures += 1
            if member.failures >= ATTEMPTS and isinstance(member.answer, Failed):
                self._say(member.route, JoinRefused(reason=f"{ATTEMPTS} rounds failed: {member.answer.reason}"))
                self._drop(member, "refused")

    def _say(self, route: bytes, message: Message) -> None:
        self._socket.send_multipart([route, pack(message)])  # never waits: the queue has no limit

    async def _until(self, true: Callable[[], bool], timeout_s: float | None) -> None:
        """Return as soon as `true()`, evaluated at each change, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not true():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return


def _why(answer: Message | None) -> str:
    """Why a member leaves: the fatal failure it answered with, or `left`."""
    return answer.reason if isinstance(answer, Failed) and answer.fatal else "left"
