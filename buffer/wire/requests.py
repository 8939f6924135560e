"""The pending requests: each one is taken to its answer, or parked until something changed that it may wait for.

`server.py` calls `receive` for each message, then `retry`, commits `Handlers.changes`, and only then sends `out`.
Thousands may be parked: the first of those that wait for the same speaks for all of them.
"""

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from buffer.wire import protocol, status
from buffer.wire.handlers import AwaitedNews, Handlers, revision_of
from buffer.wire.message import Frame, Message, number_of, pack, pack_frames, unpack
from buffer.wire.quotas import MOST_PENDING, MOST_PUTS
from configs.flow.capacity import COMMIT_BYTES, PARKED_BYTES

log = logging.getLogger(__name__)
ASKED_FOR_S = 10.0
"""Time to wait for a group before others are asked for."""
REPEAT_S = 10.0
Key = tuple[bytes, str | int]

VERBS: dict[str, tuple[str, ...]] = {
    "rollout": ("Hello", "Status", "Where", "Ask", "Put", "Fail", "Heartbeat", "Evaluate", "Evaluated", "Goodbye"),
    "learner": ("Hello", "Status", "Rewind", "Take", "Trained", "Quarantine", "Trial", "Results"),
    "launcher": ("Hello", "Status", "Scale", "Kept"),
    "observer": ("Hello", "Status"),
}
OWNER = {"rollout": "rollout servers", "learner": "the learner", "launcher": "the launcher and `actors scale`"}


def refusal(role: str, said: str | None, message: Message) -> str | None:
    """Why this connection may not send `message`, or None. `said`: the role of its Hello."""
    verb = type(message).__name__
    if role not in VERBS:
        return "the key of this connection is of no role that may ask anything"
    if isinstance(message, protocol.Hello):
        if message.role not in (role, "observer"):
            wanted = f"says Hello as {message.role} with the key of {role}"
            return f"{message.name} {wanted}: give it the files {message.role}.* of <run>/keys"
        if message.serves is not None and message.role != "learner":
            return f"{message.name} names a weights wire, which only the learner serves"
    elif verb not in VERBS[role] or (said is not None and verb not in VERBS[said]):
        allowed = " and ".join(OWNER[one] for one, verbs in VERBS.items() if verb in verbs)
        return f"{verb} is a request of {allowed}, and this connection is of {said or role}"
    return None


def table() -> list[str]:
    verbs = dict.fromkeys(verb for verbs in VERBS.values() for verb in verbs)
    rows = [[f" `{verb}` ", *(" yes " if verb in allowed else " " for allowed in VERBS.values())] for verb in verbs]
    head = [" request ", *(f" `{role}` " for role in VERBS)]
    return [f"|{'|'.join(row)}|" for row in (head, ["---"] * len(head), *rows)]


@dataclass
class PendingRequest:
    identity: bytes
    number: int
    message: Message
    since: float
    kind: str
    key: Key
    place: int = 0
    wait: AwaitedNews | None = None
    """None unless it is parked."""


class ParkedRequests:
    def __init__(self) -> None:
        self.by_key: dict[Key, PendingRequest] = {}
        self.by_wait: defaultdict[AwaitedNews, dict[Key, PendingRequest]] = defaultdict(dict)
        self._of: defaultdict[tuple[bytes, str], dict[Key, PendingRequest]] = defaultdict(dict)
        self._places = count()

    def add(self, request: PendingRequest, wait: AwaitedNews) -> list[PendingRequest]:
        """A request that is parked, or replaces another, keeps its place. Returns the oldest ones beyond its quota."""
        known = self.pop(request.key)
        request.place, request.wait = known.place if known else next(self._places), wait
        own = self._of[request.identity, request.kind]
        for group in self.by_key, self.by_wait[wait], own:
            group[request.key] = request
        return list(own.values())[: max(0, len(own) - MOST_PENDING.get(request.kind, len(own)))]

    def pop(self, key: Key) -> PendingRequest | None:
        if (request := self.by_key.pop(key, None)) is None:
            return None
        wait, request.wait, own = request.wait, None, (request.identity, request.kind)
        assert wait
        del self.by_wait[wait][key], self._of[own][key]
        if not self.by_wait[wait]:
            del self.by_wait[wait]
        if not self._of[own]:
            del self._of[own]
        return request

    def of(self, waits: Iterable[AwaitedNews]) -> list[tuple[AwaitedNews, PendingRequest]]:
        found = [(wait, request) for wait in waits for request in self.by_wait.get(wait, {}).values()]
        return sorted(found, key=lambda pair: pair[1].place)

    def __iter__(self) -> Iterator[PendingRequest]:
        return (request for _, request in self.of(self.by_wait))


