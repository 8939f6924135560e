"""The shorter ways of `PlainSteps` against vLLM's own: two real schedulers get the same requests, aborts, pauses and
tokens, with a KV cache that is too small now and then, and plan the same steps and leave every request in the same
state. The model is played."""

import random
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.weights.shapes import folder_of
from rollout.engine.scheduler import KeepingAsyncScheduler, KeepingScheduler, touch_blocks_at_their_ends, unpack

BLOCK, STEPS, STOP, LONGEST = 16, 500, 7, 96
KINDS = {
    "synchronous": (Scheduler, KeepingScheduler, 1, False),
    "asynchronous": (AsyncScheduler, KeepingAsyncScheduler, 2, False),
    "second runner": (AsyncScheduler, KeepingAsyncScheduler, 2, True),
}
"""Both schedulers, how many steps a model is ahead, and whether it is that of vLLM's second model runner."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    init_none_hash(sha256)
    folder = folder_of("speck", tmp_path_factory.mktemp("speck"))
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True,
        max_num_seqs=12, max_num_batched_tokens=64, max_model_len=LONGEST, kv_cache_memory_bytes=1 << 26,
        block_size=BLOCK,
    )  # fmt: skip
    return arguments.create_engine_config()


def made(kind, config, blocks):
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=manager,
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def told(step):
    """What a worker learns of a step."""
    cached = step.scheduled_cached_reqs
    counts = cached.num_computed_tokens, cached.num_output_tokens
    return {
        "scheduled": list(step.num_scheduled_tokens.items()),
        "total": step.total_num_scheduled_tokens,
        "new": [(new.req_id, new.block_ids, new.num_computed_tokens) for new in step.scheduled_new_reqs],
        "cached": [*zip(cached.req_ids, cached.new_block_ids, *counts, strict=True)],
        "resumed": (cached.resumed_req_ids, cached.all_token_ids),
        "gone": (step.finished_req_ids, step.preempted_req_ids or set()),
        "prefix": getattr(step, "num_common_prefix_blocks", None),
    }  # fmt: skip


FIELDS = ("status", "num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders", "is_prefill_chunk",
          "spec_token_ids", "block_hashes", "stop_reason", "num_preemptions", "num_stale_output_tokens",
          "async_tokens_to_discard")  # fmt: skip


def state(scheduler):
    requests = {
        name: ([*each.output_token_ids], [getattr(each, field, None) for field in FIELDS])
        for name, each in scheduler.requests.items()
    }
    order = [[each.request_id for each in queue] for queue in (scheduler.running, scheduler.waiting)]
    return requests, order, scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


class Play:
    """One scheduler and its played model, `depth` steps ahead."""

    def __init__(self, scheduler, depth):
        self.scheduler, self.depth, self.steps = scheduler, depth, deque()
        self.sampled, self.ended, self.plain = Counter(), {}, 0
        self.values = {}

    def add(self, name, prompt, **given):
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(name, list(prompt), SamplingParams(**given), None, block_hasher=hasher))

    def schedule(self):
        step = self.scheduler.schedule()
        names = step.num_scheduled_tokens
        sampling = [name for name in names if not self.scheduler.requests[name].is_prefill_chunk]
        if names:
            self.steps.append((step, sampling))
        return step

    def token(self, name):
        self.sampled[name] += 1
        draw = random.Random(f"{name} {self.sampled[name]}")
        value = -draw.random()
        self.values[name, self.sampled[name]] = value
        return draw.randrange(40), value

    def take(self):
        """The tokens of the oldest step, if the model is as far ahead as it gets."""
        if len(self.steps) < self.depth:
            return
        step, sampling = self.steps.popleft()
        names = list(step.num_scheduled_tokens)
        found = {name: self.token(name) for name in sampling}
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[found[name][0]] if name in found else [] for name in names],
        )
        if isinstance(self.scheduler, KeepingScheduler):
            values = np.array([[found.get(name, (0, 9.0))[1]] for name in names], dtype=np.float32)
            output.logprobs = SimpleNamespace(logprobs=values, cu_num_generated_tokens=None)
            output.rl_version = 3
        for sent in self.scheduler.update_from_output(step, output).values():
            for each in sent.outputs:
                self.ended.setdefault(each.request_id, []).append(each)

    def tokens(self, name):
        return [token for each in self.ended.get(name, []) for token in each.new_token_ids]


def play(kind, config, seed, blocks, kept=1.0):
    """Both schedulers through the same events. How often what was to happen has happened."""
    plain, ours, depth, second = KINDS[kind]
    theirs, own = Play(made(plain, config, blocks), depth), Play(made(ours, config, blocks), depth)
    theirs.scheduler.use_v2_model_runner = own.scheduler.use_v2_model_runner = second
    # it shares a block a step later, as `test_blocks.py` shows
    touch_blocks_at_their_ends(theirs.scheduler.kv_cache_manager, BLOCK)
    draw, seen, prompt = random.Random(seed), Counter(), [100] * 20
    shorter = own.scheduler.rl_decode
    own.scheduler.rl_decode = lambda: seen.update(["shorter" if (step := shorter()) else "whole"]) or step
    for number in range(STEPS):
        while draw.random() < 0.25:
            prompt = prompt if draw.random() < 0.5 else draw.choices(range(100, 120), k=draw.randrange(1, 60))
            given = {"max_tokens": draw.randrange(1, 80), "temperature": 1.0, "stop_token_ids": [STOP]}
            given |= {"logprobs": 0} if draw.random() < kept else {}
            for each in (theirs, own):
                each.add(f"r{number}-{seen['added']}", prompt, **given)
            seen["added"] += 1
        if draw.random() < 0.05 and theirs.scheduler.running:
            name = draw.choice(theirs.scheduler.running).request_id
            for each in (theirs, own):
                each.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            seen["aborted"] += 1
        if draw.random() < 0.05:
            paused = draw.choice([PauseState.PAUSED_ALL, PauseState.UNPAUSED, PauseState.UNPAUSED])
            for each in (theirs, own):
                each.scheduler.set_pause_state(paused)
            seen["paused"] += paused == PauseState.PAUSED_ALL
        steps = [each.schedule() for each in (theirs, own)]
        assert told(steps[0]) == told(steps[1]), number
        seen["preempted"] += len(steps[0].preempted_req_ids or ())
        for each in (theirs, own):
            each.take()
        assert state(theirs.scheduler) == state(own.scheduler), number
    finished = [name for name, sent in own.ended.items() if sent[-1].finish_reason is not None]
    for name in finished:
        (last,) = [each for each in own.ended[name] if each.finish_reason is not None]
        same = theirs.ended[name][-1]
        assert theirs.tokens(name) == own.tokens(name)
        assert (last.finish_reason, last.stop_reason) == (same.finish_reason, same.stop_reason)
        seen[str(last.finish_reason)] += 1
        if last.kv_transfer_params:
            logprobs, versions = unpack(last.kv_transfer_params)
            assert logprobs == pytest.approx([own.values[name, at + 1] for at in range(len(logprobs))])
            assert versions == [3] * len(logprobs) == [3] * len(own.tokens(name))
    assert not own.scheduler.rl_records.keys() - own.scheduler.requests.keys()
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [20, 400])
def test_steps_requests_and_tokens_are_those_of_vllm(kind, seed, blocks, config):
    seen = play(kind, config, seed, blocks)
    assert seen["shorter"] > (50 if blocks == 400 else 5) and seen["whole"] > 50
    assert min(seen[event] for event in ("aborted", "paused", "stop", "length")) > 1
    assert (seen["preempted"] > 3) == (blocks == 20)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_not_kept_may_run_beside(kind, config):
    seen = play(kind, config, 5, 400, kept=0.9)
    assert seen["shorter"] and seen["whole"] > seen["shorter"]
