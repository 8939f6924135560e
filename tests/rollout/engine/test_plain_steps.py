"""The shorter ways of `PlainSteps` against vLLM's own: two real schedulers get the same requests, aborts, pauses and
tokens, with a KV cache that is too small now and then, and plan the same steps and leave every request in the same
state. The model is played (`benchmarks/runs/played_model.py`)."""

import random
from collections import Counter
from copy import copy
from dataclasses import fields
from functools import partialmethod

import pytest
import torch

from benchmarks.weights.shapes import folder_of
from tests.harness.lanes import long_but


def setup_module():
    """vLLM takes seconds to import, and each worker of pytest collects this file."""
    global ABSENT, AsyncScheduler, BLOCK, EncoderCacheManager, KeepingAsyncScheduler, KeepingScheduler
    global MultiModalFeatureSpec, PauseState, PlaceholderRange, PlayedModel, Record, RepetitionDetectionParams
    global RequestStatus, SamplingParams, Scheduler, SlidingWindowSpec, VERSION, engine_config, scheduler_of
    global touch_blocks_at_their_ends, unpack
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import SlidingWindowSpec
    from vllm.v1.request import RequestStatus

    from benchmarks.runs.played_model import BLOCK, VERSION, PlayedModel, engine_config, scheduler_of
    from rollout.engine.scheduling.plain_steps import ABSENT, touch_blocks_at_their_ends
    from rollout.engine.scheduling.record import Record, unpack
    from rollout.engine.scheduling.scheduler import KeepingAsyncScheduler, KeepingScheduler


STEPS, STOP, END, LONGEST, IMAGE = 500, 7, 8, 96, 8
KINDS = {
    "synchronous": (1, False),
    "asynchronous": (2, False),
    "second runner": (2, True),
}
"""How many steps a model is ahead, and whether it is that of vLLM's second model runner."""
OF_ITS_OWN = {"arrival_time", "_block_hasher", "mm_features", "next_decode_eligible_step"}
"""Attributes in which two requests may differ: the last one counts only with pipeline parallelism."""
VIEWS = {"output_token_ids", "all_token_ids"}
"""Views of lists that are attributes too."""
NOT_COMPARED = OF_ITS_OWN | VIEWS


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return engine_config(folder_of("speck", tmp_path_factory.mktemp("speck")), 12, 64, LONGEST)


def sample(name, number):
    """A request's token of this number, and its log-probability."""
    token = random.Random(f"{name} {number}").randrange(64)
    return token, -token / 64


class Pixels:
    """Data of an image, in no form that anything reads."""

    def __contains__(self, key):
        return True


def image(name, prompt):
    """A feature that ends with the prompt, which is when it is freed last."""
    place = PlaceholderRange(offset=len(prompt) - IMAGE, length=IMAGE)
    return [MultiModalFeatureSpec(data=Pixels(), modality="image", identifier=name, mm_position=place)]


def told(step):
    """What a worker learns of a step."""
    found = {field.name: getattr(step, field.name) for field in fields(step)}
    new, cached = found.pop("scheduled_new_reqs"), found.pop("scheduled_cached_reqs")
    found["new"] = [(each.req_id, each.prompt_token_ids, each.block_ids, each.num_computed_tokens) for each in new]
    found["cached"] = {field.name: getattr(cached, field.name) for field in fields(cached)}
    return found | {"scheduled": list(step.num_scheduled_tokens)}  # in order


def state(scheduler):
    """All that the scheduler knows of its requests, in which order, and which blocks are theirs, shared and free. The
    values are the scheduler's own, to be compared before its next step: copies would take most of a test's time."""
    manager, encoder = scheduler.kv_cache_manager, scheduler.encoder_cache_manager
    requests = {
        name: {key: value for key, value in vars(each).items() if key not in NOT_COMPARED}
        for name, each in scheduler.requests.items()
    }
    blocks = {name: manager.get_block_ids(name) for name in requests}
    order = [[each.request_id for each in queue] for queue in (scheduler.running, scheduler.waiting)]
    free = [each.block_id for each in manager.block_pool.free_block_queue.get_all_free_blocks()]
    shared = len(manager.block_pool.cached_block_hash_to_block)
    return requests, blocks, order, free, shared, (encoder.cached, encoder.num_free_slots, set(encoder.freeable))


