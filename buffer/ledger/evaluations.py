"""Who evaluates which version, and what came of it. Pure Python beside the ledger: no sockets, no clock of its own.

Evaluations are due at version 0, every `every` versions, and at the last one. At most one runs at a time, on one
server, which claims it when it has loaded a version and then holds newer ones back. If that server dies, another one
(or the restarted one) claims it with the version that it has by then; an evaluation that is still to be done when the
next one is due is left out. So a result is of exactly one version, and each evaluation has at most one.
`buffer/wire/handlers.py` drives this and commits what changed (`Ledger.drain`) before it answers.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from buffer.ledger.types import EvaluationRow, server_name

ATTEMPTS = 5
"""Claims of one evaluation after which it is given up: each of its servers was lost."""
Standing = Literal["none", "due", "over"]
"""What each answer to a heartbeat says of evaluations: nothing; one is due that the server may claim; the one that it
makes is not its own any more."""


@dataclass
class EvaluationState:
    """The evaluation due at version `due`."""

    due: int
    state: Literal["running", "lost", "done", "failed"]
    version: int
    """What is, or was, really evaluated."""
    server: str
    attempts: int = 0
    reason: str = ""
    """Why the evaluation was given up."""
    results: str = ""
    """JSON: the figures of each set."""
    since: float = 0.0
    """When its server was last known to work on it; not written down."""

    def row(self, samples: str = "") -> EvaluationRow:
        """What the store writes; `samples` only with the results."""
        where = self.due, self.state, self.version, self.server
        return EvaluationRow(*where, self.attempts, self.reason, self.results, samples)


class Reach(NamedTuple):
    """What the ledger says: no version above `ceiling` can exist; `last` is the run's last one, once it is known."""

    ceiling: int
    last: int | None


@dataclass
class Evaluations:
    """`every` None: none while the run trains. A claim ends `lease_s` after its server last
    reported to work on it."""

    every: int | None
    lease_s: float
    known: dict[int, EvaluationState] = field(default_factory=dict)
    """By the version at which they were due: those that were ever claimed."""
    changed: dict[int, EvaluationRow] = field(default_factory=dict)
    """Evaluations that are not written down yet."""
    revision: int = 0
    """Moves when a request for results may have an answer."""

    def claim(self, server: str, version: int, reach: Reach, now: float) -> int | None:
        """The server has loaded `version`: the evaluation that it is to make of it, named by when it was due. None:
        none. A repeated claim of the same version gets the same answer."""
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
        """The server, which runs `version`, is alive and works on the evaluation `doing`."""
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
        """The server is gone."""
        running = self.running()
        if running and running.server == server:
            self._lose(running)

    def finish(self, server: str, due: int, version: int, results: str, samples: str, reach: Reach) -> str | None:
        """Take up the results; None: accepted (also when repeated), else why not. The first ones count, also those of a
        server that was taken for dead."""
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
        """The earliest one that ended and is not among `known`."""
        ended = (due for due, one in self.known.items() if one.state in ("done", "failed") and due not in known)
        due = min(ended, default=None)
        return None if due is None else self.known[due]

    def over(self, reach: Reach) -> bool:
        """No further result will come: the last version is evaluated, or there is none to evaluate."""
        if self.every is None:
            return True
        last = None if reach.last is None else self.known.get(reach.last)
        return last is not None and last.state in ("done", "failed") and self.running() is None

    def running(self) -> EvaluationState | None:
        """The one that is being made."""
        return next((one for one in self.known.values() if one.state == "running"), None)

    def restore(self, rows: Collection[EvaluationRow], now: float) -> None:
        """Continue from what was saved; a claim begins anew at `now`."""
        for row in rows:
            self.known[row.due] = EvaluationState(*row[:-1], since=now)  # type: ignore[arg-type]

    def _open(self, server: str, version: int, reach: Reach, now: float) -> int | None:
        """The newest evaluation due at `version` or before, if it is to be made and no other server makes one."""
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
