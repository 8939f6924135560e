"""Times of a warden. A stop, as of its whole container, does not count against the worker's call. The stacks of a
worker that will not show them delay nothing. A call that ends meanwhile costs the next one nothing."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.cage import CagedFunction, worker_loop
from rollout.cage import warden as wardens
from rollout.cage.warden import DEADLINE, DUMP_SIGNAL, STOPPED, CallState, Warden
from rollout.cage.worker_loop import RunningEpisode


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


@pytest.fixture
def blocking() -> Iterator[int]:
    """A worker whose function has blocked all signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if (worker := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield worker
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_worker_that_blocks_signals_or_outlives_its_server_is_not_waited_for(
    orphaned: bool, blocking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wardens, "DUMP_S", 600.0)
    monkeypatch.setattr(wardens, "BLOCKED_S", 600.0 if orphaned else 0.1)
    capture, printing = os.pipe()
    os.set_blocking(capture, False)
    warden: Any = object.__new__(Warden)
    warden.worker, warden.capture, warden._orphaned = blocking, capture, orphaned
    began = time.monotonic()
    warden._dump_stacks()
    assert time.monotonic() - began < 300
    assert wardens.has_signal(blocking, DUMP_SIGNAL), "it was asked"
    os.close(capture)
    os.close(printing)


class LateWarden(Warden):
    """A busy machine delays the stacks. `left_s`: the time that the worker's next call then has, 0: none has begun."""

    def __init__(self, left_s: float) -> None:
        self.function, self.state, self._orphaned = CagedFunction("slow", "module:load", [], 60.0), CallState(), False
        self.state[DEADLINE], self._left_s = time.monotonic() - 0.1, left_s

    def _dump_stacks(self) -> None:
        self.state[DEADLINE] = self._left_s and time.monotonic() + self._left_s


@pytest.mark.parametrize(("left_s", "ends"), [(60.0, False), (0.0, False), (-0.1, True)])
def test_a_call_that_ends_while_its_stacks_are_shown_does_not_end_the_next_one(left_s: float, ends: bool) -> None:
    assert (LateWarden(left_s)._judge() is not None) == ends


class LateLoop:
    """Stands for the worker's event loop, whose timers ring when `ring` is called."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, ring: Callable[[], None]) -> None:
        self._due, self._ring = self.now + delay_s, ring

    def ring(self, late_s: float) -> None:
        self.now = self._due + late_s
        self._ring()


@pytest.mark.parametrize(("late_s", "stopped_s", "rings"), [(0.0, 0.0, 1), (60.0, 0.0, 2), (60.0, 62.0, 3)])
def test_a_stop_of_all_puts_the_end_of_an_episode_off_and_a_blocked_loop_does_not(
    late_s: float, stopped_s: float, rings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warden notes a stop after the timer has rung."""
    loop, state, ended = LateLoop(), CallState(), list[RunningEpisode]()
    monkeypatch.setattr(worker_loop, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    RunningEpisode(1, 3.0, ended.append, state)
    for ring in range(rings):
        assert not ended
        loop.ring(0.0 if ring else late_s)
        state[STOPPED] = stopped_s
    assert len(ended) == 1


def test_a_warden_notes_for_how_long_all_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPoll(60.0)
    monkeypatch.setattr(wardens, "time", SimpleNamespace(monotonic=slow.monotonic))
    warden: Any = object.__new__(Warden)
    warden._poll, warden.state = slow, CallState()
    warden._wait(slow.now + 0.05)
    assert warden.state[STOPPED] == pytest.approx(60.0)
