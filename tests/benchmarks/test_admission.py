"""`benchmarks/runs/switched.py`: requests that wait for places get them several at a time. vLLM's part of a step is
played; the queues are its own."""

from math import inf
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.runs.switched import Switched

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
