"""What each request means: the samples wire's messages as calls on ledger and store. Driven by `requests.py`.

`answer` returns the answer, or None: not yet, try again when `revision` has moved. A wrong request raises ValueError
with one line. Nothing returned may be sent before the `changes` until then are committed.
"""

import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple

from buffer.image_rows import IMAGES, ImageUnavailable
from buffer.images import ImageError
from buffer.ledger import reasons
from buffer.ledger.evaluations import Standing
from buffer.ledger.rules import Ledger
from buffer.ledger.types import FormedBatch, SampleStats, Transaction, server_name
from buffer.problems import READ_AHEAD, Problems
from buffer.resources import OpenFiles
from buffer.store.faults import DamagedSample
from buffer.store.segments import GroupCache
from buffer.store.sqlite import Store
from buffer.wire import protocol
from buffer.wire.bounds import MOST_RANKS
from buffer.wire.message import Message
from buffer.wire.quotas import MOST_OBSERVERS, Remembered, crowded, longest_silent, renamed
from buffer.wire.sample import stats_of
from buffer.wire.split import BatchCut
from buffer.wire.values import ANY, Bounds, WrongValue
from configs.flow.capacity import CACHE_BYTES
from configs.resume import Change

log = logging.getLogger(__name__)
AWAY_S, HOLD_S = 1.0, 2.0
"""While image files cannot be read, nothing is read for so long; and an item whose images could not be read is tried
again after so long."""
WARN_S = 10.0
"""Shortest time between two lines of the log about it."""
FREE_AT_ONCE = 8
"""Groups whose memory is freed in a turn of the event loop: megabytes each, of a batch of hundreds."""
LOOKERS = ("launcher", "observer")
"""Roles of which several processes may have one name, and which need no config of the run."""
OBSERVER_S = 60
"""A process of these roles that sends nothing for so long is forgotten."""
BACK = 0.25
"""Time to come back after a connection broke, as a share of a lease: more than a heartbeat, so a server that lives has
sent something by then. A network that fails breaks no connection before the lease ends."""
MADE = b"\0"
"""How the identities begin that ZeroMQ makes: for a client that sets none, and for a connection whose client has made
another one under the same identity, of which messages may be still unread."""


@dataclass(frozen=True)
class Limits:
    """What the answers depend on of the config."""

    run: str
    fingerprint: str
    samples: int
    max_bytes: int
    max_message: int
    keep: Literal["checkpoints", "all"]
    bounds: Bounds = ANY
    """Bounds of the values of samples."""


@dataclass
class Peer:
    """A process that said Hello."""

    hello: protocol.Hello
    heard: float
    beat: int = 0
    """Number of its latest Heartbeat; one that arrives after a later one is ignored."""
    stats: dict[str, float] = field(default_factory=dict)
    broke: float | None = None
    """When its connection broke; None: it has sent something since."""
    world: int | None = None
    """Ranks of the learner, as a rank's latest Take has them."""
    hellos: int = 0
    """Other names under which its connection has said Hello."""

    @cached_property
    def key(self) -> str:
        """Name under which the ledger knows this start of a server (`server_name` undoes it)."""
        return f"{self.hello.name}#{self.hello.token}"


class AwaitedNews(NamedTuple):
    """What parked requests wait for: those that wait for the same are parked for the same reason, and while one of them
    gets no answer, neither do the others. But of Asks with one version, `Handlers.admits` says whether any gets one."""

    kind: str
    version: int = -1
    """An Ask's: what its server runs. A Take's: the batch."""
    detail: Hashable = None


@dataclass
class LoopTurn:
    """What may be done for Takes before other messages are looked at again: a batch of gigabytes for hundreds of ranks
    must not hold up a heartbeat. Without bounds unless `server.py` sets them."""

    seconds: float = math.inf
    """For cutting batches and making parts."""
    room: float = math.inf
    """Bytes of parts that may still be handed over to be sent."""
    spent: float = 0.0
    """Seconds that were."""
    postponed: bool = False
    """A part of a formed batch has to wait for the next turn."""

    def over(self) -> bool:
        """Whether what is left has to wait; notes it."""
        self.postponed = self.postponed or self.room <= 0 or self.spent >= self.seconds
        return self.postponed

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The block's time counts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - began


