"""Brings each member the newest policy, round by round, in a background thread of rank 0. One dead server costs at most
one timeout."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from buffer.keys import ServerKeys
from configs.schema import WeightsConfig
from learner.weights import protocol
from learner.weights.buckets import DoubleBuffer, PublishedPolicy
from learner.weights.channel import ChannelError
from learner.weights.plan import Plan, dtype_name
from learner.weights.rows import bucket_bytes
from learner.weights.sender.members import Member, Members
from learner.weights.sender.sending_round import SendingRound, Transport
from learner.weights.sender.suspects import Suspects

log = logging.getLogger(__name__)
ATTEMPTS = 3
"""Rounds in a row that fail for a server, with no member missing, until it is refused."""
SERVER_TIMINGS = ("load_s", "pause_s", "verify_s")


class Distributor:
    """Brings the newest policy of `copies` to all members. All but `stats` belongs to the event loop of `serve`."""

    def __init__(
        self,
        copies: DoubleBuffer,
        transport: Transport,
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
        self._number = time.time_ns() >> 20  # greater than a dead learner's rounds
        self._busy = False
        self._last_round = {"weights/servers": 0.0}

    def stats(self) -> dict[str, float]:
        """The learner's thread calls it: `_last_round` is replaced whole."""
        members = float(len(list(self.members)))
        return {"weights/members": members, "weights/failed": float(self.members.failed)} | self._last_round

    async def serve(self, bound: Callable[[str], None]) -> None:
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
        await self.members.until(lambda: not self._busy and not self._stale())

    def _on_drop(self, member: Member) -> None:
        if member in self._transport.members:
            self._transport.give_up()

    def _stale(self) -> list[Member]:
        newest = self._copies.newest
        if newest is None:
            return []
        due = [m for m in self.members if not m.holding and m.holds != (self._session, newest.version)]
        return [member for member in due if not self._suspects.out(member.name)]

    def _lack(self, member: Member) -> Plan:
        return self._copies.plan.trained if member.holds[0] == self._session else self._copies.plan

    async def _serve_round(self, policy: PublishedPolicy, plan: Plan) -> None:
        stale = [member for member in self._stale() if self._lack(member) is plan]
        if not stale:
            return
        self._number += 1
        started = time.perf_counter()
        parts = self.members, self._transport, self._copies
        round = SendingRound(self._number, policy, plan, self._session, self._timeout_s, *parts)
        ready = await round.offer(stale, self._stale)
        if not ready:
            return
        try:
            await self._transport.prepare(policy, self._copies, ready)
        except ChannelError as error:
            log.error("weights: %s; again in %g s", error, self._heartbeat_s)
            self.members.failed += 1
            return await asyncio.sleep(self._heartbeat_s)
        round.go(ready)
        async with asyncio.TaskGroup() as tasks:
            facts = tasks.create_task(round.send_facts(ready))
            broken = await round.broadcast(ready)
            received = await round.answered(ready, protocol.Received, protocol.Loaded)
            self._suspect(ready, time.perf_counter() - started)
            received_s = time.perf_counter() - policy.published_at
            span_s = max((m.answer.span_s for m in received if isinstance(m.answer, protocol.Received)), default=0.0)
            for member in received:
                member.holds = (self._session, policy.version)
            if broken or len(received) < len(ready):
                self._blame(ready, broken)
            if not received:
                facts.cancel()
        loaded = await round.loaded(received)
        for member in loaded:
            member.failures = 0
            self._suspects.clear(member.name)
        if loaded:
            round_s = time.perf_counter() - started
            stats = round_stats(policy, plan, loaded, received_s, span_s) | {"weights/round_s": round_s}
            self._last_round = self._last_round | stats
            log.info("weights: version %d on %d server(s) after %.3f s", policy.version, len(loaded), round_s)

    def _suspect(self, ready: list[Member], cost_s: float) -> None:
        for member in ready:
            if member.spoilt:
                member.spoilt = False
                pause_s = self._suspects.blame(member.name, cost_s)
                log.warning("weights: no round waits for %s within the next %.0f s", member.name, pause_s)

    def _blame(self, ready: list[Member], broken: str) -> None:
        self._transport.give_up()
        failed = [member for member in ready if isinstance(member.answer, protocol.Failed) and not member.gone]
        log.warning("weights: round %d failed for %d of %d: %s", self._number, len(failed), len(ready), broken)
        self.members.failed += len(failed)
        if self._transport.at_fault or any(member.gone for member in ready):
            return
        for member in failed:
            member.failures += 1
            if member.failures >= ATTEMPTS and isinstance(member.answer, protocol.Failed):
                refused = protocol.JoinRefused(reason=f"{ATTEMPTS} rounds failed: {member.answer.reason}")
                self.members.say(member, refused)
                self.members.drop(member, "refused")


def round_stats(
    policy: PublishedPolicy, plan: Plan, loaded: Iterable[Member], received_s: float, span_s: float
) -> dict[str, float]:
    """Figures of a round (docs/design/weights-wire.md); the slowest server's under plain keys."""
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
