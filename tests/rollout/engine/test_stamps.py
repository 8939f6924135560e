"""Every token carries the version that sampled it and its own log-probability, and arrives once.

The real vLLM runs `tests/harness/marked.py`, whose weights mark their version: swaps at about every step, without a
pause, under sequences of many lengths, long prompts in chunks, stop tokens, aborts, preemptions for want of KV cache,
and a front process that does not read for a while. Our scheduler's own records are tested without vLLM's engine.
"""

import json
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from rollout.engine.worker import WorkerExtension


def setup_module():
    """vLLM takes seconds to import, and each worker of pytest collects this file."""
    global Engine, KeepingScheduler, PauseState, Record, Reports, StampedOutput, WorkerExtension
    global touch_blocks_at_their_ends, unpack
    from vllm.v1.core.sched.interface import PauseState

    from rollout.engine.scheduling.plain_steps import touch_blocks_at_their_ends
    from rollout.engine.scheduling.record import Record, unpack
    from rollout.engine.scheduling.scheduler import KeepingScheduler, Reports
    from rollout.engine.vllm_engine import Engine
    from rollout.engine.worker import StampedOutput, WorkerExtension


SCENE_S = 280
ENOUGH = {"swaps": 60, "done": 50, "joined": 5, "crossed": 20, "aborted": 1, "stopped": 5, "preempted": 2}
"""How often each of these has to happen for the scene to end."""


def play(scene, folder, tensor_parallel=1):
    """What `tests/harness/marked.py` found."""
    argv = [sys.executable, "-m", "tests.harness.marked", folder, scene, str(tensor_parallel), json.dumps(ENOUGH)]
    played = subprocess.run(argv, capture_output=True, text=True, timeout=SCENE_S, cwd=Path(__file__).parents[3])
    assert played.returncode == 0, played.stderr[-3000:]
    return json.loads(played.stdout.splitlines()[-1])


def judge(found):
    """Every token was right, and all that is meant to go wrong around it has happened."""
    assert not found["wrong"] and not found["backwards"] and not found["misshapen"] and not found["misended"]
    assert all(found[key] >= least for key, least in ENOUGH.items())
    assert found["counted"] == found["arrived"] > 0
    assert found["room"] == 40 // (40 / 32 + 0.5)


@pytest.mark.vllm
@pytest.mark.parametrize("scene", ["asynchronous", pytest.param("synchronous", marks=pytest.mark.long)])
def test_every_token_arrives_once_with_its_version_and_log_probability(scene, tmp_path):
    found = play(scene, tmp_path)
    assert found["asynchronous"] == (scene == "asynchronous")
    judge(found)


@pytest.mark.long
@pytest.mark.vllm
def test_a_version_read_when_a_step_s_output_is_taken_would_be_seen(tmp_path):
    assert play("late", tmp_path)["wrong"] > 50


def test_a_step_has_the_version_that_it_was_launched_with():
    from vllm.v1.outputs import ModelRunnerOutput

    class FakeOutput(StampedOutput):
        """A step's output that is still on a GPU."""

        def __init__(self, output):
            self.output = output

        def get_output(self):
            return self.output

    steps = [ModelRunnerOutput(req_ids=[], req_id_to_index={}) for _ in range(3)]
    outputs = iter([FakeOutput(steps[0]), steps[1], None, FakeOutput(steps[2])])
    worker = WorkerExtension()
    worker.model_runner, worker.device = SimpleNamespace(sample_tokens=lambda _: next(outputs)), torch.device("cuda")
    worker.rl_stamp(3)
    launched = worker.model_runner.sample_tokens(None)
    worker.rl_stamp(4)
    assert worker.model_runner.sample_tokens(None).rl_version == 4
    assert worker.model_runner.sample_tokens(None) is None
    assert worker.model_runner.sample_tokens(None).get_output().rl_version == 4
    assert launched.get_output() is steps[0] and steps[0].rl_version == 3


@pytest.mark.parametrize(("eager", "graphs"), [(True, 0), (False, 1)])
def test_where_steps_are_eager_on_a_cpu_nothing_is_compiled(eager: bool, graphs: int):
    worker, compiled = WorkerExtension(), []
    worker.model_runner, worker.device = SimpleNamespace(sample_tokens=None), torch.device("cpu")
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager))
    try:
        worker.rl_stamp(0)
        torch.compile(torch.square, backend=lambda graph, _: compiled.append(graph) or graph)(torch.ones(2))
    finally:
        torch.compiler.set_stance("default")
    assert len(compiled) == graphs


def test_the_last_output_carries_the_whole_sequence():
    record = Record(SimpleNamespace(output_token_ids=[5, 6, 7]), array("f", [-1.0, -0.5, -2.0]), array("i", [3, 3, 4]))
    output = SimpleNamespace(request_id="r1", new_token_ids=[7], kv_transfer_params=None)
    record.finish(output)
    assert output.new_token_ids == [5, 6, 7]
    assert [*map(list, unpack(output))] == [[-1.0, -0.5, -2.0], [3, 3, 4]]


