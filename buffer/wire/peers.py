"""The processes that said Hello: who is here, who took over whose name, and whose connection broke."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from buffer.ledger.rules import Ledger
from buffer.resources import OpenFiles
from buffer.wire import protocol
from buffer.wire.limits import Limits
from buffer.wire.message import MOST_RANKS
from buffer.wire.quotas import MOST_OBSERVERS, Remembered, crowded, longest_silent, renamed

log = logging.getLogger(__name__)
LOOKERS = ("launcher", "observer")
"""Several of them may have one name, and need no config of the run."""
OBSERVER_S = 60
RECONNECT_GRACE = 0.25
"""Time to come back, as a share of a lease: more than a heartbeat."""
ANONYMOUS_PREFIX = b"\0"
"""First byte of identities that ZeroMQ makes, as for a connection whose client has opened another one."""


@dataclass
class Peer:
    hello: protocol.Hello
    heard: float
    beat: int = 0
    stats: dict[str, float] = field(default_factory=dict)
    broke: float | None = None
    world: int | None = None
    hellos: int = 0

    @cached_property
    def key(self) -> str:
        return f"{self.hello.name}#{self.hello.token}"


class Peers:
    """All processes, by ZeroMQ identity in `known`."""

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger, self._limits, self.files = ledger, limits, OpenFiles()
        self.known: dict[bytes, Peer] = {}
        self.left: list[bytes] = []
        """Identities whose requests may be forgotten."""
        self.revision = 0
        """Moves when who came or went may bring an answer."""
        self.weights: str | None = None
        self._named: defaultdict[tuple[str, str], set[bytes]] = defaultdict(set)
        self._roles: Counter[str] = Counter()
        self._replaced: Remembered[str] = Remembered(MOST_RANKS)
        self._starts: defaultdict[str, int] = defaultdict(count().__next__)
        """A larger number is a newer start of the learner."""
        self.broken: dict[bytes, float] = {}
        """When the leases of a server with a broken connection end."""

    def hello(self, identity: bytes, hello: protocol.Hello, now: float) -> protocol.Welcome:
        """Let a process in, in place of an earlier one of its name.

        Raises ValueError, which shows a process of another config nothing of the run's.
        """
        self._require_of_this_run(hello)
        welcome, twins = protocol.Welcome(max_message=self._limits.max_message), self._twins(identity, hello)
        if identity.startswith(ANONYMOUS_PREFIX) and any(not twin.startswith(ANONYMOUS_PREFIX) for twin in twins):
            return welcome  # a stale message from a connection that this process has replaced
        if refusal := self._crowded(identity, hello):
            raise ValueError(refusal)
        for twin in twins:
            self._drop(twin)  # a process has one connection, and the end of an earlier one ends nothing
        self._replace(hello, now)
        if hello.role == "learner" and hello.token not in self._starts:  # all ranks end and start together
            self._starts[hello.token]
            while len(self._starts) > MOST_RANKS:
                del self._starts[next(iter(self._starts))]
            self._forget_ranks(lambda rank: rank.broke is not None)
        self.revision += self._enter(identity, hello, now) or bool(twins)
        if hello.serves:
            self.weights = hello.serves
        return welcome

    def _require_of_this_run(self, hello: protocol.Hello) -> None:
        if hello.protocol != protocol.PROTOCOL:
            raise ValueError(
                f"protocol {hello.protocol}, the buffer's is {protocol.PROTOCOL}: install the same Headrace everywhere"
            )
        if hello.role not in LOOKERS and hello.fingerprint != self._limits.fingerprint:
            raise ValueError(
                f"{hello.name} has config {hello.fingerprint[:40]}, which is not that of run {self._limits.run}: start "
                "it with the run's own config.yaml, or restart the buffer with the changed one"
            )
        if hello.token in self._replaced:
            raise ValueError(
                f"another process has taken over the name {hello.name}: stop one of the two, or rename one of them"
            )

    def _enter(self, identity: bytes, hello: protocol.Hello, now: float) -> bool:
        if known := self.known.get(identity):
            self._unname(identity, known)
        further = known.hellos + (known.hello != hello) if known else 0
        kept = (known.beat, known.stats, None, known.world, further) if known else ()
        self.known[identity] = Peer(hello, now, *kept)
        self._named[hello.name, hello.role].add(identity)
        self._roles[hello.role] += 1
        return known is None or known.hello != hello

    def _crowded(self, identity: bytes, hello: protocol.Hello) -> str:
        if known := self.known.get(identity):
            return renamed(hello.name, known.hellos) if known.hello != hello else ""
        number = self._roles[hello.role]
        if hello.role == "observer" and number >= MOST_OBSERVERS:
            heard = [(one.heard, who) for who, one in self.known.items() if one.hello.role == "observer"]
            for who in longest_silent(heard, number + 1 - MOST_OBSERVERS):
                self._drop(who)
        return crowded(hello.role, number) or self.files.refusal(hello.name)

    def on_disconnect(self, identity: bytes, now: float) -> None:
        if peer := self.known.get(identity):
            peer.broke = now
            if peer.hello.role == "rollout":
                self.broken[identity] = now + RECONNECT_GRACE * self._ledger.terms.lease_s

    def expire(self, now: float) -> float | None:
        """End the leases of servers that did not come back; returns when to call again."""
        for identity in [identity for identity, due in self.broken.items() if now >= due]:
            del self.broken[identity]
            peer = self.known.get(identity)
            if peer and peer.broke is not None:  # else it has sent something since
                log.info("%s broke its connection and did not come back: its leases end", peer.hello.name)
                self._ledger.lose(peer.key, "its server ended", now)
        return min(self.broken.values(), default=None)

    def note_world(self, peer: Peer, world: int) -> None:
        """Ranks of an earlier start with another number may be cut off."""
        peer.world, start = world, self._starts[peer.hello.token]
        self._forget_ranks(lambda rank: rank.world not in (None, world) and self._starts[rank.hello.token] < start)

    def forget_drained(self, servers: Collection[str], now: float) -> None:
        """`servers`: by the ledger's names."""
        for key in servers:
            self._ledger.leave(key, "its server was drained", now, returned=True)
        for identity in [who for who, one in self.known.items() if one.key in servers and one.hello.role == "rollout"]:
            self._drop(identity)
            self.revision += 1

    def of_role(self, role: str) -> list[Peer]:
        return [peer for peer in self.known.values() if peer.hello.role == role]

    def launcher_gone_s(self, now: float) -> float | None:
        """None while the launcher is here, or where there was none."""
        broke = [self.known[identity].broke for identity in self._named.get((protocol.LAUNCHER, "launcher"), ())]
        ended = [now - moment for moment in broke if moment is not None]
        return min(ended) if ended and len(ended) == len(broke) else None

    def _twins(self, identity: bytes, hello: protocol.Hello) -> list[bytes]:
        same = self._named.get((hello.name, hello.role), set()) - {identity}
        return [who for who in same if self.known[who].hello.token == hello.token]

    def _replace(self, hello: protocol.Hello, now: float) -> None:
        if hello.role in LOOKERS:
            gone = [
                who
                for who, one in self.known.items()
                if one.hello.role in LOOKERS and one.hello.name != protocol.LAUNCHER and now - one.heard > OBSERVER_S
            ]
        else:
            same = self._named.get((hello.name, hello.role), set())
            gone = [who for who in same if self.known[who].hello.token != hello.token]
        for identity in gone:
            peer = self._drop(identity)
            if hello.role not in LOOKERS:
                self._replaced.add(peer.hello.token)
            if peer.hello.role == "rollout":
                self._ledger.leave(peer.key, "its server was restarted", now)

    def _forget_ranks(self, ended: Callable[[Peer], bool]) -> None:
        """A rank that still lives sends Hello again and is let in."""
        for identity in [who for who, one in self.known.items() if one.hello.role == "learner" and ended(one)]:
            self._drop(identity)

    def _drop(self, identity: bytes) -> Peer:
        peer = self.known.pop(identity)
        self._unname(identity, peer)
        self.broken.pop(identity, None)
        self.left.append(identity)
        return peer

    def _unname(self, identity: bytes, peer: Peer) -> None:
        name = peer.hello.name, peer.hello.role
        self._named[name].discard(identity)
        self._roles[peer.hello.role] -= 1
        if not self._named[name]:
            del self._named[name]
