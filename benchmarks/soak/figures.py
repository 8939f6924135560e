"""What a soak shows: pure functions of what was seen, in seconds. Nothing here runs, reads or waits.

The measure of everything is the pace of the undisturbed stretches, in versions per second. *Effective training time* is
the number of versions trained under kills divided by that which the pace would have given in the same time: a version
that a learner repeats after its restart counts once. *Full speed* is back when the killed process does its work again
and the next WINDOW versions take no longer than any WINDOW versions of the undisturbed stretches did.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean

from benchmarks.soak.observer import PROGRESS, Seen

WINDOW = 10
DEAD_SHARE, ASSUMED_S = 0.1, 30.0
KILL_EVERY_S = ASSUMED_S / DEAD_SHARE
"""The schedule: a kill each 300 s, of any process. One is dead for 10 % of the time then, if a recovery takes 30 s."""


@dataclass(frozen=True)
class Span:
    """A part of the run, in seconds since the observer began."""

    begin: float
    end: float


@dataclass(frozen=True)
class Death:
    """A process that got SIGKILL at `at`, and the end of the time that is charged to it: the next kill, or the last
    one's share."""

    process: str
    at: float
    until: float

    @property
    def role(self) -> str:
        """`rollout` for `rollout-1`."""
        return self.process.partition("-")[0]


def times_in(seen: Seen, stretch: Span) -> list[float]:
    """When the versions of a stretch were first recorded."""
    times = [at for at, _ in seen.versions]
    return times[bisect_right(times, stretch.begin) : bisect_right(times, stretch.end)]


def pace_of(seen: Seen, calm: Sequence[Span]) -> float:
    """Versions per second of the undisturbed stretches, from the first to the last version of each. Raises ValueError
    if none has two versions."""
    stretches = [found for stretch in calm if len(found := times_in(seen, stretch)) > 1]
    if not stretches:
        raise ValueError("no two versions in the undisturbed stretches: make them longer")
    return sum(len(found) - 1 for found in stretches) / sum(found[-1] - found[0] for found in stretches)


def slowest(seen: Seen, calm: Sequence[Span]) -> float:
    """The longest time that WINDOW consecutive versions took undisturbed. Raises ValueError as `pace_of` does."""
    found = [window_s for stretch in calm for window_s in windows(times_in(seen, stretch))]
    if not found:
        raise ValueError(f"no {WINDOW + 1} versions in an undisturbed stretch: make them longer")
    return max(found)


def windows(times: Sequence[float]) -> list[float]:
    """The times of each WINDOW consecutive versions."""
    return [last - first for first, last in zip(times, times[WINDOW:], strict=False)]


def effective(seen: Seen, stretch: Span, pace: float) -> float:
    """Versions of the stretch, as a share of what the pace would have given."""
    return len(times_in(seen, stretch)) / (pace * (stretch.end - stretch.begin))


def at_pace(seen: Seen, stretch: Span, slowest_s: float) -> float:
    """The share of the stretch that lies in WINDOW consecutive versions no slower than any undisturbed ones."""
    times = times_in(seen, stretch)
    covered, reached = 0.0, stretch.begin
    for first, last in zip(times, times[WINDOW:], strict=False):
        if last - first <= slowest_s:
            covered += last - max(first, reached)
            reached = last
    return covered / (stretch.end - stretch.begin)


@dataclass(frozen=True)
class Recovery:
    """What became of one death. All in seconds."""

    death: Death
    full_speed: float | None
    """From the kill to full speed; None if that was not reached before the next kill."""
    pause: float
    """Longest time without a new version."""
    lost: float
    """Training lost until full speed: that time, less what its versions take at the pace that follows. So other work of
    the machine, which makes the undisturbed stretches slower or faster than this one, is not charged to the death."""
    phases: dict[str, float] = field(default_factory=dict)
    """From one mark of its restart to the next."""


MARKS: dict[str, Sequence[tuple[str, str, str]]] = {
    "buffer": (
        ("noticed", "{}", r"--- \S+ failed"),
        ("started", "{}", r"--- \S+ started"),
        ("imports, data, ledger read", "{}", r"run \S+: .* problems"),
        ("clients are back, new version", "", "version"),
    ),
    "learner": (
        ("noticed", "{}", r"--- \S+ failed"),
        ("started", "{}", r"--- \S+ started"),
        ("imports and model", "{}", r"M parameters on"),
        ("optimizer, wires", "{}", r"waiting for the buffer"),
        ("checkpoint loaded", "{}", r"restored version|no checkpoint"),
        ("first version repeated or new", "", "any version"),
        ("new version", "", "version"),
    ),
    "rollout": (
        ("noticed", "{}", r"--- \S+ failed"),
        ("started", "{}", r"--- \S+ started"),
        ("imports, reward workers", "{}", r"waits for the buffer"),
        ("vLLM started", "{}", r"weights: the learner is at"),
        ("first policy", "{}", r"generating with version"),
        ("first group", "{}", re.escape(PROGRESS)),
    ),
}
"""By role: phase, the process that tells its end ({}: the killed one), and the line that does."""


def marks(seen: Seen, death: Death) -> dict[str, float]:
    """When each phase of the restart ended, in order, up to the first that did not."""
    found, after = {}, death.at
    for phase, who, pattern in MARKS[death.role]:
        if not who:
            times = seen.versions if pattern == "version" else sorted(seen.versions + seen.repeated)
            moments = [at for at, _ in times]
        else:
            name, line = who.format(death.process), re.compile(pattern.format(death.process))
            moments = [sight.at for sight in seen.sights if sight.who == name and line.search(sight.text)]
        index = bisect_left(moments, after)
        if index == len(moments) or moments[index] > death.until:
            break
        found[phase] = after = moments[index]
    return found


def recovery(seen: Seen, death: Death, pace: float, slowest_s: float) -> Recovery:
    """Judge one death."""
    ends = marks(seen, death)
    begins = [death.at, *ends.values()]
    phases = {phase: end - begin for (phase, end), begin in zip(ends.items(), begins, strict=False)}
    times = times_in(seen, Span(death.at, death.until))
    edges = [death.at, *times, death.until]
    pause = max(later - earlier for earlier, later in pairwise(edges))
    full = None
    if len(ends) == len(MARKS[death.role]):
        back = begins[-1]
        after = [at for at in times if at >= back]
        full = next((first for first, took in zip(after, windows(after), strict=False) if took <= slowest_s), None)
    settled = Span(death.until if full is None else full, death.until)
    local = pace_of(seen, [settled]) if len(times_in(seen, settled)) > WINDOW else pace
    lost = settled.begin - death.at - len(times_in(seen, Span(death.at, settled.begin))) / local
    return Recovery(death, None if full is None else full - death.at, pause, lost, phases)


def expected(recoveries: Sequence[Recovery], every_s: float) -> float:
    """Effective training time with a kill each `every_s`, all processes alike, by the mean training lost of each."""
    by_process: dict[str, list[float]] = {}
    for found in recoveries:
        by_process.setdefault(found.death.process, []).append(found.lost)
    return 1.0 - mean(mean(lost) for lost in by_process.values()) / every_s
