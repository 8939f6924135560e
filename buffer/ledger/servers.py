"""What the ledger remembers of each rollout server: its version, its leases, when it was heard, which Asks it sent.

Part of the ledger (`buffer/ledger/rules.py`): plain state driven by its calls.
"""

from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
REMEMBERED = 1024
"""Request and lease numbers kept of each server, so that repeated messages are known for what they are."""


@dataclass
class ServerRecord:
    """One rollout server. A lease goes on while the server is heard of."""

    heard: float
    version: int = 0
    leases: dict[int, int] = field(default_factory=dict)
    """Item by lease."""
    asked: dict[int, int] = field(default_factory=dict)
    """By request number not yet answered: the version its Ask gave."""
    answered: dict[int, None] = field(default_factory=dict)
    """Request numbers that got work, latest last."""
    done: dict[int, None] = field(default_factory=dict)
    """Leases that ended with an accepted group, latest last."""

    def hears(self, request: int, version: int, now: float) -> None:
        """Note an Ask. One seen before (parked, or repeated) is no news: heartbeats since then know better."""
        if request and self.asked.get(request) == version:
            return
        if request:
            _remember(self.asked, request, version)
        self.version, self.heard = version, now

    def answers(self, request: int) -> None:
        """The Ask of this number got work."""
        if request:
            self.asked.pop(request, None)
            _remember(self.answered, request, None)

    def delivers(self, lease: int) -> None:
        """The lease ended with an accepted group."""
        self.leases.pop(lease, None)
        _remember(self.done, lease, None)


def _remember(memory: dict[int, T], number: int, what: T) -> None:
    memory[number] = what
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