def test_a_token_without_a_log_probability_ends_the_engine():
    record = Record(SimpleNamespace(output_token_ids=[5, 6]), array("f", [-1.0]), array("i", [3]))
    with pytest.raises(RuntimeError, match="vLLM sampled 2 tokens and 1 log-probabilities for request r1"):
        record.finish(SimpleNamespace(request_id="r1", new_token_ids=[6], kv_transfer_params=None))


def test_several_tokens_that_a_step_accepts_are_kept_with_their_log_probabilities_and_version():
    """As with speculation: the rows of a sequence follow each other."""
    scheduler = KeepingScheduler.__new__(KeepingScheduler)
    scheduler.rl_records, scheduler.rl_tokens = {name: Record(SimpleNamespace()) for name in "ab"}, 0
    values = SimpleNamespace(logprobs=torch.tensor([[-1.0], [-2.0], [-3.0]]), cu_num_generated_tokens=[0, 2, 3])
    step = SimpleNamespace(rl_version=4, req_id_to_index={"a": 0, "b": 1})
    tokens = {"a": [5, 6], "b": [7]}
    outputs = [
        SimpleNamespace(request_id=name, new_token_ids=new, routed_experts=None, finish_reason=None)
        for name, new in tokens.items()
    ]
    assert [*scheduler._rl_keep(outputs, values, step)] == []
    kept = {name: (list(record.logprobs), list(record.versions)) for name, record in scheduler.rl_records.items()}
    assert kept == {"a": ([-1.0, -2.0], [4, 4]), "b": ([-3.0], [4])}
    assert scheduler.rl_tokens == 3


class FakeBlocks:
    """Stands for vLLM's `KVCacheManager`: as many blocks as it was asked for, and how many of them it shares."""

    empty_kv_cache_blocks = "no new block"

    def __init__(self):
        self.room, self.shared, self.calls = 0, 0, 0

    def allocate_slots(self, request, num_new_tokens, num_lookahead_tokens=0):
        end, self.calls = request.num_computed_tokens + num_new_tokens, self.calls + 1
        new = -(-end // 4) - self.room // 4
        self.room += 4 * new
        return f"{new} new blocks" if new else self.empty_kv_cache_blocks

    def cache_blocks(self, request, num_computed_tokens):
        self.shared, self.calls = max(self.shared, num_computed_tokens // 4), self.calls + 1


def test_blocks_are_touched_at_their_ends_only_and_come_out_the_same():
    from vllm.v1.request import RequestStatus

    plain, quick = FakeBlocks(), FakeBlocks()
    touch_blocks_at_their_ends(quick, 4)
    request = SimpleNamespace(num_computed_tokens=0, status=RequestStatus.WAITING)
    for number in (6, *[1] * 30):
        answers = {blocks.allocate_slots(request, number, num_lookahead_tokens=0) for blocks in (plain, quick)}
        assert len(answers) == 1
        request.num_computed_tokens += number
        request.status = RequestStatus.RUNNING
        for blocks in (plain, quick):
            blocks.cache_blocks(request, request.num_computed_tokens)
        assert plain.room == quick.room and plain.shared - quick.shared in (0, 1)
    request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
    quick.allocate_slots(request, 1)
    assert plain.shared == quick.shared == 9 and plain.calls == 62 and quick.calls == 17


def report(tokens, stall_s):
    counts = {"tokens": tokens, "preempted": 2, "stall_s": stall_s}
    return SimpleNamespace(num_running_reqs=5, num_waiting_reqs=1, kv_cache_usage=0.25, kv_connector_stats=counts)


def test_the_stats_are_those_of_the_newest_report_and_the_longest_stall_since_the_last_call():
    engine = Engine(None, reports := Reports(), None)
    reports.record(report(100, 0.5), None, engine_idx=0)
    reports.record(report(300, 0.1), None, engine_idx=0)
    reports.record(None, None, engine_idx=0)
    stats = engine.stats()
    assert engine.tokens == 300 and stats.pop("tokens_per_s") > 0
    assert 0 < stats.pop("running") < 5  # none ran before the first report
    assert stats == {"waiting": 1, "kv_usage": 0.25, "preempted": 2, "stall_s": 0.5}
    assert engine.stats()["stall_s"] == engine.stats()["tokens_per_s"] == 0
    assert engine.stats()["running"] == pytest.approx(5)


def test_sequences_of_an_engine_that_is_paused_count_as_those_that_they_are():
    """vLLM takes none for unfinished then, also while the step under way at the pause is taken up."""
    scheduler = KeepingScheduler.__new__(KeepingScheduler)
    scheduler._pause_state, scheduler.kv_cache_manager = PauseState.PAUSED_ALL, SimpleNamespace(usage=0.5)
    scheduler.running, scheduler.waiting, scheduler.num_waiting_for_streaming_input = ["a", "b"], ["c"], 0
    scheduler.skipped_waiting = scheduler.kv_holding_waiting = []
    scheduler.rl_tokens = scheduler.rl_preempted = scheduler.rl_sampled_at = scheduler.rl_report_at = 0
    scheduler.rl_stall_s, scheduler.rl_idle = 0.0, False
    stats = scheduler._rl_report(sampled=True)
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 1)
    assert scheduler.rl_sampled_at > 0 and not scheduler.rl_idle  # the pause counts as a stall