class Handlers:
    """`problems` are the rows of the data set, by the number that the ledger calls `index`."""

    def __init__(self, ledger: Ledger, store: Store, problems: Sequence[Mapping[str, Any]], limits: Limits) -> None:
        self.ledger, self.store, self.problems, self.limits = ledger, store, problems, limits
        self.peers: dict[bytes, Peer] = {}
        """By ZeroMQ identity."""
        self.left: list[bytes] = []
        """Identities that are no longer among them: whatever they wait for may be forgotten."""
        self._named: defaultdict[tuple[str, str], set[bytes]] = defaultdict(set)
        """Identities by name and role."""
        self._roles: Counter[str] = Counter()
        """Number of processes by role."""
        self.learner_waiting = False
        """A Take is pending: Puts above `buffer.max_gib` are accepted until it is answered."""
        self.weights: str | None = None
        """Address of the learner's weights wire."""
        self.kept: protocol.Kept | None = None
        """The launcher's last word on its servers."""
        self._noted: list[Change] = []
        """Changes of run-file keys, to be written with the next commit."""
        self._revision = 0
        self._replaced: Remembered[str] = Remembered(MOST_RANKS)
        """Tokens of processes whose name another one has taken over."""
        self._starts: defaultdict[str, int] = defaultdict(count().__next__)
        """Learner ranks in the order in which they first said Hello, by token: those that said it later are newer."""
        self._payloads: dict[int, list[bytes]] = {}
        """Samples by item, of groups accepted since the last transaction."""
        self._cache = GroupCache(CACHE_BYTES)
        self._void_before: int | None = None
        self._bytes: dict[int, int] = store.untrained_bytes()
        self.bytes_stored = sum(self._bytes.values())
        """Bytes of the samples that are accepted and not yet trained."""
        self._ended: str | None = None
        """`reasons.ended` as last written; None: nobody knows what the run's last launch wrote."""
        self._broken: dict[bytes, float] = {}
        """By identity of a server whose connection broke: when its leases end."""
        self._away: tuple[float, str] | None = None
        """Until when no Ask or Take is answered, because image files could not be read, and what was said of one."""
        self._warned_at = self._unfit_at = -math.inf
        self.unfit = 0
        """Groups refused since the start because they cannot be trained."""
        self._next_end: tuple[tuple[int, int], float | None] = (-1, -1), None
        """Revision and next lease at which `Ledger.expire` was called last, and what it said."""
        self.turn, self.files = LoopTurn(), OpenFiles()
        self._figures: dict[int, Sequence[SampleStats]] = {}
        """By item: of the groups whose samples were opened since the start and are not yet trained."""
        self._cut: tuple[tuple[int, int, bool, tuple[int, ...]], BatchCut] | None = None
        """The batch that was cut last, by version, ranks, whether in whole groups, and items (it may lose a group)."""
        self._handlers: dict[type[Message], Callable[[Peer, Any, float], Message | None]] = {
            protocol.Where: self._where, protocol.Ask: self._ask, protocol.Put: self._put, protocol.Fail: self._fail,
            protocol.Rewind: self._rewind, protocol.Take: self._take, protocol.Trained: self._trained,
            protocol.Quarantine: self._quarantine, protocol.Trial: self._trial,
            protocol.Evaluate: self._evaluate, protocol.Evaluated: self._evaluated, protocol.Results: self._results,
            protocol.Goodbye: self._goodbye, protocol.Scale: self._scale, protocol.Kept: self._note_kept,
        }  # fmt: skip

    @property
    def revision(self) -> int:
        """Moves whenever something changed that a parked request may wait for."""
        made = self.problems.num_made if isinstance(self.problems, Problems) else 0
        return self.ledger.revision + self._revision + made

    @property
    def full(self) -> bool:
        """Whether a Put has to wait."""
        return self.bytes_stored >= self.limits.max_bytes and not self.learner_waiting

    @property
    def cached(self) -> int:
        """Bytes of samples in memory until they are trained."""
        return self._cache.bytes

    def let_go(self) -> None:
        """Free some of the memory of samples that were trained; in each turn of the event loop."""
        self._cache.free(FREE_AT_ONCE)

    def set_learner_waiting(self, waiting: bool) -> None:
        """Whether a Take is parked."""
        self._revision += waiting and not self.learner_waiting  # it lets Puts in
        self.learner_waiting = waiting

    def hello(self, identity: bytes, hello: protocol.Hello, now: float) -> protocol.Welcome:
        """Let a process in, in place of an earlier one of its name. Raises ValueError, and shows a process that has
        another config nothing of the run's."""
        limits = self.limits
        if hello.protocol != protocol.PROTOCOL:
            raise ValueError(
                f"protocol {hello.protocol}, the buffer's is {protocol.PROTOCOL}: install the same Headrace everywhere"
            )
        if hello.role not in LOOKERS and hello.fingerprint != limits.fingerprint:
            raise ValueError(
                f"{hello.name} has config {hello.fingerprint[:40]}, which is not that of run {limits.run}: start it "
                "with the run's own config.yaml, or restart the buffer with the changed one"
            )
        if hello.token in self._replaced:
            raise ValueError(
                f"another process has taken over the name {hello.name}: stop one of the two, or rename one of them"
            )
        welcome, twins = protocol.Welcome(max_message=limits.max_message), self._twins(identity, hello)
        if identity.startswith(MADE) and any(not twin.startswith(MADE) for twin in twins):
            return welcome  # a stale message from a connection that this process has replaced
        if refusal := self._crowded(identity, hello):
            raise ValueError(refusal)
        for twin in twins:
            self._drop(twin)  # a process has one connection, and the end of an earlier one ends nothing
        self._replace(hello, now)
        if hello.role == "learner" and hello.token not in self._starts:  # a new start: all ranks end and start together
            self._starts[hello.token]
            while len(self._starts) > MOST_RANKS:
                del self._starts[next(iter(self._starts))]
            self._forget_ranks(lambda rank: rank.broke is not None)
        self._revision += self._enter(identity, hello, now) or bool(twins)
        if hello.serves:
            self.weights = hello.serves
        return welcome

    def _enter(self, identity: bytes, hello: protocol.Hello, now: float) -> bool:
        """Note a process under the name that it has now; False: that was known."""
        if known := self.peers.get(identity):
            self._unname(identity, known)
        further = known.hellos + (known.hello != hello) if known else 0
        kept = (known.beat, known.stats, None, known.world, further) if known else ()
        self.peers[identity] = Peer(hello, now, *kept)
        self._named[hello.name, hello.role].add(identity)
        self._roles[hello.role] += 1
        return known is None or known.hello != hello

    def _crowded(self, identity: bytes, hello: protocol.Hello) -> str:
        """Why there is no room for this process; "" where there is. Observers make room."""
        if known := self.peers.get(identity):
            return renamed(hello.name, known.hellos) if known.hello != hello else ""
        number = self._roles[hello.role]
        if hello.role == "observer" and number >= MOST_OBSERVERS:
            heard = [(one.heard, who) for who, one in self.peers.items() if one.hello.role == "observer"]
            for who in longest_silent(heard, number + 1 - MOST_OBSERVERS):
                self._drop(who)
        return crowded(hello.role, number) or self.files.refusal(hello.name)

    def answer(self, peer: Peer, number: int, message: Message, now: float) -> Message | None:
        """The answer to a request of `peer`, or None: not yet."""
        if isinstance(message, protocol.Heartbeat):
            return self._heartbeat(peer, number, message, now)
        return self._handlers[type(message)](peer, message, now)

    def expire(self, now: float) -> float | None:
        """End what ends by the clock; returns when to call again."""
        if self._away and now >= self._away[0]:
            self._away = None
            self._revision += 1
        ends = [self._expire_leases(now), self._away and self._away[0], self._lose(now)]
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

    def heard(self, identity: bytes, now: float) -> None:
        """A message of this process has come."""
        if peer := self.peers.get(identity):
            peer.heard, peer.broke = now, None
            self._broken.pop(identity, None)

    def disconnected(self, identity: bytes, now: float) -> None:
        """The connection of this process broke."""
        if peer := self.peers.get(identity):
            peer.broke = now
            if peer.hello.role == "rollout":
                self._broken[identity] = now + BACK * self.ledger.lease_s

    def _lose(self, now: float) -> float | None:
        """End the leases of servers that did not come back in time; returns when to call again."""
        for identity in [identity for identity, due in self._broken.items() if now >= due]:
            del self._broken[identity]
            if peer := self.peers.get(identity):  # else it was replaced
                log.info("%s broke its connection and did not come back: its leases end", peer.hello.name)
                self.ledger.lose(peer.key, "its server ended", now)
        return min(self._broken.values(), default=None)

    def changes(self) -> Transaction | None:
        """What changed since the last call, to be committed before anything else is handled; None: nothing."""
        changes = self.ledger.drain()
        if (ended := reasons.ended(self.ledger)) != self._ended:
            self._ended = changes.scalars["ended"] = ended
        self._forget_samples(changes.discarded | changes.quarantined)
        if lines := reasons.newly_left_out(self.ledger):
            log.warning(lines)
        payloads = {item: self._payloads[item] for item in changes.sample_stats}  # of what was not discarded since
        void_before, self._void_before, self._payloads = self._void_before, None, {}
        noted, self._noted = tuple(self._noted), []
        return Transaction(changes, payloads, void_before, noted) if changes or noted else None

    def waits_for(self, peer: Peer, message: Message) -> AwaitedNews:
        """What a parked request of `peer` waits for."""
        kind = type(message).__name__
        if isinstance(message, protocol.Ask):
            known = self.ledger.servers.get(peer.key)
            return AwaitedNews(kind, known.version if known else message.version)
        if isinstance(message, protocol.Take):
            return AwaitedNews(kind, message.version, (message.world, message.share_prompts))
        if isinstance(message, protocol.Where):
            return AwaitedNews(kind, detail=message.known)
        return AwaitedNews(kind, detail=tuple(message.known) if isinstance(message, protocol.Results) else None)

    def admits(self, version: int) -> bool:
        """Whether an Ask of some server that runs `version` could be answered now; if not, then none of an older one
        either."""
        if self.ledger.finished():
            return True
        return not self._away and self.ledger.admits(version) and self._has_rows()

    def serves(self, version: int) -> bool:
        """Whether the batch is formed, so that a Take of it only waits for its turn."""
        return version < self.ledger.version and not self._away

    def why_parked(self, peer: Peer, message: Message) -> str:
        """What a parked request of `peer` waits for, in one line."""
        if self._away and isinstance(message, protocol.Ask | protocol.Take):
            return f"images cannot be read: {self._away[1]}"
        if isinstance(message, protocol.Take) and self.serves(message.version):
            return f"batch {message.version} is formed; parts are sent one after another"
        if isinstance(message, protocol.Take):
            return reasons.for_batch(self.ledger)
        if isinstance(message, protocol.Ask):
            return reasons.for_work(self.ledger, peer.key)
        if isinstance(message, protocol.Put):
            used, limit = self.bytes_stored / 2**30, self.limits.max_bytes / 2**30
            return f"{used:.3g} GiB of untrained samples, buffer.max_gib is {limit:.3g}: the learner has to train some"
        if isinstance(message, protocol.Results):
            return reasons.for_results(self.ledger)
        return f"no weights wire other than {self.weights}" if self.weights else "no learner has said Hello"

    def apart(self, peer: Peer) -> tuple[int, bool]:
        """What sets a server apart from the others that run its version, where it waits for work."""
        running = self.ledger.evaluations.running()
        return self.ledger.state.pool.num_elsewhere(peer.key), running is not None and running.server == peer.key

    def state(self, waiters: list[protocol.Waiter], errors: int, now: float) -> protocol.State:
        """The ledger in numbers, with the parked requests as `waiters`."""
        ledger = self.ledger
        ranks = [peer.broke for peer in self.peers.values() if peer.hello.role == "learner"]
        return protocol.State.model_construct(
            version=ledger.version,
            trained=ledger.last_trained,
            counts=ledger.counts(),
            dropped=ledger.dropped(),
            failed=ledger.failed(),
            recent_failed=dict(ledger.state.recent_failures),
            recent_groups=dict(ledger.state.recent_groups),
            retried=ledger.state.totals.groups("retried"),
            problems=ledger.problems_by_state(),
            left_out=reasons.left_out(ledger),
            ended=reasons.ended(ledger),
            lengths={name: list(lengths) for name, lengths in ledger.lengths().items()},
            ages=ledger.ages(),
            bytes_stored=self.bytes_stored,
            servers={
                peer.hello.name: self._server(peer, now) for peer in self.peers.values() if peer.hello.role == "rollout"
            },
            learner_gone_s=max((now - broke for broke in ranks if broke is not None), default=None),
            waiters=waiters,
            errors=errors,
            evaluation=reasons.evaluation(self.ledger),
            wanted_servers=self._wanted_servers(),
            wanted_by_person=bool(ledger.state.wanted_by_person),
            kept=self.kept,
            launcher_gone_s=self._launcher_gone_s(now),
        )

    def _launcher_gone_s(self, now: float) -> float | None:
        broke = [self.peers[identity].broke for identity in self._named.get((protocol.LAUNCHER, "launcher"), ())]
        ended = [now - moment for moment in broke if moment is not None]
        return min(ended) if ended and len(ended) == len(broke) else None

    def _wanted_servers(self) -> int | None:
        held = self.ledger.state.wanted_servers if self.ledger.state.wanted_by_person else None
        return held or (self.kept.wanted if self.kept else None)

    def _server(self, peer: Peer, now: float) -> dict[str, Any]:
        known = self.ledger.servers.get(peer.key)
        leases, version = (len(known.leases), known.version) if known else (0, None)
        silent_s, gone_s = now - peer.heard, None if peer.broke is None else round(now - peer.broke, 1)
        found = {"version": version, "leases": leases, "silent_s": round(silent_s, 1), "stats": peer.stats}
        return found if gone_s is None else found | {"gone_s": gone_s}

    def _twins(self, identity: bytes, hello: protocol.Hello) -> list[bytes]:
        """Other identities of the same process."""
        same = self._named.get((hello.name, hello.role), set()) - {identity}
        return [who for who in same if self.peers[who].hello.token == hello.token]

    def _replace(self, hello: protocol.Hello, now: float) -> None:
        """Forget who had this name and role before, and launchers and observers that are gone."""
        if hello.role in LOOKERS:
            gone = [
                who
                for who, one in self.peers.items()
                if one.hello.role in LOOKERS and one.hello.name != protocol.LAUNCHER and now - one.heard > OBSERVER_S
            ]
        else:
            same = self._named.get((hello.name, hello.role), set())
            gone = [who for who in same if self.peers[who].hello.token != hello.token]
        for identity in gone:
            peer = self._drop(identity)
            if hello.role not in LOOKERS:
                self._replaced.add(peer.hello.token)
            if peer.hello.role == "rollout":
                self.ledger.leave(peer.key, "its server was restarted", now)

    def _forget_ranks(self, ended: Callable[[Peer], bool]) -> None:
        """Forget ranks of an earlier start of the learner; a rank that still lives sends Hello again and is let in."""
        for identity in [who for who, one in self.peers.items() if one.hello.role == "learner" and ended(one)]:
            self._drop(identity)

    def _drop(self, identity: bytes) -> Peer:
        """Forget a process."""
        peer = self.peers.pop(identity)
        self._unname(identity, peer)
        self._broken.pop(identity, None)
        self.left.append(identity)
        return peer

    def _unname(self, identity: bytes, peer: Peer) -> None:
        name = peer.hello.name, peer.hello.role
        self._named[name].discard(identity)
        self._roles[peer.hello.role] -= 1
        if not self._named[name]:
            del self._named[name]

    def _where(self, peer: Peer, where: protocol.Where, now: float) -> Message | None:
        if self.weights is None or self.weights == where.known:
            return None
        return protocol.WeightsAddress(address=self.weights)

    def _room(self, ask: protocol.Ask) -> int:
        """How many rows may be dispatched: where rows have to be made, an Ask waits for them, and the buffer does not.
        The next ones are made meanwhile."""
        if not isinstance(self.problems, Problems):
            return ask.room
        self.problems.expect(lambda: self.ledger.upcoming(READ_AHEAD))
        ready = self.problems.num_ready(lambda: self.ledger.upcoming(ask.room))
        return ask.room if ready is None else min(ask.room, ready)

    def _has_rows(self) -> bool:
        """Whether the next row is ready. If it is not, no Ask gets a row."""
        return not isinstance(self.problems, Problems) or self.problems.num_ready(lambda: self.ledger.upcoming(1)) != 0

    def _ask(self, peer: Peer, ask: protocol.Ask, now: float) -> Message | None:
        if self._away:
            return None
        leases = self.ledger.ask(peer.key, ask.version, self._room(ask), now, ask.request)
        if not leases and not self.ledger.answered(peer.key, ask.request):
            # Servers end after the learner does: a learner that is restarted before its answer needs them.
            held = self.ledger.state.given_up and not self.ledger.state.told
            return None if held else self._finished()
        items, away = [], None
        for it in leases:
            problem = dict(self.problems[it.index])
            try:
                problem |= {IMAGES: list(problem[IMAGES])} if problem.get(IMAGES) else {}
            except ImageUnavailable as error:
                away = error
                self.ledger.fail(peer.key, it.item, it.lease, str(error), now, returned=True, hold_s=HOLD_S)
            except ImageError as error:
                self.ledger.fail(peer.key, it.item, it.lease, f"row {it.index}: {error}", now, kind="prompt")
            else:
                items.append(protocol.WorkItem(item=it.item, lease=it.lease, version=it.version, problem=problem))
        if away:
            self._warn(away, now)
            if not items and self.ledger.state.pool.num_held > 1:  # all of them, not a single broken file
                self._away = now + AWAY_S, str(away)
        return protocol.Work(items=items)

    def _warn(self, away: ImageUnavailable, now: float) -> None:
        if now >= self._warned_at + WARN_S:
            self._warned_at = now
            log.warning("images cannot be read now, and are tried again: %s", away)

    def _put(self, peer: Peer, put: protocol.Put, now: float) -> Message | None:
        try:
            stats = self._judged(put)
        except WrongValue as error:
            return self._unfit(peer, put, error, now)
        if self.full:
            return None
        leased = self.ledger.state_of(put.item) == "leased"
        refusal = self.ledger.put(peer.key, put.item, put.lease, stats, now)
        if leased and refusal is None:  # else it is a repetition
            self._payloads[put.item] = put.samples
            if self.ledger.state_of(put.item) == "stored":  # else a filter left it out
                self._cache.add(put.item, list(zip(put.samples, stats, strict=True)))
                self._figures[put.item] = stats
                self._bytes[put.item] = sum(map(len, put.samples))
                self.bytes_stored += self._bytes[put.item]
        return protocol.Stored(accepted=refusal is None, reason=refusal or "")

    def _judged(self, put: protocol.Put) -> Sequence[SampleStats]:
        """Statistics of its samples. Raises WrongValue if they cannot be trained."""
        if len(put.samples) != self.limits.samples:
            what = f"{len(put.samples)} samples, batch.samples is {self.limits.samples}"
            raise WrongValue(f"item {put.item}", what)
        stats = put.figures(self.limits.bounds)
        shown, known = max(sample.row_images for sample in stats), self.ledger.items.get(put.item)
        if shown and known and shown > (has := len(self._images_of(known.row))):
            what = f"a sample shows {shown} images of row {known.row}, which has {has}"
            raise WrongValue("images", what).within(f"item {put.item}")
        return stats

    def _unfit(self, peer: Peer, put: protocol.Put, error: WrongValue, now: float) -> protocol.Stored:
        """The attempt has failed, if the lease is the server's; the server goes on."""
        reason = str(error)
        self.ledger.fail(peer.key, put.item, put.lease, reason, now, kind=error.kind)
        self.unfit += 1
        if now >= self._unfit_at + WARN_S:
            self._unfit_at = now
            log.warning(
                "%s delivered a group that cannot be trained, %d so far: %s", peer.hello.name, self.unfit, reason
            )
        return protocol.Stored(accepted=False, reason=reason, unfit=True)

    def _quarantine(self, peer: Peer, message: protocol.Quarantine, now: float) -> Message:
        self.quarantine(message.item, message.reason)
        return protocol.Ack()

    def quarantine(self, item: int, reason: str) -> None:
        """Put a group into quarantine, and write so to the log."""
        row = self.ledger.items[item].row if item in self.ledger.items else None
        if self.ledger.quarantine(item, " ".join(reason.split())):
            log.error("item %d (row %s) is in quarantine and is not trained: %s", item, row, reason)

    def _trial(self, peer: Peer, trial: protocol.Trial, now: float) -> Message:
        self.ledger.try_alone(trial.version, trial.item)
        return protocol.Ack()

    def _fail(self, peer: Peer, fail: protocol.Fail, now: float) -> Message:
        self.ledger.fail(
            peer.key, fail.item, fail.lease, fail.reason, now, fail.permanent, fail.returned, fail.failure_kind
        )
        return protocol.Ack()

    def _heartbeat(self, peer: Peer, number: int, beat: protocol.Heartbeat, now: float) -> Message:
        revoked: list[int] = []
        standing: Standing = "none"
        if number >= peer.beat:
            peer.beat, peer.stats = number, beat.stats
            revoked = self.ledger.heartbeat(peer.key, beat.version, beat.holding, now)
            doing, reach = beat.evaluating, self.ledger.reach
            standing = self.ledger.evaluations.beat(peer.key, beat.version, doing, reach, now)
        return protocol.News(revoked=revoked, learner_waits=self.learner_waiting, evaluation=standing)

    def _evaluate(self, peer: Peer, claim: protocol.Evaluate, now: float) -> Message:
        due = self.ledger.evaluations.claim(peer.key, claim.version, self.ledger.reach, now)
        return protocol.Due(due=due)

    def _evaluated(self, peer: Peer, made: protocol.Evaluated, now: float) -> Message:
        results = json.dumps({name: one.figures for name, one in made.sets.items()})
        try:
            samples = json.dumps({name: one.examples for name, one in made.sets.items()}, default=repr)
        except (TypeError, RecursionError) as error:  # they hold rows as a user's task may have left them
            raise ValueError(f"Evaluated of version {made.version}: its examples are no JSON: {error}") from None
        reach = self.ledger.reach
        refusal = self.ledger.evaluations.finish(peer.key, made.due, made.version, results, samples, reach)
        return protocol.Stored(accepted=refusal is None, reason=refusal or "")

    def _results(self, peer: Peer, wanted: protocol.Results, now: float) -> Message | None:
        evaluations = self.ledger.evaluations
        if (found := evaluations.unknown(wanted.known)) is None:
            none_left = evaluations.over(self.ledger.reach) or self.ledger.outcome() == "failed"
            return protocol.Ack() if none_left else None
        figures = json.loads(found.results or "{}")
        who, why = server_name(found.server), found.reason
        return protocol.EvaluationResult(due=found.due, version=found.version, server=who, figures=figures, reason=why)

    def _scale(self, peer: Peer, scale: protocol.Scale, now: float) -> Message:
        kept, wanted, before = self.kept, scale.servers, self._wanted_servers()
        if kept is None and scale.by == "person":
            raise ValueError("no launcher keeps this run's servers: start and stop them by hand")
        bounded = kept if scale.by == "person" and wanted is not None else None
        if bounded and wanted is not None and not bounded.least <= wanted <= bounded.most:
            raise ValueError(f"{wanted} servers: the run may have {bounded.least} to {bounded.most}; {bounded.bound}")
        if self.ledger.scale(wanted, scale.by == "person"):
            to = f"{wanted or 'as the run file says'} ({scale.why or 'asked for by hand'})"
            self._noted.append(Change("rollout.servers", before, to))
        return protocol.Ack()

    def _note_kept(self, peer: Peer, kept: protocol.Kept, now: float) -> Message:
        self.kept, left = kept, {*kept.left}
        self._forget({key for key in self.ledger.servers if server_name(key) in left}, now)
        self._forget({one.key for one in self.peers.values() if one.hello.name in left}, now)
        return protocol.Ack()

    def _goodbye(self, peer: Peer, goodbye: protocol.Goodbye, now: float) -> Message:
        self._forget({peer.key}, now)
        return protocol.Ack()

    def _forget(self, servers: set[str], now: float) -> None:
        """These rollout servers were drained and are gone; requests of theirs that are parked go with them."""
        for key in servers:
            self.ledger.leave(key, "its server was drained", now, returned=True)
        for identity in [who for who, one in self.peers.items() if one.key in servers and one.hello.role == "rollout"]:
            self._drop(identity)
            self._revision += 1

    def _rewind(self, peer: Peer, rewind: protocol.Rewind, now: float) -> Message:
        replay = self.ledger.rewind(rewind.version)
        self._cut = None  # its batch was undone
        if replay:  # trained batches are untrained again
            self._bytes |= self.store.bytes_batched_since(rewind.version)
            self.bytes_stored = sum(self._bytes.values())
        return protocol.Rewound(replay=replay)

    def _take(self, peer: Peer, take: protocol.Take, now: float) -> Message | None:
        if take.rank >= take.world:
            raise ValueError(f"Take of rank {take.rank} of {take.world}: ranks count from 0")
        if peer.world != take.world:  # the ranks of an earlier start with another number of them may have been cut off
            peer.world, start = take.world, self._starts[peer.hello.token]
            self._forget_ranks(
                lambda rank: rank.world not in (None, take.world) and self._starts[rank.hello.token] < start
            )
        if self._away:
            return None
        batch = self.ledger.take(take.version)
        if batch is None:
            return self._finished()
        try:
            return self._sound_part(take, batch, now)
        except DamagedSample as damage:
            self._leave_out(damage, take)
            return None  # the Take is tried again at once, because the ledger changed

    def _sound_part(self, take: protocol.Take, batch: FormedBatch, now: float) -> protocol.Part | None:
        """`_part`, once all groups of the batch are opened. Raises DamagedSample."""
        key = take.version, take.world, take.share_prompts, batch.items
        if (self._cut is None or self._cut[0] != key) and not self._opened(batch):
            return None
        with self.turn.counted():
            return self._part(take, batch, now)

    def _leave_out(self, damage: DamagedSample, take: protocol.Take) -> None:
        """Put a damaged group into quarantine: its batch is served without it. Ranks that have a part of the batch with
        that group take it again before they train (`learner/sound.py`)."""
        if self.ledger.quarantine(damage.item, damage.reason):
            where = f"item {damage.item} is put into quarantine, batch {take.version} is served without it"
            log.error("%s: %s", where, damage)
        self._cut = None
        self._forget_samples([damage.item])

    def _part(self, take: protocol.Take, batch: FormedBatch, now: float) -> protocol.Part | None:
        """The part of a rank; None: not in this turn, or not while images are away. A batch is cut once for all."""
        key = take.version, take.world, take.share_prompts, batch.items
        if self.turn.over():
            return None
        if self._cut is None or self._cut[0] != key:
            groups = [(item, d, self._figures[item]) for item, d in zip(batch.items, batch.dispatched, strict=True)]
            counts: dict[str, Any] = {**self._counts(), "suspect": self.ledger.suspect(take.version)}
            counts["problems"] = self.ledger.problems_by_state()
            if take.version == self.ledger.version - 1:  # of earlier ones nobody knows it any more
                counts |= {"flat_groups": self.ledger.state.flat_groups, "new_groups": self.ledger.state.new_groups}
            self._cut = key, BatchCut(take.version, take.world, groups, counts, take.share_prompts)
            if take.version <= self.ledger.last_trained:  # no Trained will follow that would forget them
                for item in batch.items:
                    self._figures.pop(item, None)
        if self.turn.over():
            return None
        try:
            part = self._cut[1].part(take.rank, self._fetch, self._row_images)
        except ImageUnavailable as error:
            self._warn(error, now)
            self._away = now + AWAY_S, str(error)
            return None
        self.turn.room -= part.size_hint()
        return part

    def _counts(self) -> dict[str, int]:
        """What a part says of the run, as of the moment at which its batch was cut."""
        totals = self.ledger.state.totals
        counts = {name: totals.groups(name) for name in ("failed", "dropped", "retried", "generated", "quarantined")}
        serving = [peer for peer in self.peers.values() if peer.key in self.ledger.servers]
        counts |= {"restored": self.ledger.state.restored, "reached": self.ledger.state.reached}
        return counts | {name: int(sum(peer.stats.get(name, 0) for peer in serving)) for name in ("running", "places")}

    def _opened(self, batch: FormedBatch) -> bool:
        """Have the figures of all its groups: those from before a restart are read from their samples, as many as the
        turn allows. False: not all yet, or one went into quarantine, so that the batch is another one."""
        for item in batch.items:
            if item not in self._figures:
                if self.turn.over():
                    return False
                with self.turn.counted():
                    try:
                        self._figures[item] = stats_of(item, self.store.group(item), self.limits.bounds)
                    except WrongValue as error:
                        self.quarantine(item, str(error))
                        return False
        return True

    def _fetch(self, item: int, indexes: Sequence[int]) -> list[bytes]:
        """Samples of a group, by their places in it."""
        held = self._payloads.get(item)
        if held is None and (known := self._cache.get(item)):
            held = [data for data, _ in known]
        return self.store.samples(item, indexes) if held is None else [held[index] for index in indexes]

    def _images_of(self, row: int) -> Sequence[bytes]:
        """The images of a row. Does not generate the row."""
        if isinstance(self.problems, Problems):
            return (self.problems.images and self.problems.images.of(row)) or ()
        files: Sequence[bytes] = self.problems[row].get(IMAGES, ())
        return files

    def _row_images(self, item: int) -> protocol.RowImages | None:
        """Raises ImageUnavailable, and ImageError for one that is gone or another since its item was dispatched: the
        batch waits for it."""
        row = self.ledger.items[item].row
        try:
            files = list(self._images_of(row))
        except ImageUnavailable:
            raise
        except ImageError as error:
            raise ImageError(f"item {item}, row {row}: {error}, and start the learner again") from None
        return protocol.RowImages(item=item, images=files) if files else None

    def _finished(self) -> protocol.Finished | None:
        """The answer to a request that waits for work or for a batch, once there will be none."""
        outcome = self.ledger.outcome()
        why, last = reasons.ended(self.ledger), self.ledger.reach.last
        return protocol.Finished(outcome=outcome, why=why, last=last) if outcome else None

    def _trained(self, peer: Peer, trained: protocol.Trained, now: float) -> Message:
        if trained.oldest_kept > trained.version + 1:
            raise ValueError(f"Trained({trained.version}): no checkpoint {trained.oldest_kept} can be yet")
        self._forget_samples(self.ledger.trained(trained.version))
        before = self.ledger.oldest
        oldest = self.ledger.prune(trained.oldest_kept)
        if self.limits.keep == "checkpoints" and oldest > before:
            self._void_before = oldest
        if self._cut and self._cut[0][0] <= self.ledger.last_trained:  # a rank may have taken the next batch by now
            self._cut = None
        return protocol.Ack()

    def _forget_samples(self, items: Collection[int]) -> None:
        """Stop counting the bytes of these items: their samples are trained or void."""
        self._cache.release(items)
        for item in items:
            self._figures.pop(item, None)
            self.bytes_stored -= self._bytes.pop(item, 0)
