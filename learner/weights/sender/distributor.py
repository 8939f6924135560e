"""The serving half of the sender: brings each member the newest policy, round by round.

Runs in the event loop of a background thread of learner rank 0, started by `publish.Sender`. Waits for a member that
does not hold the newest policy. A round is Offer, Ready, Go, the broadcast, Received, Loaded. Checksums and Probe are
sent as soon as this process has them. Each wait for members ends at the timeout or as soon as every member
concerned has answered or is gone. A member that does not answer is left out; if the broadcast breaks, the group is
given up and the next round forms a new group of the members that still answer. So one dead server costs at most one
timeout. A server that is slow to be ready or to load costs the others less. Once the first servers have answered, the
round waits for the rest a few times as long as the first took (`PATIENCE`); the next round serves the rest.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable

from buffer.keys import ServerKeys
from buffer.wire.message import Message
from configs.schema import WeightsConfig
from learner.weights import protocol
from learner.weights.buckets import DoubleBuffer, PublishedPolicy
from learner.weights.channel import ChannelError
from learner.weights.plan import Plan, dtype_name
from learner.weights.rows import bucket_bytes
from learner.weights.sender.broadcast import BroadcastGroup
from learner.weights.sender.files import Files
from learner.weights.sender.members import Member, Members
from learner.weights.sender.row_broadcast import RowBroadcast
from learner.weights.sender.suspects import Suspects

log = logging.getLogger(__name__)
ATTEMPTS = 3
"""A server for which so many consecutive rounds fail while no member is missing cannot be reached by broadcast: it is
refused."""
PATIENCE, LEAST_PATIENCE_S = 3.0, 1.0
"""After the first answers a round waits PATIENCE times as long as they took, and at least LEAST_PATIENCE_S: a new
broadcast group without the late members costs about a second."""
SERVER_TIMINGS = ("load_s", "pause_s", "verify_s")


class Distributor:
    """Brings the newest policy of `copies` to all members over `transport`. All but `stats` belongs to the event loop
    that runs `serve`."""

    def __init__(
        self,
        copies: DoubleBuffer,
        transport: BroadcastGroup | RowBroadcast | Files,
        session: str,
        config: WeightsConfig,
        heartbeat_s: float,
        keys: ServerKeys,
    ) -> None:
        plan = copies.plan
        welcome = protocol.ServerWelcome(
            tensors=[
                protocol.TensorSpec(name=s.name, shape=list(s.shape), dtype=dtype_name(s.dtype)) for s, *_ in plan.slots
            ],
            frozen=sorted(plan.frozen_names),
            bucket_bytes=bucket_bytes(config, plan.ranks),
            ranks=plan.ranks,
            replicated=sorted(plan.replicated),
            digest=plan.digest,
            trained=plan.trained.digest,
            heartbeat_s=heartbeat_s,
        )
        self.members = Members(welcome, transport.backend, config.host, keys, self._on_drop)
        self._suspects = Suspects(self.members.clock.now)
        self._copies, self._transport, self._session = copies, transport, session
        self._plans = (plan.trained, plan) if plan.frozen else (plan,)
        self._timeout_s, self._heartbeat_s = config.timeout_s, heartbeat_s
        self._round = time.time_ns() >> 20  # greater than the rounds of a learner that died before
        self._busy = False
        self._last_round = {"weights/servers": 0.0}

    def stats(self) -> dict[str, float]:
        """Figures of the last round that reached servers, and counts. Called by the learner's thread: `_last_round` is
        replaced as a whole, so that it logs one round, not parts of two."""
        members = float(len(list(self.members)))
        return {"weights/members": members, "weights/failed": float(self.members.failed)} | self._last_round

    async def serve(self, bound: Callable[[str], None]) -> None:
        """Serve rounds until cancelled; calls `bound` with the address once servers may join."""
        async with self.members.listen() as address:
            bound(address)
            try:
                while True:
                    await self.members.until(lambda: bool(self._stale()))
                    for plan in self._plans:
                        with self._copies.hold() as policy:
                            if policy is not None:
                                self._busy = True
                                await self._serve_round(policy, plan)
                                self._busy = False
                                self.members.changed.set()
            finally:
                self._transport.give_up()

    async def drained(self) -> None:
        """Return once every member has loaded the newest policy."""
        await self.members.until(lambda: not self._busy and not self._stale())

    def _on_drop(self, member: Member) -> None:
        if member in self._transport.members:
            self._transport.give_up()

    def _stale(self) -> list[Member]:
        """Members that do not hold the newest policy, and would take it."""
        newest = self._copies.newest
        if newest is None:
            return []
        due = [m for m in self.members if not m.holding and m.holds != (self._session, newest.version)]
        return [member for member in due if not self._suspects.out(member.name)]

    def _lack(self, member: Member) -> Plan:
        """What `member` gets: everything, unless it holds the frozen weights since an earlier version."""
        return self._copies.plan.trained if member.holds[0] == self._session else self._copies.plan

    async def _serve_round(self, policy: PublishedPolicy, plan: Plan) -> None:
        """Bring `policy` to the members that lack what is in `plan`."""
        stale = [member for member in self._stale() if self._lack(member) is plan]
        if not stale:
            return
        self._round += 1
        started = time.perf_counter()
        ready = await self._offer(stale)
        if not ready:
            return
        try:
            await self._transport.prepare(policy, self._copies, ready)
        except ChannelError as error:
            log.error("weights: %s; again in %g s", error, self._heartbeat_s)
            self.members.failed += 1
            return await asyncio.sleep(self._heartbeat_s)
        self._go(policy, plan, ready)
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._tell_facts(policy, plan, ready))
            broken = await self._broadcast(policy, plan, ready)
            received = await self._answered(ready, protocol.Received, protocol.Loaded)
            self._suspect(ready, time.perf_counter() - started)
            received_s = time.perf_counter() - policy.published_at
            span_s = max((m.answer.span_s for m in received if isinstance(m.answer, protocol.Received)), default=0.0)
            for member in received:
                member.holds = (self._session, policy.version)
            if broken or len(received) < len(ready):
                self._blame(ready, broken)
            if not received:
                telling.cancel()
        loaded = await self._loaded(received, policy)
        for member in loaded:
            member.failures = 0
            self._suspects.clear(member.name)
        if loaded:
            round_s = time.perf_counter() - started
            stats = round_stats(policy, plan, loaded, received_s, span_s) | {"weights/round_s": round_s}
            self._last_round = self._last_round | stats
            log.info("weights: version %d on %d server(s) after %.3f s", policy.version, len(loaded), round_s)

    async def _offer(self, members: list[Member]) -> list[Member]:
        """Offer the round to `members`; returns the ready members. A member that evaluates answers Hold.

        Once one member is ready, the round does not wait for members that are late: they get the next round.
        """
        for member in members:
            self.members.say(member, member.offer(self._round))
        while True:
            for member in members:
                if not member.gone and member.asked_at is not None and member.asked_at <= self._long_ago():
                    self.members.drop(member, f"no Ready in round {self._round} within {self._timeout_s:g} s")
            left_s = self._patience_s(members)
            if left_s <= 0:
                break
            await self.members.next_change(left_s)
        for member in members:
            if member.asked_at is not None and not (member.gone or member.late):
                member.late = True
                log.info("weights: round %d does not wait for %s, which is not ready yet", self._round, member.name)
        return [member for member in members if not member.gone and isinstance(member.answer, protocol.Ready)]

    def _long_ago(self) -> float:
        """Time of an Offer whose answer is due now."""
        return self.members.clock.now() - self._timeout_s

    def _patience_s(self, members: list[Member]) -> float:
        """Seconds to wait for further answers of `members` to an Offer; 0 or less: do not wait."""
        asked = [member for member in members if member.asked_at is not None and not member.gone]
        prompt = [member.asked_at or 0.0 for member in asked if not member.late]
        ready = [member.ready_s for member in members if isinstance(member.answer, protocol.Ready) and not member.gone]
        if not asked or (ready and not prompt):
            return 0.0
        left_s = min(member.asked_at or 0.0 for member in asked) - self._long_ago()
        if ready:
            return min(left_s, min(prompt) + self._enough_s(max(ready)) - self.members.clock.now())
        others = any(not member.late and member not in members for member in self._stale())
        return 0.0 if others and not prompt else left_s

    def _enough_s(self, slowest_s: float) -> float:
        """Seconds to wait for a member if the slowest member so far took `slowest_s`."""
        return max(PATIENCE * slowest_s, min(LEAST_PATIENCE_S, self._timeout_s / 4))

    def _go(self, policy: PublishedPolicy, plan: Plan, ready: list[Member]) -> None:
        for member in ready:
            go = protocol.Go(
                round=self._round,
                session=self._session,
                version=policy.version,
                plan=plan.digest,
                timeout_s=self._timeout_s,
                source=self._transport.source(policy, member),
                probe=policy.probe is not None,
            )
            self.members.say(member, go)

    async def _tell_facts(self, policy: PublishedPolicy, plan: Plan, ready: list[Member]) -> None:
        """Tell the members of the round what they verify `policy` with, each as soon as it is known."""

        if plan.digest not in policy.checksums:
            policy.checksums[plan.digest] = self._transport.checksums(policy, self._copies, plan.digest)
        checksums = await asyncio.shield(policy.checksums[plan.digest])  # the next round may need them too
        self._tell(ready, protocol.Checksums(round=self._round, checksums=checksums))
        if policy.probe is not None:
            probe = await asyncio.wrap_future(policy.probe)
            self._tell(ready, probe.model_copy(update={"round": self._round}))

    def _suspect(self, ready: list[Member], cost_s: float) -> None:
        """Note the members that spoilt the round: those that said Ready and did not answer, and the first to fail."""
        for member in ready:
            if member.spoilt:
                member.spoilt = False
                pause_s = self._suspects.blame(member.name, cost_s)
                log.warning("weights: no round waits for %s within the next %.0f s", member.name, pause_s)

    def _tell(self, members: list[Member], message: Message) -> None:
        for member in members:
            if not member.gone:
                self.members.say(member, message)

    async def _answered(
        self, members: list[Member], *kinds: type[Message], timeout_s: float | None = None
    ) -> list[Member]:
        """Wait for answers; returns the `members` that answer with one of `kinds` in time. Drops members that do not
        answer."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        await self.members.until(lambda: all(member.answered_or_gone(*kinds) for member in members), timeout_s)
        for member in members:
            if not member.answered_or_gone(*kinds):
                member.spoilt = not self._transport.at_fault
                self.members.drop(member, f"no {kinds[0].__name__} in round {self._round} within {self._timeout_s:g} s")
            elif member.fatal and not member.gone:
                self.members.drop(member, member.fatal)
        return [member for member in members if not member.gone and isinstance(member.answer, kinds)]

    async def _loaded(self, received: list[Member], policy: PublishedPolicy) -> list[Member]:
        """Wait for Loaded; returns the members that load `policy` in time. Once there is a newer policy, slow members
        are not waited for: they are offered the newer one."""
        started, slowest_s, num_loaded = self.members.clock.now(), 0.0, 0
        while True:
            now_s = self.members.clock.now() - started
            number = sum(isinstance(member.answer, protocol.Loaded) for member in received)
            if number > num_loaded:
                num_loaded, slowest_s = number, now_s
            if now_s >= self._timeout_s or all(member.answered_or_gone(protocol.Loaded) for member in received):
                return await self._answered(received, protocol.Loaded, timeout_s=0.0)
            left_s, enough_s = self._timeout_s - now_s, self._enough_s(slowest_s) - now_s
            if num_loaded and self._copies.newest is not policy:
                if enough_s <= 0:
                    break
                left_s = min(left_s, enough_s)
            await self.members.next_change(left_s)
        return [member for member in received if not member.gone and isinstance(member.answer, protocol.Loaded)]

    async def _broadcast(self, policy: PublishedPolicy, plan: Plan, ready: list[Member]) -> str:
        """Send the buckets; returns why that broke, or an empty string. A member that fails or dies ends it at once."""
        sending = self._transport.send(policy, self._copies, plan.digest)
        sending.add_done_callback(lambda _: self.members.changed.set())

        def over() -> bool:
            return sending.done() or any(member.answered_or_gone() for member in ready)

        await self.members.until(over, 2 * self._timeout_s)
        if sending.done():
            error = sending.exception()
            if error is None:
                return ""
            if not isinstance(error, ChannelError):
                raise error
            broken = str(error)
            for member in owners(ready, error.absent):
                member.spoilt = True
                self.members.drop(member, f"its workers did not come to the group of round {self._round}")
        else:
            broken = "a server was lost or failed in the broadcast"
            for member in ready:
                failed = isinstance(member.answer, protocol.Failed) and not self._transport.at_fault
                member.spoilt = member.spoilt or failed  # the others go on
            sending.add_done_callback(lambda future: future.exception())  # retrieved, so that asyncio does not log it
        self._transport.give_up()
        self._tell(ready, protocol.Cancel(round=self._round, reason=broken))
        return broken

    def _blame(self, ready: list[Member], broken: str) -> None:
        """After a round that failed for some: refuse a member for which round after round fails with nobody missing, of
        the members or of the ranks that send."""
        self._transport.give_up()
        failed = [member for member in ready if isinstance(member.answer, protocol.Failed) and not member.gone]
        log.warning("weights: round %d failed for %d of %d: %s", self._round, len(failed), len(ready), broken)
        self.members.failed += len(failed)
        if self._transport.at_fault or any(member.gone for member in ready):
            return
        for member in failed:
            member.failures += 1
            if member.failures >= ATTEMPTS and isinstance(member.answer, protocol.Failed):
                refused = protocol.JoinRefused(reason=f"{ATTEMPTS} rounds failed: {member.answer.reason}")
                self.members.say(member, refused)
                self.members.drop(member, "refused")


