"""What each request means: the samples wire's verbs as calls on ledger and store. Driven by `buffer/wire/requests.py`.

`answer` returns the answer, or None: not yet, ask again once `stirred`. Whoever asks wrongly gets a ValueError in one
line. Nothing returned may be sent before the `changes` until then are written.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from buffer.ledger.rules import Ledger
from buffer.ledger.types import Transaction
from buffer.store.cache import Group, Recent
from buffer.store.sqlite import Store
from buffer.wire.protocol import (
    PROTOCOL,
    Ack,
    Ask,
    Fail,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Part,
    Put,
    Revoked,
    Rewind,
    Rewound,
    State,
    Stored,
    Take,
    Trained,
    Waiter,
    WeightsAddress,
    Welcome,
    Where,
    Work,
    WorkItem,
)
from buffer.wire.sample import sample_stats
from buffer.wire.split import parts

RECENT_BYTES = 256 * 2**20
"""Of samples that stay at hand until they are trained; others are read back from the store."""


@dataclass(frozen=True)
class Limits:
    """What the answers depend on of the config."""

    run: str
    fingerprint: str
    samples: int
    max_bytes: int
    max_message: int
    keep: Literal["checkpoints", "all"]


@dataclass
class Peer:
    """A process that said Hello."""

    hello: Hello
    heard: float
    beat: int = 0
    """Number of its latest Heartbeat; one that arrives after a later one is not believed."""
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name under which the ledger knows this start of a server."""
        return f"{self.hello.name}#{self.hello.token}"


