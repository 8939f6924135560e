"""All requests of the samples wire as calls on ledger and store.

A request that may have to wait has a class of its own, a verb. A wrong request raises ValueError with one line. Nothing
that was answered may be sent before the `changes` until then are committed.
"""

import json
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

from buffer.data.image_rows import ImageUnavailable
from buffer.data.images import ImageError
from buffer.ledger import reasons
from buffer.ledger.evaluations import Standing
from buffer.ledger.rules import Ledger
from buffer.ledger.types import NO_CHANGES, Transaction, server_name
from buffer.store.sqlite import Store
from buffer.wire import protocol
from buffer.wire.batches import WARN_S, ServedRows, UntrainedGroups
from buffer.wire.limits import Limits
from buffer.wire.message import Message
from buffer.wire.peers import Peer, Peers
from buffer.wire.protocol import (
    Ack,
    Ask,
    EvaluationResult,
    Finished,
    Part,
    Put,
    Results,
    Stored,
    Take,
    WeightsAddress,
    Where,
    Work,
    WorkItem,
)
from buffer.wire.sample import stats_of
from buffer.wire.values import WrongValue
from configs.resume import Change

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message, contravariant=True)
ACCEPTED = Stored(accepted=True)
HOLD_S = 2.0
"""Pause after images that could not be read."""


class AwaitedNews(NamedTuple):
    """What parked requests wait for: while one gets no answer, neither do others with the same; of Asks
    `AskVerb.admits` decides."""

    kind: str
    version: int = -1
    """The version of an Ask's server, or the batch of a Take."""
    detail: Hashable = None


class ParkableVerb(Protocol[M]):
    def answer(self, peer: Peer, request: M, now: float) -> Message | None:
        """None: try again when `revision_of` has moved."""

    def waits_for(self, peer: Peer, request: M) -> AwaitedNews:
        pass

    def why(self, peer: Peer, request: M) -> str:
        pass


class AskVerb:
    """Parked until there is an item for the server."""

    def __init__(self, ledger: Ledger, rows: ServedRows) -> None:
        self._ledger, self._rows = ledger, rows

    def answer(self, peer: Peer, ask: Ask, now: float) -> Work | Finished | None:
        ledger, rows = self._ledger, self._rows
        if rows.away:
            return None
        leases = ledger.ask(peer.key, ask.version, rows.room(ledger.upcoming, ask.room), now, ask.request)
        if not leases and ask.request not in ledger.state.servers[peer.key].answered:
            # Servers end after the learner does: a learner that is restarted before its answer needs them.
            held = ledger.state.trend.given_up and not ledger.state.trend.is_announced
            return None if held else finished(ledger)
        items, away = list[WorkItem](), None
        for lease in leases:
            try:
                problem = rows.problem(lease.index)
            except ImageUnavailable as error:
                away = error
                ledger.fail(peer.key, lease.item, lease.lease, str(error), now, returned=True, hold_s=HOLD_S)
            except ImageError as error:
                ledger.fail(peer.key, lease.item, lease.lease, f"row {lease.index}: {error}", now, kind="prompt")
            else:
                items.append(WorkItem(item=lease.item, lease=lease.lease, version=lease.version, problem=problem))
        if away:  # all images are, or a single file is broken
            rows.note_away(away, now, pause=not items and ledger.state.pool.num_held > 1)
        return Work(items=items)

    def admits(self, version: int) -> bool:
        """If an Ask of this version cannot be answered, then none of an older one can."""
        if self._ledger.view.finished():
            return True
        return not self._rows.away and self._ledger.view.admits(version) and self._rows.has_next(self._ledger.upcoming)

    def waits_for(self, peer: Peer, ask: Ask) -> AwaitedNews:
        known = self._ledger.state.servers.get(peer.key)
        return AwaitedNews("Ask", known.version if known else ask.version)

    def why(self, peer: Peer, ask: Ask) -> str:
        return self._rows.why_away or reasons.for_work(self._ledger, peer.key)

    def differs_by(self, peer: Peer) -> Hashable:
        """What sets this server's reason apart from that of others with its version."""
        running = self._ledger.evaluations.running()
        return self._ledger.state.pool.num_elsewhere(peer.key), running is not None and running.server == peer.key


