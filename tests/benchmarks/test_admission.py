"""`benchmarks/runs/switched.py`: a scheduler whose places are switched while sequences run. The test plays vLLM's part
of a step. vLLM is imported when the tests run, not when they are collected."""

import json
from math import inf
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.long  # the import of vLLM takes longer than all other tests of benchmarks


@pytest.fixture
def scheduler(monkeypatch):
    """Eight places, of which sequences take as many as vLLM admits."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from benchmarks.runs.switched import Switched

    made = Switched.__new__(Switched)
    made.running, made.places, made._look_at, made.rl_decode = [], 8, inf, lambda: None

    def schedule(self, throttle_prefills=False):
        (limit,) = {self.max_num_running_reqs, self.max_num_active_reqs}
        assert len(self.running) <= limit
        self.running += ["new"] * (limit - len(self.running))
        return "a step"

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    return made


def test_more_places_are_taken_at_once_and_fewer_as_sequences_end(scheduler):
    assert scheduler.schedule() == "a step" and len(scheduler.running) == 8
    scheduler.places = 10
    assert scheduler.schedule(False) == "a step" and len(scheduler.running) == 10
    scheduler.places = 8
    for left in (10, 9, 8, 8):
        scheduler.schedule()
        assert len(scheduler.running) == left
        scheduler.running.pop()


def window(rate, room):
    return {"rate": rate, "room": room} | dict.fromkeys(
        ("running", "ends", "mixed steps/s", "pure steps/s", "mixed ms", "pure ms", "mixed tokens"), 1.0
    )


@pytest.mark.parametrize("gain", [1.0, 1.1, 0.9])
def test_a_speed_that_rises_steadily_is_no_gain(gain):
    from benchmarks.admission import rows_of

    windows = [window(1000.0 * 1.1**at * (gain if at % 2 else 1.0), 16.0 * (at % 2)) for at in range(8)]
    found = {row.what: row for row in rows_of("speck", windows)}
    ratio = found["  ratio to the windows around it, median"]
    assert ratio.value == pytest.approx(gain) and ratio.against_value == pytest.approx(gain)


def test_steps_are_counted_by_kind_and_what_the_file_says_is_followed(scheduler, monkeypatch, tmp_path):
    from benchmarks.admission import say
    from rollout.engine.scheduling.scheduler import KeepingScheduler

    scheduler._file, scheduler._look_at, scheduler._ended_at = tmp_path / "admission", 0.0, 1.0
    scheduler._counts = {"pure": [0, 0.0, 0], "mixed": [0, 0.0, 0]}
    monkeypatch.setattr(KeepingScheduler, "update_from_output", lambda self, *outputs: "results")
    for tokens in (3, 3, 9):
        step = SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": 1, "b": 1, "c": 1})
        assert scheduler.update_from_output(step, None) == "results"
    say(scheduler._file, 5)
    scheduler.schedule()
    counts = json.loads((tmp_path / "admission.counts").read_text())
    assert scheduler.places == 5 and counts["pure"][::2] == [2, 6] and counts["mixed"][::2] == [1, 9]
