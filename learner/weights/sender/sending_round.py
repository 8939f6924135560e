"""One round of the sender: offer, go, broadcast and facts, answers, loaded."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from buffer.wire.message import Message
from learner.weights import protocol
from learner.weights.buckets import DoubleBuffer, PublishedPolicy
from learner.weights.channel import ChannelError
from learner.weights.plan import Plan
from learner.weights.sender.broadcast import BroadcastGroup
from learner.weights.sender.files import Files
from learner.weights.sender.members import Member, Members
from learner.weights.sender.row_broadcast import RowBroadcast

log = logging.getLogger(__name__)
PATIENCE, LEAST_PATIENCE_S = 3.0, 1.0
"""A round waits PATIENCE times as long as the first answers took, and at least LEAST_PATIENCE_S, the price of a new
group."""
Transport = BroadcastGroup | RowBroadcast | Files


@dataclass(frozen=True)
class SendingRound:
    """Brings `plan` of `policy` to some of `members`."""

    number: int
    policy: PublishedPolicy
    plan: Plan
    session: str
    timeout_s: float
    members: Members
    transport: Transport
    copies: DoubleBuffer

    async def offer(self, members: list[Member], stale: Callable[[], list[Member]]) -> list[Member]:
        """Returns the ready ones of `members`; late ones get the next round. `stale`: the members that would take the
        newest policy now."""
        for member in members:
            self.members.say(member, member.offer(self.number))
        while True:
            for member in members:
                if not member.gone and member.asked_at is not None and member.asked_at <= self._long_ago():
                    self.members.drop(member, f"no Ready in round {self.number} within {self.timeout_s:g} s")
            left_s = self._patience_s(members, stale)
            if left_s <= 0:
                break
            await self.members.next_change(left_s)
        for member in members:
            if member.asked_at is not None and not (member.gone or member.late):
                member.late = True
                log.info("weights: round %d does not wait for %s, which is not ready yet", self.number, member.name)
        return [member for member in members if not member.gone and isinstance(member.answer, protocol.Ready)]

    def _long_ago(self) -> float:
        return self.members.clock.now() - self.timeout_s

    def _patience_s(self, members: list[Member], stale: Callable[[], list[Member]]) -> float:
        asked = [member for member in members if member.asked_at is not None and not member.gone]
        prompt = [member.asked_at or 0.0 for member in asked if not member.late]
        ready = [member.ready_s for member in members if isinstance(member.answer, protocol.Ready) and not member.gone]
        if not asked or (ready and not prompt):
            return 0.0
        left_s = min(member.asked_at or 0.0 for member in asked) - self._long_ago()
        if ready:
            return min(left_s, min(prompt) + self._enough_s(max(ready)) - self.members.clock.now())
        others = any(not member.late and member not in members for member in stale())
        return 0.0 if others and not prompt else left_s

    def _enough_s(self, slowest_s: float) -> float:
        return max(PATIENCE * slowest_s, min(LEAST_PATIENCE_S, self.timeout_s / 4))

    def go(self, ready: list[Member]) -> None:
        for member in ready:
            go = protocol.Go(
                round=self.number,
                session=self.session,
                version=self.policy.version,
                plan=self.plan.digest,
                timeout_s=self.timeout_s,
                source=self.transport.source(self.policy, member),
                probe=self.policy.probe is not None,
            )
            self.members.say(member, go)

    async def send_facts(self, ready: list[Member]) -> None:
        policy, digest = self.policy, self.plan.digest
        if digest not in policy.checksums:
            policy.checksums[digest] = self.transport.checksums(policy, self.copies, digest)
        checksums = await asyncio.shield(policy.checksums[digest])  # the next round may need them too
        self._say(ready, protocol.Checksums(round=self.number, checksums=checksums))
        if policy.probe is not None:
            probe = await asyncio.wrap_future(policy.probe)
            self._say(ready, probe.model_copy(update={"round": self.number}))

    def _say(self, members: list[Member], message: Message) -> None:
        for member in members:
            if not member.gone:
                self.members.say(member, message)

    async def answered(
        self, members: list[Member], *kinds: type[Message], timeout_s: float | None = None
    ) -> list[Member]:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        await self.members.until(lambda: all(member.answered_or_gone(*kinds) for member in members), timeout_s)
        for member in members:
            if not member.answered_or_gone(*kinds):
                member.spoilt = not self.transport.at_fault
                self.members.drop(member, f"no {kinds[0].__name__} in round {self.number} within {self.timeout_s:g} s")
            elif member.fatal and not member.gone:
                self.members.drop(member, member.fatal)
        return [member for member in members if not member.gone and isinstance(member.answer, kinds)]

    async def loaded(self, received: list[Member]) -> list[Member]:
        """The members that load in time, or before a newer policy ends the wait."""
        started, slowest_s, num_loaded = self.members.clock.now(), 0.0, 0
        while True:
            now_s = self.members.clock.now() - started
            number = sum(isinstance(member.answer, protocol.Loaded) for member in received)
            if number > num_loaded:
                num_loaded, slowest_s = number, now_s
            if now_s >= self.timeout_s or all(member.answered_or_gone(protocol.Loaded) for member in received):
                return await self.answered(received, protocol.Loaded, timeout_s=0.0)
            left_s, enough_s = self.timeout_s - now_s, self._enough_s(slowest_s) - now_s
            if num_loaded and self.copies.newest is not self.policy:
                if enough_s <= 0:
                    break
                left_s = min(left_s, enough_s)
            await self.members.next_change(left_s)
        return [member for member in received if not member.gone and isinstance(member.answer, protocol.Loaded)]

    async def broadcast(self, ready: list[Member]) -> str:
        """Returns why the broadcast broke, if it did. A member that fails or dies ends it at once."""
        sending = self.transport.send(self.policy, self.copies, self.plan.digest)
        sending.add_done_callback(lambda _: self.members.changed.set())

        def over() -> bool:
            return sending.done() or any(member.answered_or_gone() for member in ready)

        await self.members.until(over, 2 * self.timeout_s)
        if sending.done():
            error = sending.exception()
            if error is None:
                return ""
            if not isinstance(error, ChannelError):
                raise error
            broken = str(error)
            for member in owners(ready, error.absent):
                member.spoilt = True
                self.members.drop(member, f"its workers did not come to the group of round {self.number}")
        else:
            broken = "a server was lost or failed in the broadcast"
            for member in ready:
                failed = isinstance(member.answer, protocol.Failed) and not self.transport.at_fault
                member.spoilt = member.spoilt or failed  # the others go on
            sending.add_done_callback(lambda future: future.exception())  # asyncio must not log it
        self.transport.give_up()
        self._say(ready, protocol.Cancel(round=self.number, reason=broken))
        return broken


def owners(members: Iterable[Member], ranks: Collection[int]) -> list[Member]:
    """Members with some of `ranks`, counted from 1."""
    found, offset = [], 1
    for member in members:
        if any(offset <= rank < offset + member.workers for rank in ranks):
            found.append(member)
        offset += member.workers
    return found
