"""The desk: takes each request to its answer, parks those that have none yet, commits before it answers.

No sockets; driven by `buffer/wire/server.py`: `receive` applies one message, `settle` tries parked requests again if
something changed that they may have waited for, `changes` is what is to be written then, `answers` what is to be sent
only after that. What a request means is in `buffer/wire/handlers.py`; who waits here for what, and why, is `State.waiters`.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from buffer.ledger.types import Transaction
from buffer.wire.handlers import Handlers, Peer
from buffer.wire.protocol import (
    REQUESTS,
    Ask,
    Frame,
    Hello,
    Message,
    NotRegistered,
    Refused,
    State,
    Status,
    Take,
    Waiter,
    Work,
    number_of,
    pack,
    unpack,
)

log = logging.getLogger(__name__)


@dataclass
class PendingRequest:
    """A request without an answer yet, and whom to give it to."""

    identity: bytes
    number: int
    message: Message
    since: float

    @property
    def kind(self) -> str:
        return type(self.message).__name__

    @property
    def key(self) -> tuple[bytes, str | int]:
        """A server has one Ask at a time; everything else is told apart by its number."""
        return self.identity, "Ask" if isinstance(self.message, Ask) else self.number


class PendingRequests:
    """One per buffer."""

    def __init__(self, answers: Handlers, max_message: int) -> None:
        self.means, self.max_message = answers, max_message
        self.errors: Counter[str] = Counter()
        """Refused messages since the start, by kind; `malformed` for what was none."""
        self._parked: dict[tuple[bytes, str | int], PendingRequest] = {}
        self._out: list[tuple[bytes, Frame]] = []

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """Apply one message, `[identity, frame]`. Whatever is wrong with it is answered with Refused, and counted."""
        identity, data = bytes(frames[0]), frames[-1]
        try:
            self._check(frames)
            number, message = unpack(data, REQUESTS)
        except ValueError as error:
            self._refuse(identity, number_of(data), "malformed", str(error))
            return
        parked = PendingRequest(identity, number, message, now)
        if isinstance(message, Hello):
            self._hello(parked, message, now)
        elif peer := self.means.peers.get(identity):
            peer.heard = now
            self._try(self._renew(parked), peer, now)
        else:
            self._answer(parked, NotRegistered())

    def expire(self, now: float) -> float | None:
        """End the leases of servers silent for too long; returns when to call again."""
        return self.means.expire(now)

    def settle(self, now: float) -> None:
        """Try the parked requests, oldest first, until none changes anything for the others."""
        while self.means.stirred:
            self.means.stirred = False
            for parked in list(self._parked.values()):
                if peer := self.means.peers.get(parked.identity):
                    self._try(parked, peer, now)
                else:
                    self._unpark(parked)  # its process was replaced

    def changes(self) -> Transaction | None:
        """What changed since the last call; None: nothing. To be committed before `answers` are sent."""
        return self.means.changes()

    def commit(self, transaction: Transaction) -> None:
        """Write it: all of it or, with sqlite3.Error or OSError raised, nothing."""
        self.means.store.commit(transaction.changes, transaction.payloads, transaction.void)

    def answers(self) -> list[tuple[bytes, Frame]]:
        """(identity, frame), to be sent once the `changes` taken with them are written."""
        out, self._out = self._out, []
        return out

    def _check(self, frames: Sequence[Frame]) -> None:
        if len(frames) != 2:
            raise ValueError(f"a message is one frame, not {len(frames) - 1}")
        if len(frames[1]) > self.max_message:
            limit = self.max_message / 2**20
            raise ValueError(f"message of {len(frames[1]) / 2**20:.1f} MiB exceeds buffer.max_message_mib ({limit:g})")

    def _hello(self, parked: PendingRequest, hello: Hello, now: float) -> None:
        try:
            self._answer(parked, self.means.hello(parked.identity, hello, now))
        except ValueError as error:
            self._refuse(parked.identity, parked.number, "Hello", str(error))

    def _renew(self, parked: PendingRequest) -> PendingRequest:
        """A repeated request keeps its place; a newer Ask takes the place of the older one, which ends empty-handed."""
        before = self._parked.get(parked.key)
        if before is None:
            return parked
        if before.number == parked.number:
            return before
        assert isinstance(before.message, Ask) and isinstance(parked.message, Ask)
        if before.message.request > parked.message.request:
            before, parked = parked, before
        self._answer(before, Work(items=[]))
        return parked

    def _try(self, parked: PendingRequest, peer: Peer, now: float) -> None:
        try:
            if isinstance(parked.message, Status):
                answer: Message | None = self._state(now)
            else:
                answer = self.means.answer(peer, parked.number, parked.message, now)
        except ValueError as error:
            self._unpark(parked)
            self._refuse(parked.identity, parked.number, parked.kind, str(error))
            return
        if answer is None:
            self._park(parked)
        else:
            self._unpark(parked)
            self._answer(parked, answer)

    def _park(self, parked: PendingRequest) -> None:
        self._parked[parked.key] = parked
        if isinstance(parked.message, Take) and not self.means.hungry:
            self.means.hungry = self.means.stirred = True  # it lets groups in

    def _unpark(self, parked: PendingRequest) -> None:
        if self._parked.pop(parked.key, None) and isinstance(parked.message, Take):
            self.means.hungry = any(isinstance(other.message, Take) for other in self._parked.values())

    def _answer(self, parked: PendingRequest, answer: Message) -> None:
        self._out.append((parked.identity, pack(parked.number, answer)))

    def _refuse(self, identity: bytes, number: int, what: str, reason: str) -> None:
        self.errors[what] += 1
        log.warning("refused %s: %s", what, reason)
        self._out.append((identity, pack(number, Refused(reason=reason))))

    def _state(self, now: float) -> State:
        waiters = []
        for parked in self._parked.values():
            if peer := self.means.peers.get(parked.identity):
                why = self.means.why(peer, parked.message)
                waiters.append(Waiter(who=peer.hello.name, kind=parked.kind, why=why, seconds=now - parked.since))
        return self.means.state(waiters, self.errors.total(), now)
