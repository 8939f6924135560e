"""The nemesis: strikes a run with one fault after another, and judges what became of each.

After a fault the learner has to train, each server to load a new version, and the checker to find nothing; only
processes that the fault may end may have failed. A run with a finding is given up and a new one begun, so that each
finding is of one fault.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.system.nemesis.faults import Kind, RunLost
from tests.system.nemesis.history import Event, Trained
from tests.system.nemesis.session import START_S, Session

PER_RUN = 25
"""Faults until a run is ended and its ledger compared with its history."""
BACK_S = 150.0
"""Time until all is well after a fault, a restart of everything included."""
LOG_BYTES, MEMORY_BYTES = 5 << 20, 256 << 20
"""Most that a peer may add to all logs, and to the memory of a process."""
END = "end of a run"
"""Where a finding stands that the comparison with the ledger made."""
SIGTERM_CODE, FEW = 143, 3


@dataclass(frozen=True)
class Outcome:
    """What a fault did. `cost_s`: longest time without a new version from the fault on, beyond the usual time of a
    version; None where the run did not go on. `note`: what a run said that was refused."""

    kind: str
    cost_s: float | None = None
    findings: Sequence[str] = ()
    note: str = ""


@dataclass
class Before:
    """What was known before a fault."""

    session: Session
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.failures = Counter(self.session.failures())
        self.logs, self.memory = self.session.log_bytes(), peaks(self.session)

    def findings(self, kind: Kind) -> Iterator[str]:
        """What is wrong since."""
        session = self.session
        yield from map(str, session.violations())
        for role, text in Counter(session.failures()) - self.failures:
            if role not in kind.ends:
                yield f"{text}: {kind.name} may not end it"
        if kind.bounded:
            if (more := session.log_bytes() - self.logs) > LOG_BYTES:
                yield f"the logs grew by {more / 2**20:.1f} MiB"
            for name, peak in peaks(session).items():
                if (more := peak - self.memory.get(name, peak)) > MEMORY_BYTES:
                    yield f"{name} took {more / 2**20:.0f} MiB more memory"


def peaks(session: Session) -> dict[str, int]:
    """By process, the most memory that it ever had, in bytes."""
    found = {}
    for name in ("buffer", "learner"):
        for process in session.find(name):
            status = Path(f"/proc/{process.pid}/status")
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
            found[name] = int(lines.get("VmHWM", "0 kB").split()[0]) << 10
    return found


def cost(events: Sequence[Event], began: float, ended: float, usual_s: float) -> float:
    """Longest time without a new version in [began, ended], minus the usual one. A version that is trained again after
    a rewind is no new one."""
    news, newest = list[float](), -1
    for event in events:
        if isinstance(event, Trained) and event.version > newest:
            newest = event.version
            news += [event.at] if began < event.at <= ended else []
    gaps = [later - earlier for earlier, later in pairwise([began, *(news or [ended])])]
    return max(0.0, max(gaps) - usual_s)


class Nemesis:
    """Strikes with `faults` faults of `kinds`, each as often as the others, in an order drawn from `seed`. No fault
    begins after `deadline`, a time of the monotonic clock."""

    def __init__(
        self,
        folder: Path,
        kinds: Sequence[Kind],
        faults: int,
        seed: int,
        say: Callable[[str], None] = lambda line: None,
        deadline: float = math.inf,
    ) -> None:
        self.folder, self.faults, self.seed, self.say, self.deadline = folder, faults, seed, say, deadline
        self.random = random.Random(f"nemesis/{seed}")
        self.plan = list(self._decks(kinds))
        self.with_disk = any(kind.name == "disk" for kind in kinds)
        self.outcomes: list[Outcome] = []
        self.runs = 0

    def _decks(self, kinds: Sequence[Kind]) -> Iterator[Kind]:
        """Each kind once before any comes again."""
        for number in range(self.faults):
            if number % len(kinds) == 0:
                deck = self.random.sample(kinds, len(kinds))
            yield deck[number % len(kinds)]

    def go(self) -> list[Outcome]:
        """All faults, in as many runs as it takes."""
        while self.plan and not self.late():
            some, self.plan = self.plan[:PER_RUN], self.plan[PER_RUN:]
            self.plan = self._one_run(some) + self.plan
        return self.outcomes

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def _one_run(self, kinds: Sequence[Kind]) -> list[Kind]:
        """One run with these faults; returns those that are left if it was given up."""
        self.runs += 1
        with Session(self.folder / f"run-{self.runs}", self.seed, self.with_disk) as session:
            if not session.until(lambda: session.well(0.0), START_S):
                raise AssertionError(f"no version was trained: {session.last_lines()}")
            for number, kind in enumerate(kinds, 1):
                if self.late():
                    break
                outcome = self.strike(session, kind)
                given_up = outcome.findings or outcome.cost_s is None
                if kind.last and not given_up:
                    outcome = replace(outcome, findings=self._end(session))
                self._note(outcome)
                if kind.last or given_up:
                    return list(kinds[number:])
            if findings := self._end(session):
                self._note(Outcome(END, findings=findings))
        return []

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        cost_s = "-" if outcome.cost_s is None else f"{outcome.cost_s:.1f} s"
        more = f"; and {len(outcome.findings) - FEW} more" if len(outcome.findings) > FEW else ""
        said = "; ".join(outcome.findings[:FEW]) + more or ("clean" if outcome.cost_s is not None else "run lost")
        note = f" ({' '.join(outcome.note.split())[:400]})" if outcome.note else ""
        self.say(f"{len(self.outcomes):>4} run {self.runs:<3} {outcome.kind:<26} {cost_s:>8}  {said}{note}")

    def strike(self, session: Session, kind: Kind) -> Outcome:
        """One fault, until all is well again."""
        usual_s, before = session.version_s(), Before(session)
        findings, note = list[str](), ""
        try:
            note = kind.strike(session, self.random) or ""
        except RunLost as lost:
            return Outcome(kind.name, None, [], str(lost))
        except AssertionError as error:
            findings.append(str(error))
        healed = time.monotonic()
        back = session.until(lambda: session.well(healed), BACK_S)
        findings += before.findings(kind)
        if session.ended is not None:
            findings.append(f"the run ended with exit code {session.ended}: {session.last_lines()}")
        elif not back:
            findings.append(f"not all was well {BACK_S:g} s later: {why(session, healed)}")
        cost_s = cost(session.events(), before.began, time.monotonic(), usual_s) if back else None
        return Outcome(kind.name, cost_s, findings, note)

    def _end(self, session: Session) -> list[str]:
        """End the run in good order, and compare."""
        code = session.stop()
        findings = [] if code == SIGTERM_CODE else [f"exit code {code} after SIGTERM: {session.last_lines()}"]
        session.note_end()
        return findings + [str(violation) for violation in session.violations()]


def why(session: Session, since: float) -> str:
    """Who does not go on, and what the buffer says of it."""
    missing = [name for name in ("buffer", "learner", "rollout-0", "rollout-1") if not session.find(name)]
    state = session.state()
    waits = [f"{waiter.who} waits: {waiter.why}" for waiter in state.waiters][:4] if state else ["no answer"]
    texts = [text for _, text in session.failures()][-3:]
    trained = len(session.trained(since))
    return f"{trained} versions trained; not there: {missing or 'nobody'}; buffer: {waits}; failures: {texts}"


def table(outcomes: Sequence[Outcome]) -> list[tuple[str, int, int, float | None, float | None]]:
    """By kind: how many faults, how many of them clean, and the median and largest cost in seconds."""
    rows = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        some = [outcome for outcome in outcomes if outcome.kind == kind]
        costs = [outcome.cost_s for outcome in some if outcome.cost_s is not None]
        clean = sum(not outcome.findings for outcome in some)
        rows.append((kind, len(some), clean, median(costs) if costs else None, max(costs, default=None)))
    return sorted(rows)
