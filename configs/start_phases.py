"""Measures how long the parts of a process's start took."""

import time
from pathlib import Path

STAT = Path("/proc/self/stat")
TICKS_A_SECOND = 100
"""Ticks of the kernel's clock in /proc: the same on all platforms that Headrace runs on."""


def seconds_alive() -> float:
    """Seconds since this process was started; 0 without Linux."""
    try:
        words = STAT.read_text().rpartition(")")[2].split()  # the name before it may hold spaces
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / TICKS_A_SECOND)
    except (OSError, AttributeError):
        return 0.0


class StartPhases:
    """Phases of a start, in order. As text: `41.3 s: 19.9 s imports, 0.4 s buffer, 21.0 s vLLM`."""

    def __init__(self, first: str = "imports") -> None:
        """`first`: the phase from the start of the process until now."""
        self._began = time.monotonic() - seconds_alive()
        self._ends = {first: time.monotonic()}

    def end(self, phase: str) -> None:
        self._ends[phase] = time.monotonic()

    def __str__(self) -> str:
        shown, before = [], self._began
        for phase, end in self._ends.items():
            shown.append(f"{end - before:.1f} s {phase}")
            before = end
        return f"{before - self._began:.1f} s: {', '.join(shown)}"