class DelayedPuts:
    """Puts for which there is no room even to wait: their groups are dropped, and asked for later."""

    def __init__(self) -> None:
        self.requests: dict[Key, tuple[PendingRequest, int]] = {}
        """With the size of the dropped group."""
        self._number_of: Counter[bytes] = Counter()
        self.asked_for: dict[Key, tuple[float, int]] = {}
        """When, and its size."""

    def add(self, request: PendingRequest, put: protocol.Put) -> protocol.Later:
        """Raises ValueError beyond MOST_PUTS."""
        if self._number_of[request.identity] >= MOST_PUTS and request.key not in self.requests:
            raise ValueError(f"Put of item {put.item}: {MOST_PUTS:,} groups of this process wait for room already")
        request.message = protocol.Put(item=put.item, lease=put.lease, samples=[])
        self._number_of[request.identity] += request.key not in self.requests
        self.requests[request.key] = request, _size(put)
        return protocol.Later()

    def note_arrival(self, key: Key) -> None:
        self._drop(key)
        self.asked_for.pop(key, None)

    def ask_for(self, now: float) -> Iterator[PendingRequest]:
        """The Puts to be repeated now, few enough to be held if the room ends."""
        for key, (request, size) in list(self.requests.items()):
            if self.asked_for and sum(size for _, size in self.asked_for.values()) + size > PARKED_BYTES:
                return
            self._drop(key)
            self.asked_for[key] = now, size
            yield request

    def expire(self, now: float) -> float | None:
        """Give up groups that did not come; returns when to call again."""
        self.asked_for = {key: one for key, one in self.asked_for.items() if now < one[0] + ASKED_FOR_S}
        return now + ASKED_FOR_S

    def forget(self, identities: Collection[bytes]) -> None:
        for key in [key for key in self.requests if key[0] in identities]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        if self.requests.pop(key, None):
            self._number_of[key[0]] -= 1
            if not self._number_of[key[0]]:
                del self._number_of[key[0]]

    def __iter__(self) -> Iterator[PendingRequest]:
        return (request for request, _ in self.requests.values())