def play(kind, config, seed, blocks, kept=1.0, seen_share=0.0):
    """Both schedulers through the same events. How often what was to happen has happened."""
    ahead, second = KINDS[kind]
    plain, ours = (Scheduler, KeepingScheduler) if ahead == 1 else (AsyncScheduler, KeepingAsyncScheduler)
    theirs, own = both = [PlayedModel(scheduler_of(each, config, blocks), ahead, sample) for each in (plain, ours)]
    theirs.scheduler.use_v2_model_runner = own.scheduler.use_v2_model_runner = second
    # it shares a block a step later, as `test_blocks.py` shows
    touch_blocks_at_their_ends(theirs.scheduler.kv_cache_manager, BLOCK)
    for each in both if seen_share else ():
        each.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=5 * IMAGE)
        each.scheduler.max_num_encoder_input_tokens = 5 * IMAGE
    draw, seen, prompt, sent = random.Random(seed), Counter(), [100] * 20, ({}, {})
    shorter = own.scheduler.rl_decode
    own.scheduler.rl_decode = lambda: seen.update(["shorter" if (step := shorter()) else "whole"]) or step
    for number in range(STEPS):
        while draw.random() < (0.25 if blocks == 400 else 0.12):
            prompt = prompt if draw.random() < 0.5 else draw.choices(range(100, 120), k=draw.randrange(1, 60))
            given = {"max_tokens": draw.randrange(1, 80)} | draw.choice([{"stop_token_ids": [STOP]}, {"end": END}])
            given |= {"logprobs": 0} if draw.random() < kept else {}
            shows = len(prompt) > IMAGE and draw.random() < seen_share
            picture = f"image {draw.randrange(6)}"
            for each in both:
                images = image(picture, prompt) if shows else None
                each.add(f"r{number}-{seen['added']}", prompt, images, **given)
            seen["images"] += shows
            seen["added"] += 1
        if draw.random() < 0.05 and theirs.scheduler.running:
            name = draw.choice(theirs.scheduler.running).request_id
            for each in both:
                each.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            seen["aborted"] += 1
        if draw.random() < 0.05:
            paused = draw.choice([PauseState.PAUSED_ALL, PauseState.UNPAUSED, PauseState.UNPAUSED])
            for each in both:
                each.scheduler.set_pause_state(paused)
            seen["paused"] += paused == PauseState.PAUSED_ALL
        if draw.random() < 0.02:  # all that run are preempted, with tokens under way
            for each in both:
                each.scheduler.reset_prefix_cache(reset_running_requests=True)
            seen["reset"] += 1
        steps = [each.schedule() for each in both]
        assert told(steps[0]) == told(steps[1]), number
        seen["preempted"] += len(steps[0].preempted_req_ids or ())
        for each, outputs in zip(both, sent, strict=True):
            for output in each.take():
                outputs.setdefault(output.request_id, []).append(output)
        assert state(theirs.scheduler) == state(own.scheduler), number
    for name, outputs in sent[1].items():
        if outputs[-1].finish_reason is not None:
            judge(name, *sent, seen)
    assert not own.scheduler.rl_records.keys() - own.scheduler.requests.keys()
    if kept == 1:
        assert own.scheduler.rl_tokens == sum(len(each.new_token_ids) for name in sent[0] for each in sent[0][name])
    return seen


