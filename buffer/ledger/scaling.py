"""How many rollout servers are wanted: a person's number, which holds until it is taken back, or the rule's.

No rule of the ledger: kept beside it, and written down with its counters, because it outlives the launcher.
"""

from dataclasses import dataclass


@dataclass
class WantedServers:
    """`wanted_servers` is 0 before anybody named a number; `wanted_by_person` is 1 while the number is a person's.
    The store keeps both."""

    wanted_servers: int = 0
    wanted_by_person: int = 0

    @property
    def by_person(self) -> int | None:
        """A person's number, while it holds."""
        return self.wanted_servers or None if self.wanted_by_person else None

    def scale(self, servers: int | None, by_person: bool) -> bool:
        """So many servers are wanted from now on; None: a person's number no longer holds. Returns whether that is
        news: while a person's number holds, the rule's changes nothing."""
        before = self.wanted_servers, self.wanted_by_person
        if by_person or not self.wanted_by_person:
            self.wanted_servers = self.wanted_servers if servers is None else servers
            self.wanted_by_person = int(by_person and servers is not None)
        return before != (self.wanted_servers, self.wanted_by_person)
