"""How many rollout servers a run should have, by who waits for whom: the rule of `rollout.servers: {min, max}`. No
clock, no sockets.

docs/scaling.md has the rule. A window begins when the last change has taken effect, so the rule does not answer to its
own changes.
"""

from dataclasses import dataclass
from math import ceil

WAITS, WAITS_MUCH = 0.15, 0.5
PARKED_LITTLE, PARKED_BESIDE, PARKED_MUCH = 0.05, 0.15, 0.30
UPS, DOWNS = 2, 3
"""Windows in a row before the number changes."""
WINDOW_S, WINDOW_VERSIONS = 60.0, 3
SPARE_UP, SPARE_DOWN = 1.05, 1.15


@dataclass(frozen=True)
class Look:
    """The run at one moment."""

    at: float
    """Monotonic seconds."""
    version: int
    learner_waits: bool
    places: float
    """Parked ones included."""
    parked: float
    leased: int
    """Groups being made."""
    made: int


@dataclass(frozen=True)
class Wish:
    """So many servers, and why in one line."""

    servers: int
    why: str


@dataclass(frozen=True)
class Window:
    """What was seen between two looks."""

    seconds: float
    versions: int
    waits: float
    """Share of time."""
    parked: float
    """Share of places."""
    group_s: float
    """By Little's law."""

    def __str__(self) -> str:
        waited = f"the learner waited {self.waits:.0%} of the last {self.seconds:.0f} s"
        return f"{waited} for a batch, {self.parked:.0%} of the servers' places were parked"


class Rule:
    """For `least` to `most` servers and groups up to `staleness` versions old."""

    def __init__(self, least: int, most: int, staleness: int) -> None:
        self.least, self.most, self.staleness = least, most, staleness
        self.advice = ""
        """A remedy, while more servers would not help."""
        self._looks: list[Look] = []
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._settles_until = 0.0
        self._settle_s = 0.0
        self._ups = self._downs = self._both = 0

    def changing(self, at: float) -> None:
        self._looks.clear()
        self._ups = self._downs = self._both = 0
        self._settles_until = at + self._settle_s

    def look(self, look: Look, servers: int, free: int) -> Wish | None:
        """The present wish: `servers` work, and there is room for `free` more."""
        if look.at < self._settles_until:
            return None
        if (window := self._seen(look)) is None:
            return None
        self._count(window)
        to = servers
        if self._ups >= UPS or (self._ups and window.waits > WAITS_MUCH):
            enough = ceil(SPARE_UP * servers * (1 - window.parked) / max(1 - window.waits, 0.05))
            to = max(servers, min(enough, 2 * servers, self.most, servers + free))
            self._settle_s = 2 * window.group_s
        elif self._downs >= DOWNS:
            enough = ceil(SPARE_DOWN * servers * (1 - window.parked))
            to = min(servers, max(enough, servers - ceil(servers / 4), self.least))
            self._settle_s = 2 * (self.staleness + 1) * window.seconds / window.versions
        if to == servers:
            return None
        self.changing(look.at)
        return Wish(to, str(window))

    def _seen(self, look: Look) -> Window | None:
        """Each look counts until the next one."""
        if self._looks and look.version < self._looks[0].version:  # the learner went back
            self._looks.clear()
        if not self._looks:
            self._looks, self._sums = [look, look], [0.0, 0.0, 0.0, 0.0]
            return None
        first, last = self._looks
        lasted_s = look.at - last.at
        for number, value in enumerate((last.learner_waits, last.places, last.parked, last.leased)):
            self._sums[number] += value * lasted_s
        self._looks = [first, look]
        seconds, versions = look.at - first.at, look.version - first.version
        if seconds < WINDOW_S or versions < WINDOW_VERSIONS:
            return None
        waited, places, parked, leased = self._sums
        self._looks = []
        self._seen(look)
        made = max(1, look.made - first.made)
        return Window(seconds, versions, waited / seconds, parked / max(places, 1e-9), leased / made)

    def _count(self, window: Window) -> None:
        waits = window.waits > WAITS
        self._ups = self._ups + 1 if waits and window.parked < PARKED_LITTLE else 0
        self._downs = self._downs + 1 if not waits and window.parked > PARKED_MUCH else 0
        self._both = self._both + 1 if waits and window.parked > PARKED_BESIDE else 0
        remedy = f"more servers would not help; raise batch.max_staleness ({self.staleness})"
        self.advice = f"{window}: {remedy}" if self._both >= UPS else ""
