"""Who is on the weights wire, as its sender sees it: one `Member` a rollout server. Pure state; `rounds.py` drives
it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from learner.weights.protocol import BEATS, Failed, Join, Loaded, Ready, Received, WeightsMessage


@dataclass(eq=False)
class Member:
    """A server that joined, under the ZeroMQ route its messages come by."""

    route: bytes
    name: str
    workers: int
    holds: tuple[str, int]
    """Session and version of the weights it has received."""
    heard_at: float = field(default_factory=time.monotonic)
    gone: bool = False
    round: int = -1
    answer: WeightsMessage | None = None
    """Its last word about `round`: Ready, Received, Loaded or Failed."""
    failures: int = 0
    """Rounds in a row that failed for it with nobody missing."""

    def enter(self, round: int) -> None:
        """From now on only what it says about `round` counts."""
        self.round, self.answer = round, None

    def hear(self, message: WeightsMessage) -> None:
        """Any word proves life; one about the current round is kept."""
        self.heard_at = time.monotonic()
        if isinstance(message, Ready | Received | Loaded | Failed) and message.round == self.round:
            self.answer = message

    def came_to(self, *kinds: type[WeightsMessage]) -> bool:
        """Has it answered with one of `kinds`, or is nothing more to be expected of it?"""
        return self.gone or isinstance(self.answer, (Failed, *kinds))


class Members:
    """All members by route; a name is there once."""

    def __init__(self) -> None:
        self._by_route: dict[bytes, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_route.values()))

    def __len__(self) -> int:
        return len(self._by_route)

    def get(self, route: bytes) -> Member | None:
        """The member behind `route`."""
        return self._by_route.get(route)

    def join(self, route: bytes, message: Join) -> Member:
        """Take a server in; an earlier one of the same name is gone."""
        for other in self:
            if other.name == message.name:
                self.drop(other)
        member = Member(route, message.name, message.workers, (message.session, message.version))
        self._by_route[route] = member
        return member

    def drop(self, member: Member) -> None:
        """It is gone, or to be treated so."""
        member.gone = True
        self._by_route.pop(member.route, None)

    def silent(self, heartbeat_s: float) -> list[Member]:
        """Those not heard of for too long."""
        oldest = time.monotonic() - BEATS * heartbeat_s
        return [member for member in self if member.heard_at < oldest]

    def without(self, holds: tuple[str, int]) -> list[Member]:
        """Those that hold something else."""
        return [member for member in self if member.holds != holds]
