"""The servers on the weights wire as the sender sees them: one `Member` per rollout server. Pure state, driven by
`distributor.py`."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from buffer.wire.message import Message
from learner.weights.protocol import BEATS, Failed, Join, Loaded, Ready, Received


@dataclass(eq=False)
class Member:
    """A server that joined. `route` is the ZeroMQ identity its messages carry."""

    route: bytes
    name: str
    workers: int
    holds: tuple[str, int]
    """Session and version of the weights it has received."""
    heard_at: float = field(default_factory=time.monotonic)
    gone: bool = False
    round: int = -1
    answer: Message | None = None
    """Its latest answer in `round`: Ready, Received, Loaded or Failed."""
    failures: int = 0
    """Consecutive rounds that failed for it while no member was missing."""

    def enter(self, round: int) -> None:
        """From now on only answers about `round` count."""
        self.round, self.answer = round, None

    def on_message(self, message: Message) -> None:
        """Any message is a sign of life; an answer about the current round is kept."""
        self.heard_at = time.monotonic()
        if isinstance(message, Ready | Received | Loaded | Failed) and message.round == self.round:
            self.answer = message

    def answered_or_gone(self, *kinds: type[Message]) -> bool:
        """Whether it has answered with one of `kinds` or failed, or will not answer any more."""
        return self.gone or isinstance(self.answer, (Failed, *kinds))


class Members:
    """All members by route. A name is unique."""

    def __init__(self) -> None:
        self._by_route: dict[bytes, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_route.values()))

    def __len__(self) -> int:
        return len(self._by_route)

    def get(self, route: bytes) -> Member | None:
        """The member with this route."""
        return self._by_route.get(route)

    def join(self, route: bytes, message: Join) -> None:
        """Admit a server in place of an earlier one of its name."""
        for other in self:
            if other.name == message.name:
                self.drop(other)
        self._by_route[route] = Member(route, message.name, message.workers, (message.session, message.version))

    def drop(self, member: Member) -> None:
        """It is gone, or is to be treated as gone."""
        member.gone = True
        self._by_route.pop(member.route, None)

    def silent(self, heartbeat_s: float) -> list[Member]:
        """Members that have missed BEATS heartbeats."""
        oldest = time.monotonic() - BEATS * heartbeat_s
        return [member for member in self if member.heard_at < oldest]

    def without(self, holds: tuple[str, int]) -> list[Member]:
        """Members that hold another version."""
        return [member for member in self if member.holds != holds]
