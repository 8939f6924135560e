"""Who evaluates which version, and what came of it.

At most one evaluation runs: a server claims it, and holds newer versions back. If it dies, another one claims it with
its own version. A late evaluation is left out.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from buffer.ledger.types import EvaluationRow, server_name

ATTEMPTS = 5
Standing = Literal["none", "due", "over"]
"""Answer to a heartbeat. `over`: the evaluation that the server makes is no longer its own."""


@dataclass
class EvaluationState:
    due: int
    state: Literal["running", "lost", "done", "failed"]
    version: int
    server: str
    attempts: int = 0
    reason: str = ""
    results: str = ""
    since: float = 0.0

    def row(self, samples: str = "") -> EvaluationRow:
        where = self.due, self.state, self.version, self.server
        return EvaluationRow(*where, self.attempts, self.reason, self.results, samples)


class Reach(NamedTuple):
    """No version above `ceiling` can exist; `last` is the run's last one."""

    ceiling: int
    last: int | None


@dataclass
class Evaluations:
    """A claim ends `lease_s` after its server last reported work on it."""

    every: int | None
    lease_s: float
    known: dict[int, EvaluationState] = field(default_factory=dict)
    changed: dict[int, EvaluationRow] = field(default_factory=dict)
    revision: int = 0
    """Moves when a request for results may have an answer."""

    def claim(self, server: str, version: int, reach: Reach, now: float) -> int | None:
        """Claim the evaluation of the loaded `version`; returns when it was due, also when repeated."""
        due = self._open(server, version, reach, now)
        if due is None:
            return None
        before, running = self.known.get(due), self.running()
        if running and (running.due, running.server, running.version) == (due, server, version):
            return due
        if running:
            self._lose(running)
        attempts = before.attempts if before else 0
        if attempts >= ATTEMPTS:
            reason = f"its server was lost {attempts} times; see the servers' logs"
            self._set(EvaluationState(due, "failed", version, server, attempts, reason))
            return None
        self._set(EvaluationState(due, "running", version, server, attempts + 1, since=now))
        return due

    def beat(self, server: str, version: int, doing: int | None, reach: Reach, now: float) -> Standing:
        """Note that the server lives and works on the evaluation `doing`."""
        running = self.running()
        if running and running.server == server:
            if doing == running.due and running.version <= reach.ceiling:
                running.since = now
                return "none"
            # a rewind undid its policy, or the server has forgotten it
            if doing == running.due or now >= running.since + self.lease_s:
                self._lose(running)
        if doing is not None:
            return "over"
        return "due" if self._open(server, version, reach, now) is not None else "none"

    def leave(self, server: str) -> None:
        running = self.running()
        if running and running.server == server:
            self._lose(running)

    def finish(self, server: str, due: int, version: int, results: str, samples: str, reach: Reach) -> str | None:
        """Take up the results, also of a server that was taken for dead; returns None, also when repeated, or why
        not."""
        known = self.known.get(due)
        if known is None:
            return f"evaluation {due} was never claimed here"
        if known.state in ("done", "failed"):
            return None if (known.server, known.version) == (server, version) else f"evaluation {due} is done"
        if version > reach.ceiling:
            if (known.state, known.server, known.version) == ("running", server, version):
                self._lose(known)
            return "its version was undone"
        self._set(EvaluationState(due, "done", version, server, known.attempts, results=results), samples)
        return None

    def unknown(self, known: Collection[int]) -> EvaluationState | None:
        ended = (due for due, one in self.known.items() if one.state in ("done", "failed") and due not in known)
        due = min(ended, default=None)
        return None if due is None else self.known[due]

    def over(self, reach: Reach) -> bool:
        """Whether no further result will come."""
        if self.every is None:
            return True
        last = None if reach.last is None else self.known.get(reach.last)
        return last is not None and last.state in ("done", "failed") and self.running() is None

    def running(self) -> EvaluationState | None:
        return next((one for one in self.known.values() if one.state == "running"), None)

    def restore(self, rows: Collection[EvaluationRow], now: float) -> None:
        for row in rows:
            self.known[row.due] = EvaluationState(*row[:-1], since=now)  # type: ignore[arg-type]

    def _open(self, server: str, version: int, reach: Reach, now: float) -> int | None:
        if self.every is None or version > reach.ceiling:
            return None
        due = version if version == reach.last else version - version % self.every
        running, known = self.running(), self.known.get(due)
        if known and known.state in ("done", "failed"):
            return None
        another = running and server_name(running.server) != server_name(server)
        if another and running and now < running.since + self.lease_s and running.version <= reach.ceiling:
            return None
        return due

    def _lose(self, one: EvaluationState) -> None:
        one.state = "lost"
        self._set(one)

    def _set(self, one: EvaluationState, samples: str = "") -> None:
        self.known[one.due] = one
        self.changed[one.due] = one.row(samples)
        self.revision += 1
