"""All requests of the samples wire as calls on ledger and store: `Handlers` builds the parts and answers what is
answered at once. Driven by `requests.py`.

The requests that may have to wait are in `verbs.py`, the processes that make them in `peers.py`, the samples in
`batches.py`. Nothing that was answered may be sent before the `changes` until then are committed.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from buffer.ledger import reasons
from buffer.ledger.evaluations import Standing
from buffer.ledger.rules import Ledger
from buffer.ledger.types import Transaction, server_name
from buffer.store.sqlite import Store
from buffer.wire import protocol, verbs
from buffer.wire.batches import UntrainedGroups
from buffer.wire.limits import Limits
from buffer.wire.message import Message
from buffer.wire.peers import Peer, Peers
from buffer.wire.served_rows import ServedRows
from configs.resume import Change

log = logging.getLogger(__name__)


class Handlers:
    """`problems` are the rows of the data set, by the number that the ledger calls `index`."""

    def __init__(self, ledger: Ledger, store: Store, problems: Sequence[Mapping[str, Any]], limits: Limits) -> None:
        self.ledger, self.store, self._limits = ledger, store, limits
        self.peers, self.rows = Peers(ledger, limits), ServedRows(problems)
        self.groups = UntrainedGroups(ledger, store, limits, self.rows)
        self.ask = verbs.AskVerb(ledger, self.rows)
        self.take = verbs.TakeVerb(ledger, self.peers, self.groups, self.rows)
        self.verbs: dict[type[Message], verbs.ParkableVerb[Any]] = {
            protocol.Take: self.take,
            protocol.Put: verbs.PutVerb(ledger, self.groups, self.rows, limits),
            protocol.Where: verbs.WhereVerb(self.peers),
            protocol.Results: verbs.ResultsVerb(ledger),
            protocol.Ask: self.ask,
        }
        """The requests that may have to wait."""
        self._at_once: dict[type[Message], Callable[[Peer, Any, float], Message]] = {
            protocol.Fail: self._fail, protocol.Rewind: self._rewind, protocol.Trained: self._trained,
            protocol.Quarantine: self._quarantine, protocol.Trial: self._trial, protocol.Evaluate: self._evaluate,
            protocol.Evaluated: self._evaluated, protocol.Goodbye: self._goodbye, protocol.Scale: self._scale,
            protocol.Kept: self._note_kept,
        }  # fmt: skip
        self.kept: protocol.Kept | None = None
        """What the launcher last sent about its servers."""
        self._noted: list[Change] = []
        """Changes of run-file keys, to be written with the next commit."""
        self._void_before: int | None = None
        self._ended: str | None = None
        """`reasons.ended` as last written; None: nobody knows what the run's last launch wrote."""
        self._next_end: tuple[tuple[int, int], float | None] = (-1, -1), None
        """Revision and next lease at which `Ledger.expire` was called last, and what it returned."""

    @property
    def revision(self) -> int:
        """Moves whenever something changed that a parked request may wait for."""
        return self.ledger.revision + self.peers.revision + self.groups.revision + self.rows.revision

    def answer(self, peer: Peer, number: int, message: Message, now: float) -> Message | None:
        """The answer to a request of `peer`, or None: not yet."""
        if verb := self.verbs.get(type(message)):
            return verb.answer(peer, message, now)
        if isinstance(message, protocol.Heartbeat):
            return self._heartbeat(peer, number, message, now)
        return self._at_once[type(message)](peer, message, now)

    def expire(self, now: float) -> float | None:
        """End what ends by the clock; returns when to call again."""
        ends = [self.rows.expire(now), self._expire_leases(now), self.peers.expire(now)]
        return min((end for end in ends if end is not None), default=None)

    def _expire_leases(self, now: float) -> float | None:
        """`Ledger.expire`, which looks at every server, where it may have something to do: heartbeats only put off when
        the next lease ends, and everything else moves one of two numbers."""
        ledger = self.ledger
        number, due = self._next_end
        if number != (ledger.revision, ledger.state.next_lease) or (due is not None and now >= due):
            due = ledger.expire(now)
            self._next_end = (ledger.revision, ledger.state.next_lease), due
        return due

    def changes(self) -> Transaction | None:
        """What changed since the last call, to be committed before anything else is handled; None: nothing."""
        changes = self.ledger.drain()
        if (ended := reasons.ended(self.ledger)) != self._ended:
            self._ended = changes.scalars["ended"] = ended
        if lines := reasons.newly_left_out(self.ledger):
            log.warning(lines)
        payloads = self.groups.written(changes)
        void_before, self._void_before = self._void_before, None
        noted, self._noted = tuple(self._noted), []
        return Transaction(changes, payloads, void_before, noted) if changes or noted else None

    def _fail(self, peer: Peer, fail: protocol.Fail, now: float) -> Message:
        how = fail.reason, now, fail.permanent, fail.returned, fail.failure_kind
        self.ledger.fail(peer.key, fail.item, fail.lease, *how)
        return protocol.Ack()

    def _heartbeat(self, peer: Peer, number: int, beat: protocol.Heartbeat, now: float) -> Message:
        revoked: list[int] = []
        standing: Standing = "none"
        if number >= peer.beat:
            peer.beat, peer.stats = number, beat.stats
            revoked = self.ledger.heartbeat(peer.key, beat.version, beat.holding, now)
            doing, reach = beat.evaluating, self.ledger.view.reach
            standing = self.ledger.evaluations.beat(peer.key, beat.version, doing, reach, now)
        return protocol.News(revoked=revoked, learner_waits=self.groups.learner_waiting, evaluation=standing)

    def _evaluate(self, peer: Peer, claim: protocol.Evaluate, now: float) -> Message:
        due = self.ledger.evaluations.claim(peer.key, claim.version, self.ledger.view.reach, now)
        return protocol.Due(due=due)

    def _evaluated(self, peer: Peer, made: protocol.Evaluated, now: float) -> Message:
        results = json.dumps({name: one.figures for name, one in made.sets.items()})
        try:
            samples = json.dumps({name: one.examples for name, one in made.sets.items()}, default=repr)
        except (TypeError, RecursionError) as error:  # they hold rows as a user's task may have left them
            raise ValueError(f"Evaluated of version {made.version}: its examples are no JSON: {error}") from None
        reach = self.ledger.view.reach
        refusal = self.ledger.evaluations.finish(peer.key, made.due, made.version, results, samples, reach)
        return protocol.Stored(accepted=refusal is None, reason=refusal or "")

    def _rewind(self, peer: Peer, rewind: protocol.Rewind, now: float) -> Message:
        replay = self.ledger.batches.rewind(rewind.version)
        self.groups.rewind(rewind.version, replay)
        return protocol.Rewound(replay=replay)

    def _trained(self, peer: Peer, trained: protocol.Trained, now: float) -> Message:
        if trained.oldest_kept > trained.version + 1:
            raise ValueError(f"Trained({trained.version}): no checkpoint {trained.oldest_kept} can be yet")
        self.groups.trained(self.ledger.batches.trained(trained.version))
        before = self.ledger.state.oldest
        oldest = self.ledger.batches.prune(trained.oldest_kept)
        if self._limits.keep == "checkpoints" and oldest > before:
            self._void_before = oldest
        return protocol.Ack()

    def _quarantine(self, peer: Peer, message: protocol.Quarantine, now: float) -> Message:
        self.groups.quarantine(message.item, message.reason)
        return protocol.Ack()

    def _trial(self, peer: Peer, trial: protocol.Trial, now: float) -> Message:
        self.ledger.batches.try_alone(trial.version, trial.item)
        return protocol.Ack()

    def _goodbye(self, peer: Peer, goodbye: protocol.Goodbye, now: float) -> Message:
        self.peers.forget_drained({peer.key}, now)
        return protocol.Ack()

    def _scale(self, peer: Peer, scale: protocol.Scale, now: float) -> Message:
        kept, wanted, before = self.kept, scale.servers, self.wanted_servers
        if kept is None and scale.by == "person":
            raise ValueError("no launcher keeps this run's servers: start and stop them by hand")
        bounded = kept if scale.by == "person" and wanted is not None else None
        if bounded and wanted is not None and not bounded.least <= wanted <= bounded.most:
            raise ValueError(f"{wanted} servers: the run may have {bounded.least} to {bounded.most}; {bounded.bound}")
        if self.ledger.wanted.scale(wanted, scale.by == "person"):
            to = f"{wanted or 'as the run file says'} ({scale.why or 'asked for by hand'})"
            self._noted.append(Change("rollout.servers", before, to))
        return protocol.Ack()

    @property
    def wanted_servers(self) -> int | None:
        """How many rollout servers are wanted: a person's number, else the launcher's; None while nobody has one."""
        return self.ledger.wanted.by_person or (self.kept.wanted if self.kept else None)

    def _note_kept(self, peer: Peer, kept: protocol.Kept, now: float) -> Message:
        self.kept, left = kept, {*kept.left}
        self.peers.forget_drained({key for key in self.ledger.state.servers if server_name(key) in left}, now)
        self.peers.forget_drained({one.key for one in self.peers.known.values() if one.hello.name in left}, now)
        return protocol.Ack()
