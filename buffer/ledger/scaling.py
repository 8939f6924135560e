"""How many rollout servers are wanted: a person's number, until it is taken back, or the rule's."""

from dataclasses import dataclass


@dataclass
class WantedServers:
    """0: nobody named a number."""

    wanted_servers: int = 0
    wanted_by_person: int = 0

    @property
    def by_person(self) -> int | None:
        return self.wanted_servers or None if self.wanted_by_person else None

    def scale(self, servers: int | None, by_person: bool) -> bool:
        """Want so many servers; None takes a person's number back. Returns whether that is news."""
        before = self.wanted_servers, self.wanted_by_person
        if by_person or not self.wanted_by_person:
            self.wanted_servers = self.wanted_servers if servers is None else servers
            self.wanted_by_person = int(by_person and servers is not None)
        return before != (self.wanted_servers, self.wanted_by_person)
