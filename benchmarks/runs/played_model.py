"""vLLM's schedulers without an engine: a played model samples what it is told to, in no time.

For `benchmarks.scheduler` and `tests/rollout/engine/test_plain_steps.py`. Waits for nothing.
"""

from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rollout.engine.scheduling.plain_steps import PlainSteps

BLOCK = 16
"""Tokens of a KV block."""
VERSION = 3
"""The weights' version that is noted on each step's output."""


def engine_config(folder: Path, sequences: int, step_tokens: int, longest: int) -> Any:
    """vLLM's config of an engine for the model in `folder`: at most so many sequences, tokens a step and a sequence."""
    init_none_hash(sha256)
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True,
        max_num_seqs=sequences, max_num_batched_tokens=step_tokens, max_model_len=longest, block_size=BLOCK,
        kv_cache_memory_bytes=1 << 26,
    )  # fmt: skip
    return arguments.create_engine_config()


def scheduler_of(kind: Callable[..., Any], config: Any, blocks: int, layer: Any = None) -> Any:
    """A scheduler of this kind, whose KV cache has so many blocks of one `layer`; by default it attends to all."""
    config.cache_config.num_gpu_blocks = blocks
    spec = layer or FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


class PlayedModel:
    """A model that is `ahead` steps ahead of its scheduler: 1, or 2 if it schedules asynchronously.

    `sample(name, number)`: a request's token of this number, from 1, and its log-probability.
    """

    def __init__(self, scheduler: Any, ahead: int, sample: Callable[[str, int], tuple[int, float]]) -> None:
        self.scheduler, self.ahead, self.sample = scheduler, ahead, sample
        self._steps: deque[tuple[Any, list[str]]] = deque()
        self._sampled: Counter[str] = Counter()
        self._drains = False

    def add(self, name: str, prompt: list[int], images: Any = None, end: int | None = None, **sampling: Any) -> None:
        """A request comes; it ends at the token `end`, as a text does. `images`: vLLM's features."""
        parameters, hasher = SamplingParams(**sampling), get_request_block_hasher(BLOCK, sha256)
        parameters._eos_token_id = end
        request = Request(name, list(prompt), parameters, None, mm_features=images, block_hasher=hasher)
        self.scheduler.add_request(request)

    def schedule(self) -> Any:
        """A step, whose tokens `output` will have."""
        step = self.scheduler.schedule()
        self._drains = not step.num_scheduled_tokens
        if step.num_scheduled_tokens:
            sampling = [
                name for name in step.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk
            ]
            self._steps.append((step, sampling))
        return step

    def output(self) -> tuple[Any, ModelRunnerOutput] | None:
        """The oldest step and what the model returns for it; None while the model may get further ahead."""
        if len(self._steps) < (1 if self._drains else self.ahead):
            return None
        step, sampling = self._steps.popleft()
        names = list(step.num_scheduled_tokens)
        self._sampled.update(sampling)
        found = {name: self.sample(name, self._sampled[name]) for name in sampling}
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[found[name][0]] if name in found else [] for name in names],
        )
        if isinstance(self.scheduler, PlainSteps):
            values = np.array([[found.get(name, (0, 9.0))[1]] for name in names], dtype=np.float32)
            logprobs: Any = SimpleNamespace(logprobs=values, cu_num_generated_tokens=None)
            output.logprobs, output.rl_version = logprobs, VERSION  # type: ignore[attr-defined]
        return step, output

    def take(self) -> list[EngineCoreOutput]:
        """What the scheduler sends after the oldest step, if that is done."""
        found = self.output()
        sent = {} if found is None else self.scheduler.update_from_output(*found)
        return [each for outputs in sent.values() for each in outputs.outputs]