class Handlers:
    """`problems` are the rows of the data set, by the number that the ledger calls `index`."""

    def __init__(self, ledger: Ledger, store: Store, problems: Sequence[Mapping[str, Any]], rules: Limits) -> None:
        self.ledger, self.store, self.problems, self.rules = ledger, store, problems, rules
        self.peers: dict[bytes, Peer] = {}
        self.stirred = False
        """Something changed that parked requests may have waited for."""
        self.hungry = False
        """A learner waits for a batch: groups are taken in beyond `max_bytes` until it is served."""
        self.weights: str | None = None
        """The learner's weights wire."""
        self._token = uuid.uuid4().hex
        self._replaced: set[str] = set()
        self._payloads: dict[int, list[bytes]] = {}
        """Samples by item, of groups accepted since the last transaction."""
        self._recent = Recent(RECENT_BYTES)
        self._void: set[int] = set()
        self.bytes_stored = 0
        """Of samples accepted and not yet trained."""
        self._bytes: dict[int, int] = store.sizes()
        self._untrain()
        self._cut: tuple[tuple[int, int], list[Part]] | None = None
        self._verbs: dict[type[Message], Callable[[Peer, Any, float], Message | None]] = {
            Where: self._where, Ask: self._ask, Put: self._put, Fail: self._fail, Rewind: self._rewind,
            Take: self._take, Trained: self._trained,
        }  # fmt: skip

    def hello(self, identity: bytes, hello: Hello, now: float) -> Welcome:
        """Let a process in, in place of an earlier one of its name. Raises ValueError with both values that differ."""
        rules = self.rules
        if hello.protocol != PROTOCOL:
            raise ValueError(
                f"protocol {hello.protocol}, the buffer's is {PROTOCOL}: install the same Headrace everywhere"
            )
        if hello.role != "observer" and hello.fingerprint != rules.fingerprint:
            raise ValueError(
                f"{hello.name} has config {hello.fingerprint}, run {rules.run} {rules.fingerprint}: start it with the "
                "run's own config.yaml, or restart the buffer with the changed one"
            )
        if hello.token in self._replaced:
            raise ValueError(
                f"another process has taken over the name {hello.name}: stop one of the two, or name it anew"
            )
        self._replace(hello, now)
        known = self.peers.get(identity)
        self.peers[identity] = Peer(hello, now, known.beat if known else 0, known.stats if known else {})
        if hello.serves:
            self.weights = hello.serves
        self.stirred = True
        return Welcome(run=rules.run, token=self._token, max_message=rules.max_message)

    def answer(self, peer: Peer, number: int, message: Message, now: float) -> Message | None:
        """The answer to a request of `peer`, or None: not yet."""
        claimed = getattr(message, "server", None)
        if claimed not in (None, peer.hello.name):
            raise ValueError(f"a message of server {claimed[:40]!r} came from {peer.hello.name!r}")
        if isinstance(message, Heartbeat):
            return self._heartbeat(peer, number, message, now)
        return self._verbs[type(message)](peer, message, now)

    def expire(self, now: float) -> float | None:
        """End the leases of servers silent for too long; returns when to call again."""
        num_open = self.ledger.book.pool.num_open
        deadline = self.ledger.expire(now)
        self.stirred |= num_open != self.ledger.book.pool.num_open
        return deadline

    def changes(self) -> Transaction | None:
        """What changed since the last call, to be written before anything else is asked; None: nothing."""
        changes = self.ledger.drain()
        payloads = {item: self._payloads[item] for item in changes.facts}  # of what was not discarded since
        void, self._void, self._payloads = self._void, set(), {}
        return Transaction(changes, payloads, void) if changes or void else None

    def why(self, peer: Peer, message: Message) -> str:
        """What a parked request of `peer` waits for."""
        if isinstance(message, Take):
            return self.ledger.waiting_reason()
        if isinstance(message, Ask):
            return self.ledger.dispatch_reason(peer.key)
        if isinstance(message, Put):
            used, limit = self.bytes_stored / 2**30, self.rules.max_bytes / 2**30
            return f"{used:.3g} GiB of untrained samples, buffer.max_gib is {limit:.3g}: the learner has to train some"
        return f"no weights wire other than {self.weights}" if self.weights else "no learner has said Hello"

    def state(self, waiters: list[Waiter], errors: int, now: float) -> State:
        """The ledger in numbers, with the parked requests as `waiters`."""
        return State(
            version=self.ledger.version,
            trained=self.ledger.last_trained,
            counts=self.ledger.counts(),
            dropped=self.ledger.dropped(),
            ages=self.ledger.ages(),
            bytes_stored=self.bytes_stored,
            servers={
                peer.hello.name: self._server(peer, now) for peer in self.peers.values() if peer.hello.role == "rollout"
            },
            waiters=waiters,
            errors=errors,
        )

    def _server(self, peer: Peer, now: float) -> dict[str, Any]:
        known = self.ledger.book.servers.get(peer.key)
        leases, version = (len(known.leases), known.version) if known else (0, None)
        return {"version": version, "leases": leases, "silent_s": round(now - peer.heard, 1), "stats": peer.stats}

    def _replace(self, hello: Hello, now: float) -> None:
        for identity, peer in list(self.peers.items()):
            same = (peer.hello.name, peer.hello.role) == (hello.name, hello.role)
            if hello.role == "observer":
                if peer.hello.role == "observer" and now - peer.heard > 60:
                    del self.peers[identity]
            elif same and peer.hello.token != hello.token:
                del self.peers[identity]
                self._replaced.add(peer.hello.token)
                if peer.hello.role == "rollout":
                    self.ledger.leave(peer.key, f"{peer.hello.name} was restarted", now)

    def _where(self, peer: Peer, where: Where, now: float) -> Message | None:
        return WeightsAddress(address=self.weights) if self.weights and self.weights != where.known else None

    def _ask(self, peer: Peer, ask: Ask, now: float) -> Message | None:
        leased = self.ledger.ask(peer.key, ask.version, ask.room, now, ask.request)
        if not leased and ask.request not in self.ledger.book.servers[peer.key].answered:
            return Finished() if self.ledger.finished() else None
        return Work(
            items=[
                WorkItem(item=it.item, lease=it.lease, version=it.version, problem=dict(self.problems[it.index]))
                for it in leased
            ]
        )

    def _put(self, peer: Peer, put: Put, now: float) -> Message | None:
        if len(put.samples) != self.rules.samples:
            raise ValueError(
                f"Put of item {put.item}: {len(put.samples)} samples, batch.samples is {self.rules.samples}"
            )
        facts = [sample_stats(data) for data in put.samples]
        if self.bytes_stored >= self.rules.max_bytes and not self.hungry:
            return None
        entry = self.ledger.book.entries.get(put.item)
        fresh = entry is not None and entry.state == "leased"
        refusal = self.ledger.put(peer.key, put.item, put.lease, facts, now)
        if entry and fresh and refusal is None:
            self._payloads[put.item] = put.samples
            self._recent.add(put.item, list(zip(put.samples, facts, strict=True)))
            if entry.state == "stored":  # else a filter left it out
                self._bytes[put.item] = sum(map(len, put.samples))
                self.bytes_stored += self._bytes[put.item]
        self.stirred |= entry is not None and fresh and entry.state != "leased"
        return Stored(accepted=refusal is None, reason=refusal or "")

    def _fail(self, peer: Peer, fail: Fail, now: float) -> Message:
        self.ledger.fail(peer.key, fail.item, fail.lease, fail.reason, now, fail.permanent, fail.returned)
        self.stirred = True
        return Ack()

    def _heartbeat(self, peer: Peer, number: int, beat: Heartbeat, now: float) -> Message:
        if number < peer.beat:
            return Revoked(revoked=[])
        peer.beat, peer.stats = number, beat.stats
        server = self.ledger.book.servers.get(peer.key)
        before = server and (server.version, len(server.leases), now < server.heard + self.ledger.lease_s)
        revoked = self.ledger.heartbeat(peer.key, beat.version, beat.holding, now)
        server = self.ledger.book.servers[peer.key]
        self.stirred |= before != (server.version, len(server.leases), True)
        return Revoked(revoked=revoked)

    def _rewind(self, peer: Peer, rewind: Rewind, now: float) -> Message:
        replay = self.ledger.rewind(rewind.version)
        self.stirred = True
        return Rewound(version=rewind.version, replay=replay)

    def _take(self, peer: Peer, take: Take, now: float) -> Message | None:
        if take.rank >= take.world:
            raise ValueError(f"Take of rank {take.rank} of {take.world}: ranks count from 0")
        formed = self.ledger.version
        batch = self.ledger.take(take.version)
        if batch is None:
            return Finished() if self.ledger.finished() else None
        self.stirred |= self.ledger.version != formed
        key = take.version, take.world
        if self._cut is None or self._cut[0] != key:
            groups = [(item, d, self._group(item)) for item, d in zip(batch.items, batch.dispatched, strict=True)]
            self._cut = key, parts(*key, groups)
        return self._cut[1][take.rank]

    def _group(self, item: int) -> Group:
        if known := self._recent.get(item):
            return known
        if item in self._payloads:
            return [(data, sample_stats(data)) for data in self._payloads[item]]
        return self.store.group(item)

    def _trained(self, peer: Peer, trained: Trained, now: float) -> Message:
        if trained.oldest_kept > trained.version + 1:
            raise ValueError(f"Trained({trained.version}): no checkpoint {trained.oldest_kept} can be yet")
        self.ledger.trained(trained.version)
        pruned = self.ledger.prune(trained.oldest_kept)
        if self.rules.keep == "checkpoints":
            self._void.update(pruned)
        self._cut = None
        self._untrain()
        self.stirred = True
        return Ack()

    def _untrain(self) -> None:
        """Count the bytes of what is yet to be trained only."""
        entries, last = self.ledger.book.entries, self.ledger.last_trained
        waiting = {item for item, entry in entries.items() if entry.state == "stored" or entry.batch > last}
        self._bytes = {item: size for item, size in self._bytes.items() if item in waiting}
        self._recent.keep(waiting)
        self.bytes_stored = sum(self._bytes.values())
