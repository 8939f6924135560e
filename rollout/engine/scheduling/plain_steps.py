"""Steps in which sequences decode a token each, without most of vLLM's Python. Runs in vLLM's engine process.

vLLM's scheduler goes through all sequences twice per step: 512 take most of a step's time, and the GPU waits. Sequences
are left as vLLM would leave them, so any step may be of either kind. Holds for models whose layers all attend to the
whole sequence, without speculative tokens, pipeline parallelism, KV transfers and returned routes.
"""

from operator import attrgetter
from typing import Any

from rollout.engine.door.vllm_scheduler import (
    AsyncScheduler,
    FullAttentionSpec,
    PauseState,
    Request,
    RequestStatus,
    Scheduler,
)
from rollout.engine.scheduling.record import Record

ABSENT = (
    *("connector", "ec_connector", "aux_output_connector", "perf_metrics", "num_spec_tokens", "use_pp"),
    *("defer_block_free", "need_mamba_block_aligned_split", "needs_kv_cache_zeroing", "enable_return_routed_experts"),
)
"""Attributes that forbid plain steps. The last one means returned routes up to vLLM 0.30, `aux_output_connector`
since."""
RUNNING = RequestStatus.RUNNING
(STALE,) = {"num_stale_output_tokens", "async_tokens_to_discard"} & {*Request.__init__.__code__.co_names}
"""Name of the count of tokens launched before a request was preempted."""
stale = attrgetter(STALE)


class PlainSteps(Scheduler):
    """`rl_block`: tokens of a KV block; 0 forbids plain steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rl_records: dict[str, Record] = {}
        groups = self.kv_cache_config.kv_cache_groups
        full = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec
        if full and not self.num_spec_tokens and self.connector is None:
            touch_blocks_at_their_ends(self.kv_cache_manager, groups[0].kv_cache_spec.block_size)
        plain = full and not any(getattr(self, name, None) for name in ABSENT)
        self.rl_block: int = groups[0].kv_cache_spec.block_size if plain else 0
        self.rl_places = getattr(self, "max_num_active_reqs", self.max_num_running_reqs)  # vLLM 0.32 has both

    def _rl_decoding(self) -> tuple[list[Request], list[int]] | None:
        running, block, records = self.running, self.rl_block, self.rl_records
        if not block or self._pause_state != PauseState.UNPAUSED or len(running) > self.max_num_scheduled_tokens:
            return None
        if self.get_request_counts()[1] and len(running) < self.rl_places:
            return None
        chosen, fresh, longest = list[Request](), list[int](), self.max_model_len - 1
        before = None if self.use_v2_model_runner else self.prev_step_scheduled_req_ids
        for request in running:
            name, done, unseen = request.request_id, request.num_computed_tokens, request.num_output_placeholders
            record = records.get(name)
            if record is None or not record.most or request.is_prefill_chunk:
                return None
            if done >= longest or (unseen and done + 2 - unseen >= request.num_prompt_tokens + request.max_tokens):
                continue  # the step before samples its last token
            if request.num_tokens + unseen != done + 1 or (before is not None and name not in before):
                return None
            if not done % block:
                fresh.append(len(chosen))
            chosen.append(request)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return (chosen, fresh) if chosen and len(fresh) <= free else None

    def rl_decode(self) -> Any:
        """Make a step in which all decode; None if vLLM has to decide anything."""
        if (decoding := self._rl_decoding()) is None:
            return None
        (chosen, fresh), step = decoding, self._rl_empty_step()
        cached, ahead, manager = step.scheduled_cached_reqs, self._rl_ahead(), self.kv_cache_manager
        cached.req_ids = [request.request_id for request in chosen]
        cached.num_computed_tokens = [request.num_computed_tokens for request in chosen]
        cached.num_output_tokens = [request.num_output_tokens + request.num_output_placeholders for request in chosen]
        cached.new_block_ids = [None] * len(chosen)
        for place in fresh:
            blocks = manager.allocate_slots(chosen[place], 1)
            if blocks is None:
                raise RuntimeError(f"vLLM's cache has none of {len(fresh)} free blocks for {cached.req_ids[place]}")
            cached.new_block_ids[place] = blocks.get_block_ids(allow_none=True)
        for request in chosen:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += ahead
        step.num_scheduled_tokens = dict.fromkeys(cached.req_ids, 1)
        step.total_num_scheduled_tokens = len(chosen)
        if hasattr(self, "num_executed_steps"):  # vLLM 0.33 times prompts by it
            self.num_executed_steps += 1
        if getattr(step, "num_common_prefix_blocks", None):  # vLLM 0.32 counts none
            step.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(self.running[0].request_id)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(cached.req_ids)
        return step

    def _rl_empty_step(self) -> Any:
        running, limits = self.running, (self.max_num_running_reqs, self.rl_places)
        self.running, self.max_num_running_reqs, self.max_num_active_reqs = [], 0, 0
        try:
            return super().schedule()
        finally:
            self.running, (self.max_num_running_reqs, self.max_num_active_reqs) = running, limits

    def _rl_ahead(self) -> int:
        """Tokens that a sequence counts before they are sampled."""
        return int(isinstance(self, AsyncScheduler))

    def rl_take(self, step: Any, output: Any, logprobs: list[float], version: int) -> dict[str, int]:
        """Take tokens that end nothing; return token counts of other requests."""
        sampled, rows, records, block = output.sampled_token_ids, output.req_id_to_index, self.rl_records, self.rl_block
        manager, ahead, rest = self.kv_cache_manager, self._rl_ahead(), {}
        for name, number in step.num_scheduled_tokens.items():
            record = records.get(name)
            if record is not None and number == 1 and len(record.logprobs) < record.most - 1:
                request, row = record.request, rows[name]
                tokens, plain = sampled[row], request.status is RUNNING and request.prefill_stats is None
                if plain and not stale(request) and len(tokens) == 1 and tokens[0] not in record.stops:
                    if request.mm_features:
                        self._free_encoder_inputs(request)
                    request.num_in_flight_tokens -= 1
                    request._output_token_ids.append(tokens[0])
                    request._all_token_ids.append(tokens[0])
                    request.num_output_placeholders -= ahead
                    if not request.num_tokens % block:
                        request.update_block_hashes()
                    known = request.num_computed_tokens - request.num_output_placeholders
                    if ahead and not known % block:
                        manager.cache_blocks(request, known)
                    record.logprobs.append(logprobs[row])
                    record.versions.append(version)
                    continue
            rest[name] = number
        return rest


def touch_blocks_at_their_ends(cache: Any, block_size: int) -> None:
    """Have vLLM look for a block only where a token begins one, and share only full ones.

    vLLM does both for every token, a quarter of its scheduler's time.
    """
    allocate, share, none = cache.allocate_slots, cache.cache_blocks, cache.empty_kv_cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, **rest: Any) -> Any:
        if num_new_tokens == 1 and request.num_computed_tokens % block_size and request.status == RequestStatus.RUNNING:
            return none
        return allocate(request, num_new_tokens, **rest)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens % block_size == 0:
            share(request, num_computed_tokens)

    cache.allocate_slots, cache.cache_blocks = allocate_slots, cache_blocks
