"""Ends are sent several at a time, none of them late: by vLLM's real scheduler, whose model is played."""

import time
from math import inf
from types import SimpleNamespace

import pytest

from benchmarks.weights.shapes import folder_of


def setup_module():
    """vLLM takes seconds to import, and each worker of pytest collects this file."""
    global EMPTY_MODEL_RUNNER_OUTPUT, END_WAITS, KeepingAsyncScheduler, KeepingScheduler, OTHERS, PauseState
    global PlainSteps, PlayedModel, RequestStatus, engine_config, scheduler_of, scheduling
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
    from vllm.v1.request import RequestStatus

    from benchmarks.runs.played_model import PlayedModel, engine_config, scheduler_of
    from rollout.engine.scheduling import scheduler as scheduling
    from rollout.engine.scheduling.plain_steps import PlainSteps
    from rollout.engine.scheduling.record import OTHERS
    from rollout.engine.scheduling.scheduler import END_WAITS, KeepingAsyncScheduler, KeepingScheduler


LONG_AGO_S = 6000.0
"""Time that a sequence is said to have taken: its end may wait for a minute then."""
STEP_S = 0.02
KINDS = {"synchronous": 1, "asynchronous": 2}
"""How many steps a model is ahead."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return engine_config(folder_of("speck", tmp_path_factory.mktemp("speck")), 12, 64, 96)


@pytest.fixture(params=KINDS)
def model(request, config):
    """A scheduler that has announced its work once, and announces nothing more by itself."""
    ahead = KINDS[request.param]
    kind = KeepingScheduler if ahead == 1 else KeepingAsyncScheduler
    return PlayedModel(scheduler_of(kind, config, 400), ahead, lambda *_: (50, -1.0))


def add(model, ages=LONG_AGO_S, **lengths):
    """Requests of these lengths, which came so long ago."""
    for name, length in lengths.items():
        model.add(name, [100] * 20, max_tokens=length, logprobs=0)
        model.scheduler.requests[name].arrival_time = time.time() - ages


def steps(model, number):
    """The names of those whose ends were sent after each of so many steps."""
    sent = []
    for _ in range(number):
        model.schedule()
        sent.append([output.request_id for output in model.take()])
        model.scheduler.rl_report_at = inf
    return sent


def test_an_end_waits_for_others_until_something_is_sent_anyway(model):
    add(model, first=3, second=5, third=40)
    assert not any(steps(model, 10))
    model.scheduler.rl_report_at = 0.0  # a report is due
    assert steps(model, 2) == [["first", "second"], []]
    assert model.scheduler.rl_ends_due == inf


@pytest.mark.parametrize("took_s", [0.1, 2.0, 10.0, 40.0])
def test_no_end_waits_longer_than_its_share_of_the_time_it_took(model, took_s, monkeypatch):
    """By steps of 20 ms: the end of one that took 0.1 s may wait for none of them, of one that took 10 s for five."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(scheduling, "time", SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now))
    add(model, running=90)
    steps(model, 4)
    model.add("ends", [100] * 20, max_tokens=3, logprobs=0)
    model.scheduler.requests["ends"].arrival_time = clock.now - took_s
    ended = None
    while not any(steps(model, 1)):
        ended = ended or (clock.now if model.scheduler.rl_ends else None)
        clock.now += STEP_S
    waited_s, may_s = clock.now - (ended or clock.now), END_WAITS * took_s
    assert waited_s <= may_s + END_WAITS  # the steps that it ran in belong to its time too
    assert waited_s >= may_s - 2 * STEP_S


def test_a_young_end_takes_an_old_one_along(model):
    add(model, old=3, running=40)
    assert not any(steps(model, 8))
    assert model.scheduler.rl_ends_due == pytest.approx(time.time() + END_WAITS * LONG_AGO_S, abs=5)
    add(model, ages=0.0, young=2)
    assert [names for names in steps(model, 6) if names] == [["old", "young"]]


def test_where_nothing_is_left_to_run_none_waits(model):
    add(model, first=3, last=6)
    sent = steps(model, 12)
    assert [names for names in sent if names] == [["first", "last"]]


def test_an_end_goes_with_the_token_of_a_request_that_is_not_kept(model):
    add(model, first=3, running=40)
    assert not any(steps(model, 8))
    model.add("probe", [100] * 20, max_tokens=1)
    assert [names for names in steps(model, 4) if names] == [["probe", "first"]]


def test_a_pause_lets_none_wait(model):
    add(model, first=3, running=40)
    assert not any(steps(model, 8))
    model.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert model.scheduler.has_requests()  # so vLLM calls once more
    assert told(model) == ["first"]
    assert not model.scheduler.has_requests()


def test_an_abort_of_the_last_that_runs_lets_none_wait(model):
    add(model, first=3, running=40)
    assert not any(steps(model, 8))
    model.scheduler.finish_requests("running", RequestStatus.FINISHED_ABORTED)
    while model.output():  # steps that are under way are not taken any more
        pass
    model.scheduler.finished_req_ids.clear()
    assert model.scheduler.has_requests()
    assert told(model) == ["first"]
    assert not model.scheduler.has_requests()


def told(model):
    """Ends that are sent after a step of nothing."""
    step = model.scheduler.schedule()
    assert not step.total_num_scheduled_tokens
    sent = model.scheduler.update_from_output(step, EMPTY_MODEL_RUNNER_OUTPUT)
    return [output.request_id for each in sent.values() for output in each.outputs]


def test_a_request_that_names_others_is_all_of_them(model):
    model.add("a", [100] * 20, max_tokens=3, logprobs=0, extra_args={OTHERS: ["b", "c"]})
    assert sorted(model.scheduler.rl_records) == ["a", "b", "c"]
    assert [sorted(names) for names in steps(model, 8) if names] == [["a", "b", "c"]]


def taken(model, number):
    """What the scheduler sends after each of so many steps, by the number of the front process."""
    for _ in range(number):
        model.schedule()
        if (found := model.output()) is not None:
            yield from model.scheduler.update_from_output(*found).items()


def test_ends_go_to_the_first_front_process(model):
    add(model, only=3)
    assert [client for client, sent in taken(model, 8) if sent.outputs] == [0]


def test_the_first_report_counts_the_first_token_and_no_stall(model):
    add(model, running=40)
    (stats,) = [sent.scheduler_stats for _, sent in taken(model, 3) if sent.scheduler_stats][:1]
    assert stats.kv_connector_stats == {"tokens": 1, "preempted": 0, "stall_s": 0.0}
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 0)


def test_a_step_that_starts_no_prompt_is_vllm_s(model, monkeypatch):
    monkeypatch.setattr(PlainSteps, "schedule", lambda self, throttle_prefills: throttle_prefills, raising=False)
    assert model.scheduler.schedule(True) is True