class TakeVerb:
    def __init__(self, ledger: Ledger, peers: Peers, groups: UntrainedGroups, rows: ServedRows) -> None:
        self._ledger, self._peers, self._groups, self._rows = ledger, peers, groups, rows

    def answer(self, peer: Peer, take: Take, now: float) -> Part | Finished | None:
        if take.rank >= take.world:
            raise ValueError(f"Take of rank {take.rank} of {take.world}: ranks count from 0")
        if peer.world != take.world:
            self._peers.note_world(peer, take.world)
        if self._rows.away:
            return None
        batch = self._ledger.batches.take(take.version)
        if batch is None:
            return finished(self._ledger)
        try:
            return self._groups.part(take, batch, lambda: self._counts(take.version))
        except ImageUnavailable as error:
            self._rows.note_away(error, now)
            return None

    def _counts(self, version: int) -> dict[str, Any]:
        ledger, state, totals = self._ledger, self._ledger.state, self._ledger.state.totals
        serving = [peer for peer in self._peers.known.values() if peer.key in ledger.state.servers]
        counts: dict[str, Any] = {
            **{name: totals.groups(name) for name in ("failed", "dropped", "retried", "generated", "quarantined")},
            **{name: int(sum(peer.stats.get(name, 0) for peer in serving)) for name in ("running", "places")},
            "restored": state.undone.restored,
            "reached": state.undone.reached,
            "suspect": ledger.batches.suspicion.is_suspect(version),
            "problems": ledger.view.problems_by_state(),
        }
        if version == ledger.state.version - 1:  # of earlier ones nobody knows it any more
            counts |= {"flat_groups": state.trend.flat_groups, "new_groups": state.trend.new_groups}
        return counts

    def is_formed(self, version: int) -> bool:
        return version < self._ledger.state.version and not self._rows.away

    def waits_for(self, peer: Peer, take: Take) -> AwaitedNews:
        return AwaitedNews("Take", take.version, (take.world, take.share_prompts))

    def why(self, peer: Peer, take: Take) -> str:
        if self.is_formed(take.version):
            return f"batch {take.version} is formed; parts are sent one after another"
        return self._rows.why_away or reasons.for_batch(self._ledger)


class PutVerb:
    """Parked while the byte budget is full."""

    def __init__(self, ledger: Ledger, groups: UntrainedGroups, rows: ServedRows, limits: Limits) -> None:
        self._ledger, self._groups, self._rows, self._limits = ledger, groups, rows, limits
        self._unfit, self._logged_at = 0, -math.inf

    def answer(self, peer: Peer, put: Put, now: float) -> Stored | None:
        """Judges a group once, when there is room for it.

        A wrong number of samples never waits: empty ones take memory that their bytes do not show.
        """
        item, what = self._ledger.state.items.get(put.item), f"item {put.item}"
        try:
            if len(put.samples) != self._limits.samples:
                raise WrongValue(what, f"{len(put.samples)} samples, batch.samples is {self._limits.samples}")
            if self._groups.full:
                return None
            figures = stats_of(put.item, put.samples, self._limits.bounds)
            shown = max([sample.row_images for sample in figures])
            if shown and item and shown > (has := len(self._rows.images_of(item.row))):
                problem = f"a sample shows {shown} images of row {item.row}, which has {has}"
                raise WrongValue("images", problem).within(what)
        except WrongValue as error:
            return self._refused(peer, put, error, now)
        is_leased = item is not None and item.state == "leased"
        refusal = self._ledger.put(peer.key, put.item, put.lease, figures, now)
        if item and is_leased and refusal is None:  # else a repetition
            self._groups.add(put.item, put.samples, figures, item.state == "stored")
        return ACCEPTED if refusal is None else Stored(accepted=False, reason=refusal)

    def _refused(self, peer: Peer, put: Put, error: WrongValue, now: float) -> Stored:
        reason = str(error)
        self._ledger.fail(peer.key, put.item, put.lease, reason, now, kind=error.kind)
        self._unfit += 1
        if now >= self._logged_at + WARN_S:
            self._logged_at = now
            name, number = peer.hello.name, self._unfit
            log.warning("%s delivered a group that cannot be trained, %d so far: %s", name, number, reason)
        return Stored(accepted=False, reason=reason, unfit=True)

    def waits_for(self, peer: Peer, put: Put) -> AwaitedNews:
        return AwaitedNews("Put")

    def why(self, peer: Peer, put: Put) -> str:
        used, limit = self._groups.bytes_stored / 2**30, self._limits.max_bytes / 2**30
        return f"{used:.3g} GiB of untrained samples, buffer.max_gib is {limit:.3g}: the learner has to train some"