def owners(members: Iterable[Member], ranks: Collection[int]) -> list[Member]:
    """The members of a group that have some of `ranks`, which are counted from 1 in the order of the members."""
    found, offset = [], 1
    for member in members:
        if any(offset <= rank < offset + member.workers for rank in ranks):
            found.append(member)
        offset += member.workers
    return found


def round_stats(
    policy: PublishedPolicy, plan: Plan, loaded: Iterable[Member], received_s: float, span_s: float
) -> dict[str, float]:
    """What `metrics.jsonl` shows of a round that reached `loaded`, in seconds: plain keys hold the slowest server's,
    keys with a server's name that server's; docs/design/weights-wire.md explains each."""
    answers = {member.name: member.answer for member in loaded if isinstance(member.answer, protocol.Loaded)}
    stats = {
        "weights/version": float(policy.version),
        "weights/servers": float(len(answers)),
        "weights/received_s": received_s,
        "weights/lag_s": time.perf_counter() - policy.published_at - max(a.verify_s for a in answers.values()),
    }
    if span_s > 0:
        stats |= {"weights/span_s": span_s, "weights/gb_per_s": plan.total_bytes / span_s / 1e9}
    for key in SERVER_TIMINGS:
        seconds = {name: float(getattr(answer, key)) for name, answer in answers.items()}
        stats[f"weights/{key}"] = max(seconds.values())
        stats |= {f"weights/{name}/{key}": value for name, value in seconds.items()}
    if probes := [answer.probe for answer in answers.values() if answer.probe is not None]:
        stats |= {"weights/probe": max(probes), "weights/probe_version": float(policy.version)}
    return stats