class PendingRequests:
    def __init__(self, handlers: Handlers, max_message: int) -> None:
        self.handlers, self.max_message = handlers, max_message
        self.errors: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}
        self._parked = ParkedRequests()
        self.parked_bytes = 0
        self.unsent_bytes = 0
        """Large answers on their way share PARKED_BYTES with the groups."""
        self._delayed = DelayedPuts()
        self._tried: tuple[int, ...] = ()
        self._postponed = False
        self.out = deque[tuple[Frame, ...]]()
        """Answers, sent once `changes` are committed."""

    def receive(self, frames: Sequence[Frame], now: float, role: str) -> None:
        """Apply one message, `[identity, frame]`. Whatever is wrong with it is answered with Refused."""
        identity, data = bytes(frames[0]), frames[-1]
        try:
            if len(frames) != 2:
                raise ValueError(f"a message is one frame, not {len(frames) - 1}")
            if len(data) > self.max_message:
                size, limit = len(data) / 2**20, self.max_message / 2**20
                raise ValueError(f"message of {size:.1f} MiB exceeds buffer.max_message_mib ({limit:g})")
            number, message = unpack(data, protocol.REQUESTS)
        except ValueError as error:
            return self._refuse(identity, number_of(data), "malformed", str(error), now)
        peer = self.handlers.peers.known.get(identity)
        if reason := refusal(role, peer.hello.role if peer else None, message):
            return self._refuse(identity, number, type(message).__name__, reason, now)
        if peer:
            peer.heard, peer.broke = now, None
        kind = type(message).__name__
        key = (identity, "Ask" if kind == "Ask" else number)  # a server has one Ask at a time
        if self._delayed.requests or self._delayed.asked_for:
            self._delayed.note_arrival(key)
        request = PendingRequest(identity, number, message, now, kind, key)
        if older := self._parked.by_key.get(key):
            request = self._replaced(older, request)
        self._try(request, now)
        if isinstance(message, protocol.Heartbeat) and peer and (ask := self._parked.by_key.get((identity, "Ask"))):
            self._park(ask)  # its server may run another version by now
        if self.handlers.peers.left:
            self._forget_left()

    def expire(self, now: float) -> float | None:
        """End what ends by the clock; returns when to call again."""
        handlers, ends = self.handlers, [self.handlers.ledger.expire(now)]
        if handlers.rows.away:
            ends.append(handlers.rows.expire(now))
        if handlers.peers.broken:
            ends.append(handlers.peers.expire(now))
        if self._delayed.asked_for:
            ends.append(self._delayed.expire(now))
        return min((end for end in ends if end is not None), default=None)

    def retry(self, now: float) -> None:
        """The oldest first, until nothing changes for the others, or as many groups are judged as a commit may have."""
        again, room, groups = self._postponed, COMMIT_BYTES, self.handlers.groups
        while again or self._tried != revision_of(self.handlers):
            again, self._tried = False, revision_of(self.handlers)
            for wait in [wait for wait in self._parked.by_wait if wait.kind != "Ask"]:
                for _, request in self._parked.of([wait]):
                    if isinstance(request.message, protocol.Put):
                        if room <= 0:
                            break
                        room -= _size(request.message)
                    self._try(request, now)
                    if request.wait is not None:
                        break  # the others wait for the same
            if asks := [wait for wait in self._parked.by_wait if wait.kind == "Ask"]:
                self._retry_asks(asks, now)
        has_puts = AwaitedNews("Put") in self._parked.by_wait
        groups.turn.postponed |= has_puts and room <= 0 and not groups.full
        if self._delayed.requests and not (groups.full or has_puts):
            for request in self._delayed.ask_for(now):
                if request.identity in self.handlers.peers.known:
                    self.out.append((request.identity, pack(request.number, protocol.Again())))
        self._postponed = groups.turn.postponed

    def _retry_asks(self, waits: Sequence[AwaitedNews], now: float) -> None:
        closed, newest = -1, max(wait.version for wait in waits)
        if not self.handlers.ask.admits(newest):
            return
        for wait, request in self._parked.of(waits):
            if wait.version <= closed:
                continue
            if self.handlers.ask.admits(wait.version):
                self._try(request, now)
            elif (closed := wait.version) == newest:
                return

    def _replaced(self, older: PendingRequest, request: PendingRequest) -> PendingRequest:
        """A repeated request keeps its place; an older Ask gets empty Work."""
        if older.number == request.number:
            return older
        assert isinstance(older.message, protocol.Ask) and isinstance(request.message, protocol.Ask)
        if older.message.request > request.message.request:
            older, request = request, older
        self.out.append((older.identity, pack(older.number, protocol.Work(items=[]))))
        return request

    def _try(self, request: PendingRequest, now: float) -> None:
        message, handlers = request.message, self.handlers
        peer = handlers.peers.known.get(request.identity)
        answer: Message | None = None
        try:
            if isinstance(message, protocol.Hello):
                answer = handlers.peers.hello(request.identity, message, now)
            elif peer is None:
                answer = protocol.NotRegistered()
            elif isinstance(message, protocol.Status):
                answer = status.state(handlers, self._waiters(now), self.errors.total(), now)
            elif isinstance(message, protocol.Heartbeat):
                answer = handlers.heartbeat(peer, request.number, message, now)
            elif isinstance(message, protocol.Put) and handlers.groups.full and not self._has_place(request, message):
                answer = self._delayed.add(request, message)
            else:
                answer = handlers.answers[type(message)](peer, message, now)
        except ValueError as error:
            self._unpark(request)
            return self._refuse(request.identity, request.number, request.kind, str(error), now)
        if answer is not None:
            self._unpark(request)
            self.out.append((request.identity, *pack_frames(request.number, answer)))
            return
        for older in self._park(request):
            self._unpark(older)

    def _park(self, request: PendingRequest) -> list[PendingRequest]:
        peer = self.handlers.peers.known[request.identity]
        if isinstance(request.message, protocol.Put) and request.wait is None:
            self.parked_bytes += _size(request.message)
        waits_for = self.handlers.verbs[type(request.message)].waits_for(peer, request.message)
        too_many = self._parked.add(request, waits_for)
        self._note_learner(request)
        return too_many

    def _has_place(self, request: PendingRequest, put: protocol.Put) -> bool:
        return request.wait is not None or self.parked_bytes + self.unsent_bytes + _size(put) <= PARKED_BYTES

    def _unpark(self, request: PendingRequest) -> None:
        if known := self._parked.pop(request.key):
            if isinstance(known.message, protocol.Put):
                self.parked_bytes -= _size(known.message)
            self._note_learner(request)

    def _note_learner(self, request: PendingRequest) -> None:
        """A Take of a batch that is not formed yet lets Puts in."""
        if isinstance(request.message, protocol.Take):
            takes, groups = [wait for wait in self._parked.by_wait if wait.kind == "Take"], self.handlers.groups
            is_waiting = any(not self.handlers.take.is_formed(wait.version) for wait in takes)
            groups.revision += is_waiting and not groups.learner_waiting
            groups.learner_waiting = is_waiting

    def _forget_left(self) -> None:
        left, self.handlers.peers.left = set(self.handlers.peers.left), []
        for request in list(self._parked) if left else ():
            if request.identity in left:
                self._unpark(request)
        self._delayed.forget(left)

    def _refuse(self, identity: bytes, number: int, what: str, reason: str, now: float) -> None:
        self.errors[what] += 1
        if now >= self._logged_at.get(what, -math.inf) + REPEAT_S:  # a flood must not fill the disk
            self._logged_at[what] = now
            log.warning("refused %s, %d since the start: %s", what, self.errors[what], reason)
        self.out.append((identity, pack(number, protocol.Refused(reason=reason))))

    def _waiters(self, now: float) -> list[protocol.Waiter]:
        """The launcher asks each second, so one reason is put in words once for thousands."""
        waiters, whys, is_finished = [], dict[Hashable, str](), self.handlers.ledger.view.finished()
        for request in (*self._parked, *self._delayed):
            peer, message = self.handlers.peers.known.get(request.identity), request.message
            if peer is None or (isinstance(message, protocol.Results) and not is_finished):
                continue  # it asks in advance and waits for nothing
            verb = self.handlers.verbs[type(message)]
            alike = verb.waits_for(peer, message), self.handlers.ask.differs_by(peer)
            why = whys.get(alike) or whys.setdefault(alike, verb.why(peer, message))
            seconds = now - request.since
            waiters.append(protocol.Waiter(who=peer.hello.name, kind=request.kind, why=why, seconds=seconds))
        return waiters


def _size(put: protocol.Put) -> int:
    return sum(map(len, put.samples))