class WhereVerb:
    """Parked until there is another weights wire than the server knows."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def answer(self, peer: Peer, where: Where, now: float) -> WeightsAddress | None:
        if self._peers.weights is None or self._peers.weights == where.known:
            return None
        return WeightsAddress(address=self._peers.weights)

    def waits_for(self, peer: Peer, where: Where) -> AwaitedNews:
        return AwaitedNews("Where", detail=where.known)

    def why(self, peer: Peer, where: Where) -> str:
        weights = self._peers.weights
        return f"no learner is connected but the one at {weights}" if weights else "no learner is connected"


class ResultsVerb:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def answer(self, peer: Peer, wanted: Results, now: float) -> EvaluationResult | Ack | None:
        ledger = self._ledger
        if (found := ledger.evaluations.unknown(wanted.known)) is None:
            none_left = ledger.evaluations.over(ledger.view.reach) or ledger.view.outcome() == "failed"
            return Ack() if none_left else None
        figures, who = json.loads(found.results or "{}"), server_name(found.server)
        return EvaluationResult(due=found.due, version=found.version, server=who, figures=figures, reason=found.reason)

    def waits_for(self, peer: Peer, wanted: Results) -> AwaitedNews:
        return AwaitedNews("Results", detail=tuple(wanted.known))

    def why(self, peer: Peer, wanted: Results) -> str:
        return reasons.for_results(self._ledger)


revision_of: Callable[["Handlers"], tuple[int, ...]] = attrgetter(
    *("ledger.state.revision", "ledger.evaluations.revision", "peers.revision", "groups.revision"),
    *("rows.returns", "rows.made.num_made"),
)
"""Moves when something changed that a parked request may wait for."""


def finished(ledger: Ledger) -> Finished | None:
    """The answer once there will be no more work or batches."""
    outcome = ledger.view.outcome()
    return Finished(outcome=outcome, why=reasons.ended(ledger), last=ledger.view.reach.last) if outcome else None


class Handlers:
    def __init__(self, ledger: Ledger, store: Store, problems: Sequence[Mapping[str, Any]], limits: Limits) -> None:
        self.ledger, self.store, self._limits = ledger, store, limits
        self.peers, self.rows = Peers(ledger, limits), ServedRows(problems)
        self.groups = UntrainedGroups(ledger, store, limits, self.rows)
        self.ask = AskVerb(ledger, self.rows)
        self.take = TakeVerb(ledger, self.peers, self.groups, self.rows)
        self.verbs: dict[type[Message], ParkableVerb[Any]] = {
            protocol.Take: self.take,
            protocol.Put: PutVerb(ledger, self.groups, self.rows, limits),
            protocol.Where: WhereVerb(self.peers),
            protocol.Results: ResultsVerb(ledger),
            protocol.Ask: self.ask,
        }
        self.answers: dict[type[Message], Callable[[Peer, Any, float], Message | None]] = {
            **{kind: verb.answer for kind, verb in self.verbs.items()},
            protocol.Fail: self._fail, protocol.Rewind: self._rewind, protocol.Trained: self._trained,
            protocol.Quarantine: self._quarantine, protocol.Trial: self._trial, protocol.Evaluate: self._evaluate,
            protocol.Evaluated: self._evaluated, protocol.Goodbye: self._goodbye, protocol.Scale: self._scale,
            protocol.Kept: self._note_kept,
        }  # fmt: skip
        """By kind of request."""
        self.kept: protocol.Kept | None = None
        self._noted: list[Change] = []
        self._void_before: int | None = None
        self._ended: str | None = None

    def changes(self) -> Transaction | None:
        changes = self.ledger.drain()
        ended = reasons.ended(self.ledger) if self.ledger.view.outcome() else ""
        if ended != self._ended:
            self._ended = changes.scalars["ended"] = ended
        if self.ledger.state.rows.news:
            log.warning(reasons.newly_left_out(self.ledger))
        payloads = self.groups.written(changes)
        void_before, self._void_before = self._void_before, None
        noted, self._noted = tuple(self._noted), []
        return Transaction(changes, payloads, void_before, noted) if noted or changes != NO_CHANGES else None

    def _fail(self, peer: Peer, fail: protocol.Fail, now: float) -> Message:
        how = fail.reason, now, fail.permanent, fail.returned, fail.failure_kind
        self.ledger.fail(peer.key, fail.item, fail.lease, *how)
        return protocol.Ack()

    def heartbeat(self, peer: Peer, number: int, beat: protocol.Heartbeat, now: float) -> Message:
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
        self.groups.forget(self.ledger.batches.trained(trained.version))
        if trained.oldest_kept > (before := self.ledger.state.oldest):
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
        return self.ledger.wanted.by_person or (self.kept.wanted if self.kept else None)

    def _note_kept(self, peer: Peer, kept: protocol.Kept, now: float) -> Message:
        self.kept, left = kept, {*kept.left}
        self.peers.forget_drained({key for key in self.ledger.state.servers if server_name(key) in left}, now)
        self.peers.forget_drained({one.key for one in self.peers.known.values() if one.hello.name in left}, now)
        return protocol.Ack()
