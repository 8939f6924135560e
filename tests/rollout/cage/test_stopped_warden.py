"""A warden that was stopped, as with its whole container, does not count that time against the worker's call."""

import time
from typing import Any

import pytest

from rollout.cage import warden as wardens
from rollout.cage.warden import DEADLINE, CallState, Warden


class SlowPoll:
    """Stands for `select.poll`: the wait ends late, as after SIGCONT."""

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        time.sleep(milliseconds / 1000 + self.late_s)
        return []


@pytest.mark.parametrize(("late_s", "deadline", "moved_s"), [(0.3, 100.0, 0.3), (0.0, 100.0, 0.0), (0.3, 0.0, 0.0)])
def test_a_stop_puts_the_deadline_off(
    late_s: float, deadline: float, moved_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wardens, "STOPPED_S", 0.2)
    warden: Any = object.__new__(Warden)  # its constructor needs a worker
    warden._poll, warden.state = SlowPoll(late_s), CallState()
    warden.state[DEADLINE] = deadline
    assert warden._wait(time.monotonic() + 0.05) == set()
    assert warden.state[DEADLINE] - deadline == pytest.approx(moved_s, abs=0.1)