def judge(name, theirs, own, seen):
    """The request has ended in the same way, with the same tokens; with its own log-probabilities if it is kept."""
    last, same = own[name][-1], theirs[name][-1]
    assert (last.finish_reason, last.stop_reason) == (same.finish_reason, same.stop_reason)
    tokens = [token for each in own[name] for token in each.new_token_ids]
    assert tokens == [token for each in theirs[name] for token in each.new_token_ids]
    seen[str(last.finish_reason)] += 1
    seen["end"] += tokens[-1:] == [END]
    if last.kv_transfer_params:
        assert len(own[name]) == 1
        logprobs, versions = map(list, unpack(last))
        assert logprobs == [-token / 64 for token in tokens]
        assert versions == [VERSION] * len(tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", long_but(range(3), 0))
@pytest.mark.parametrize("blocks", [20, 400])
def test_steps_requests_and_tokens_are_those_of_vllm(kind, seed, blocks, config):
    seen = play(kind, config, seed, blocks)
    assert seen["shorter"] > (50 if blocks == 400 else 5) and seen["whole"] > 50
    assert min(seen[event] for event in ("aborted", "paused", "reset", "stop", "end", "length")) > 1
    assert seen["preempted"] > (15 if blocks == 20 else 3)


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_block_is_left_for_a_sequence_vllm_preempts_one(kind, config):
    """Two sequences decode and none waits: only the count of free blocks shows that vLLM has to decide."""
    ahead, second = KINDS[kind]
    model = PlayedModel(
        scheduler_of(KeepingScheduler if ahead == 1 else KeepingAsyncScheduler, config, 8), ahead, sample
    )
    model.scheduler.use_v2_model_runner = second
    for name in ("a", "b"):
        model.add(name, [100] * 20, max_tokens=70, logprobs=0)
    ended = set()
    for _ in range(300):
        model.schedule()
        ended.update(output.request_id for output in model.take())
    assert ended == {"a", "b"} and model.scheduler.rl_preempted


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_not_kept_may_run_beside(kind, config):
    seen = play(kind, config, 5, 400, kept=0.9)
    assert seen["shorter"] and seen["whole"] > seen["shorter"]


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_kept_and_freed_as_vllm_does(kind, config):
    seen = play(kind, config, 1, 400, seen_share=0.5)
    assert seen["shorter"] > 50 and seen["images"] > 30


def test_other_schedulers_get_vllm_s_steps(config, monkeypatch):
    assert scheduler_of(KeepingScheduler, config, 400).rl_block == BLOCK
    sliding = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32)
    assert scheduler_of(KeepingScheduler, config, 400, sliding).rl_block == 0
    made = Scheduler.__init__
    for name in ABSENT:
        monkeypatch.setattr(Scheduler, "__init__", partialmethod(init_with, made, name))
        assert scheduler_of(KeepingScheduler, config, 400).rl_block == 0, name


def init_with(self, made, name, **given):
    """vLLM's own, and the attribute of a scheduler that has more to do."""
    made(self, **given)
    setattr(self, name, True)


def test_the_attributes_that_tell_are_vllm_s(config):
    """An attribute that vLLM renames would no longer be compared."""
    scheduler = scheduler_of(Scheduler, config, 400)
    (other,) = {name for name in ABSENT if not hasattr(scheduler, name)}
    assert other in ("aux_output_connector", "enable_return_routed_experts")


def test_a_request_that_may_end_by_other_rules_is_always_vllm_s(config):
    model = PlayedModel(scheduler_of(KeepingScheduler, config, 400), 1, lambda name, number: (number, -1.0))
    model.add("r0", [100] * 20, max_tokens=40, logprobs=0)
    for _ in range(5):
        model.schedule()
        model.take()
    (request,) = model.scheduler.running
    watched = SamplingParams(
        max_tokens=40, repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2)
    )
    rules = {"structured_output_request": "a grammar", "resumable": True, "sampling_params": watched}
    for rule, value in rules.items():
        changed = copy(request)
        setattr(changed, rule, value)
        model.scheduler.rl_records["r0"] = record = Record.of(changed, LONGEST)
        assert record.most == 0 and model.scheduler.rl_decode() is None
    assert Record.of(request, 50).most == 30
    model.scheduler.rl_records["r0"] = record = Record.of(request, LONGEST)
    assert record.most == 40 and model.scheduler.rl_decode() is not None


def test_the_places_are_those_to_which_vllm_holds_requests(config, monkeypatch):
    """vLLM 0.32 has a limit of its own for that."""
    monkeypatch.setattr(config.scheduler_config, "max_num_active_seqs", 5, raising=False)
    scheduler = scheduler_of(KeepingScheduler, config, 400)
    assert scheduler.rl_places == (5 if hasattr(scheduler_of(Scheduler, config, 400), "max_num_active_reqs") else 12)
