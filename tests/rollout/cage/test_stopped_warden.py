"""A warden that was stopped, as with its whole container, does not count that time against the worker's call."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollout.cage import warden as wardens
from rollout.cage.warden import DEADLINE, CallState, Warden


class SlowPoll:
    """Stands for `select.poll` and the clock: the wait ends late, as after SIGCONT."""

    def __init__(self, late_s: float) -> None:
        self.late_s, self.now = late_s, 1000.0

    def monotonic(self) -> float:
        return self.now

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self.now += milliseconds / 1000 + self.late_s
        return []


@pytest.mark.parametrize(("late_s", "deadline", "moved_s"), [(1.5, 100.0, 1.5), (0.9, 100.0, 0.0), (1.5, 0.0, 0.0)])
def test_a_stop_puts_the_deadline_off(
    late_s: float, deadline: float, moved_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowPoll(late_s)
    monkeypatch.setattr(wardens, "time", SimpleNamespace(monotonic=slow.monotonic))
    warden: Any = object.__new__(Warden)  # its constructor needs a worker
    warden._poll, warden.state = slow, CallState()
    warden.state[DEADLINE] = deadline
    assert warden._wait(slow.now + 0.05) == set()
    assert warden.state[DEADLINE] - deadline == pytest.approx(moved_s)
