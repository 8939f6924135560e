"""The block manager of `touch_blocks_at_their_ends` against vLLM's own: each sequence has the same blocks."""

import random

import pytest
import torch


def setup_module():
    """vLLM takes seconds to import, and each worker of pytest collects this file."""
    global FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request, RequestStatus
    global SamplingParams, get_request_block_hasher, init_none_hash, sha256, touch_blocks_at_their_ends
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request, RequestStatus

    from rollout.engine.scheduling.plain_steps import touch_blocks_at_their_ends


BLOCK, BLOCKS, RUNNING, STEPS = 4, 17, 3, 200


def request(name, tokens):
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=40), None, block_hasher=hasher)


def play(quick, seed):
    """Sequences that are admitted, decode, end and are preempted as in vLLM's scheduler; what blocks each has when."""

    class CountedManager(KVCacheManager):
        calls = 0

        def allocate_slots(self, *args, **kwargs):
            self.calls += 1
            return super().allocate_slots(*args, **kwargs)

    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    cache = CountedManager(config, max_model_len=64, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
    if quick:
        touch_blocks_at_their_ends(cache, BLOCK)
    draw, seen, running, waiting = random.Random(seed), [], [], []
    for step in range(STEPS):
        if not waiting:
            prompt = [100 * step + at for at in range(draw.randrange(1, 14))]
            waiting.append((request(f"r{step}", prompt), draw.randrange(1, 30)))
        if len(running) < RUNNING:
            running.append(waiting.pop(0))
        for sequence, longest in list(running):
            new = sequence.num_tokens - sequence.num_computed_tokens
            if cache.allocate_slots(sequence, new) is None:
                victim = running.pop()
                cache.free(victim[0])
                victim[0].num_computed_tokens, victim[0].status = 0, RequestStatus.PREEMPTED
                waiting.insert(0, victim)
                seen.append(("preempted", victim[0].request_id))
                break
            sequence.status = RequestStatus.RUNNING
            sequence.num_computed_tokens += new
            sequence.append_output_token_ids([draw.randrange(1000)])
            cache.cache_blocks(sequence, sequence.num_computed_tokens)
            seen.append((sequence.request_id, cache.get_block_ids(sequence.request_id)))
            if sequence.num_output_tokens >= longest:
                sequence.status = RequestStatus.FINISHED_STOPPED
                cache.free(sequence)
                running.remove((sequence, longest))
                again = request("again", list(sequence.all_token_ids))
                seen.append(("shared", cache.get_computed_blocks(again)[1]))
    return seen, cache.calls


@pytest.mark.parametrize("seed", range(4))
def test_every_sequence_has_the_same_blocks_and_shares_the_same(seed):
    (plain, calls), (quick, fewer) = play(False, seed), play(True, seed)
    assert quick == plain
    assert fewer < calls
    kinds = {name for name, _ in plain}
    assert "preempted" in kinds and max(found for name, found in plain if name == "shared") > BLOCK
