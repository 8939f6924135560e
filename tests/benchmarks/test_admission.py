"""`benchmarks/runs/switched.py`: requests that wait for places get them several at a time. vLLM's part of a step is
played; the queues are its own."""

import json
from math import inf
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.admission import rows_of, say
from benchmarks.runs.switched import Switched
from rollout.engine.scheduler import KeepingScheduler

PLACES = 8


@pytest.fixture
def scheduler(monkeypatch):
    """Eight places, of which two are waited for; `preempts` are taken from those that run at the next step."""
    made = Switched.__new__(Switched)
    made.scheduler_config, made.policy = SimpleNamespace(max_num_seqs=PLACES), SchedulingPolicy.FCFS
    made.waiting, made.running, made.together = create_request_queue(made.policy), [], 2
    made._look_at = inf
    made.preempts = []

    def schedule(self, throttle_prefills=False):
        for request in self.preempts:
            self.running.remove(request)
            self.waiting.prepend_request(request)
        while self.waiting and not self.preempts and len(self.running) < PLACES:
            self.running.append(self.waiting.pop_request())
        self.preempts = []
        return "a step"

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    return made


def wait(scheduler, *names):
    for name in names:
        scheduler.waiting.add_request(name)


def test_an_empty_server_admits_all_that_have_places(scheduler):
    wait(scheduler, *range(12))
    assert scheduler.schedule() == "a step"
    assert scheduler.running == [*range(8)] and [*scheduler.waiting] == [8, 9, 10, 11]


def test_a_full_server_admits_two_when_two_have_ended(scheduler):
    wait(scheduler, *range(12))
    scheduler.schedule()
    scheduler.running.remove(3)
    assert scheduler.schedule(False) == "a step"
    assert 8 not in scheduler.running and [*scheduler.waiting] == [8, 9, 10, 11]
    scheduler.running.remove(5)
    scheduler.schedule()
    assert scheduler.running[-2:] == [8, 9] and [*scheduler.waiting] == [10, 11]


def test_the_last_one_that_waits_is_not_held_up(scheduler):
    wait(scheduler, *range(9))
    scheduler.schedule()
    scheduler.running.remove(0)
    scheduler.schedule()
    assert scheduler.running[-1] == 8 and not scheduler.waiting


def test_whom_a_step_preempts_waits_before_all_others(scheduler):
    wait(scheduler, *range(12))
    scheduler.schedule()
    scheduler.running.remove(0)
    scheduler.preempts = [7, 6]  # as vLLM takes them, from the end: the earliest of them is to come first
    scheduler.schedule()
    assert [*scheduler.waiting] == [6, 7, 8, 9, 10, 11] and len(scheduler.running) == 5
    scheduler.schedule()
    assert scheduler.running[-3:] == [6, 7, 8]


def window(rate, together):
    return {"rate": rate, "together": together} | dict.fromkeys(
        ("running", "ends", "mixed steps/s", "pure steps/s", "mixed ms", "pure ms", "mixed tokens"), 1.0
    )


@pytest.mark.parametrize("gain", [1.0, 1.1, 0.9])
def test_a_speed_that_rises_steadily_is_no_gain(gain):
    windows = [window(1000.0 * 1.1**at * (gain if at % 2 else 1.0), 1 + 15 * (at % 2)) for at in range(8)]
    found = {row.what: row for row in rows_of("speck", windows)}
    ratio = found["  ratio to the windows around it, median"]
    assert ratio.value == pytest.approx(gain) and ratio.against_value == pytest.approx(gain)


def test_steps_are_counted_by_kind_and_what_the_file_says_is_followed(scheduler, monkeypatch, tmp_path):
    scheduler._file, scheduler._look_at, scheduler._ended_at = tmp_path / "admission", 0.0, 1.0
    scheduler._counts = {"pure": [0, 0.0, 0], "mixed": [0, 0.0, 0]}
    monkeypatch.setattr(KeepingScheduler, "update_from_output", lambda self, *outputs: "results")
    for tokens in (3, 3, 9):
        step = SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": 1, "b": 1, "c": 1})
        assert scheduler.update_from_output(step, None) == "results"
    say(scheduler._file, 5)
    scheduler.schedule()
    counts = json.loads((tmp_path / "admission.counts").read_text())
    assert scheduler.together == 5 and counts["pure"][::2] == [2, 6] and counts["mixed"][::2] == [1, 9]
