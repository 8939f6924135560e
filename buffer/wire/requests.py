"""The pending requests: each one is taken to its answer, or parked until something changed that it may wait for.

No sockets; driven by `server.py`: `receive` applies one message, `retry` tries the parked requests again, `changes` is
to be committed then, and only after that `answers` are to be sent. What a request means is in `handlers.py`; who waits
here for what, and why, is `State.waiters`.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer.ledger.types import Transaction
from buffer.wire import protocol
from buffer.wire.handlers import Handlers
from buffer.wire.message import Frame, Message, number_of, pack, unpack
from configs.entrypoint import made_progress

log = logging.getLogger(__name__)
REPEAT_S = 10.0
"""Shortest time between two lines about refused messages of one kind."""


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
        return self.identity, "Ask" if isinstance(self.message, protocol.Ask) else self.number


class PendingRequests:
    """One per buffer."""

    def __init__(self, handlers: Handlers, max_message: int) -> None:
        self.handlers, self.max_message = handlers, max_message
        self.errors: Counter[str] = Counter()
        """Refused messages since the start, by kind; `malformed` for what was none."""
        self._logged_at: dict[str, float] = {}
        self._parked: dict[tuple[bytes, str | int], PendingRequest] = {}
        self._tried = -1
        """Revision at which the parked requests were tried last."""
        self._out: list[tuple[bytes, Frame]] = []

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """Apply one message, `[identity, frame]`. Whatever is wrong with it is answered with Refused, and counted."""
        identity, data = bytes(frames[0]), frames[-1]
        try:
            self._check(frames)
            number, message = unpack(data, protocol.REQUESTS)
        except ValueError as error:
            self._refuse(identity, number_of(data), "malformed", str(error))
            return
        self.handlers.heard(identity, now)
        self._try(self._replace_older(PendingRequest(identity, number, message, now)), now)

    def disconnected(self, identity: bytes, now: float) -> None:
        """The connection of this process broke: it has ended, or will connect again."""
        self.handlers.disconnected(identity, now)

    def expire(self, now: float) -> float | None:
        """End what ends by the clock; returns when to call again."""
        return self.handlers.expire(now)

    def retry(self, now: float) -> None:
        """Try the parked requests, oldest first, until none changes anything for the others."""
        while self._tried != self.handlers.revision:
            self._tried = self.handlers.revision
            for request in list(self._parked.values()):
                if request.identity in self.handlers.peers:
                    self._try(request, now)
                else:
                    self._unpark(request)  # its process was replaced

    def changes(self) -> Transaction | None:
        """What changed since the last call; None: nothing. To be committed before `answers` are sent."""
        return self.handlers.changes()

    def commit(self, transaction: Transaction) -> None:
        """Write it: all of it or, with sqlite3.Error or OSError raised, nothing."""
        self.handlers.store.commit(transaction)
        if transaction.payloads:
            made_progress()

    @property
    def path(self) -> Path | None:
        """The file that `commit` writes; None: in memory."""
        return self.handlers.store.path

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

    def _replace_older(self, request: PendingRequest) -> PendingRequest:
        """A repeated request keeps its place; a newer Ask takes the place of the older one, which gets empty Work."""
        older = self._parked.get(request.key)
        if older is None:
            return request
        if older.number == request.number:
            return older
        assert isinstance(older.message, protocol.Ask) and isinstance(request.message, protocol.Ask)
        if older.message.request > request.message.request:
            older, request = request, older
        self._answer(older, protocol.Work(items=[]))
        return request

    def _try(self, request: PendingRequest, now: float) -> None:
        try:
            answer = self._handle(request, now)
        except ValueError as error:
            self._unpark(request)
            self._refuse(request.identity, request.number, request.kind, str(error))
            return
        if answer is None:
            self._park(request)
        else:
            self._unpark(request)
            self._answer(request, answer)

    def _handle(self, request: PendingRequest, now: float) -> Message | None:
        if isinstance(request.message, protocol.Hello):
            return self.handlers.hello(request.identity, request.message, now)
        peer = self.handlers.peers.get(request.identity)
        if peer is None:
            return protocol.NotRegistered()
        if isinstance(request.message, protocol.Status):
            return self._state(now)
        return self.handlers.answer(peer, request.number, request.message, now)

    def _park(self, request: PendingRequest) -> None:
        self._parked[request.key] = request
        if isinstance(request.message, protocol.Take):
            self.handlers.set_learner_waiting(True)

    def _unpark(self, request: PendingRequest) -> None:
        if self._parked.pop(request.key, None) and isinstance(request.message, protocol.Take):
            waiting = any(isinstance(other.message, protocol.Take) for other in self._parked.values())
            self.handlers.set_learner_waiting(waiting)

    def _answer(self, request: PendingRequest, answer: Message) -> None:
        self._out.append((request.identity, pack(request.number, answer)))

    def _refuse(self, identity: bytes, number: int, what: str, reason: str) -> None:
        self.errors[what] += 1
        now = time.monotonic()
        if now >= self._logged_at.get(what, -math.inf) + REPEAT_S:  # a flood must not fill the disk
            self._logged_at[what] = now
            log.warning("refused %s, %d since the start: %s", what, self.errors[what], reason)
        self._out.append((identity, pack(number, protocol.Refused(reason=reason))))

    def _state(self, now: float) -> protocol.State:
        waiters = []
        for request in self._parked.values():
            if isinstance(request.message, protocol.Results) and not self.handlers.ledger.finished():
                continue  # the learner asks in advance and waits for nothing
            if peer := self.handlers.peers.get(request.identity):
                why, seconds = self.handlers.why_parked(peer, request.message), now - request.since
                waiters.append(protocol.Waiter(who=peer.hello.name, kind=request.kind, why=why, seconds=seconds))
        return self.handlers.state(waiters, self.errors.total(), now)
