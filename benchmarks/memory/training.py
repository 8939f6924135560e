"""Trains steps of one combination on one rank, set up as in `learner/__main__.py`, and measures its memory.

`benchmarks.memory` starts a process for each rank, which prints one line of JSON. Random weights.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.learner.cases import part_of, sample_of
from benchmarks.memory.combinations import Combination, model_of
from benchmarks.memory.holders import holders
from benchmarks.weights.family_shapes import vocabulary_of
from buffer.wire.sample import Sample
from configs.critic import keeps_critic
from configs.publishing import copies_over
from configs.schema import Config
from learner.critic.critic import Critic
from learner.model.memory import GIB, gpu_memory
from learner.model.policy import Policy
from learner.model.settled import keeps_reference
from learner.starting import decide_budget, decide_gather, decide_speed
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm

SETTINGS = ("compile", "activation_checkpointing", "gather", "head_chunk_tokens")
PROMPT, SMALL_STEP = 512, 4096
"""Tokens."""


def run_file_of(combination: Combination, folder: Path) -> Config:
    """The settings of a run that trains the shape; its config.json is written into `folder`."""
    (folder / "config.json").write_text(json.dumps(model_of(combination.model)))
    given: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder)}, "data": {"train": "none", "max_prompt_tokens": PROMPT},
        "reward": {"function": "none"}, "sampling": {"max_tokens": combination.tokens}, "run": {"versions": 1000},
        "batch": {"groups": 64, "samples": 16},
    }  # fmt: skip
    return Config.model_validate(given | {key: given.get(key, {}) | keys for key, keys in combination.given.items()})


def filled(budget: int, length: int, vocabulary: int, microbatches: int) -> list[Sample]:
    """Make samples that fill microbatches of `budget` tokens with documents of at most `length`."""
    full, rest = divmod(budget, length)
    draw = np.random.default_rng(0)
    sizes = microbatches * [*(full * [length]), *([rest] if rest else [])]
    return [sample_of(draw, size, size // 4 if size < PROMPT else 128, vocabulary) for size in sizes]


def train(combination: Combination, explain: bool) -> dict[str, Any]:
    """Train two steps; returns the peak of the last one and the estimate for its largest microbatch."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if combination.ranks == 1 else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", **alone)
    mesh = init_device_mesh(device.type, (combination.ranks,), mesh_dim_names=("shard",))
    config = run_file_of(combination, Path(tempfile.mkdtemp()))
    config = decide_gather(decide_speed(config, gpu_memory(device), mesh, 0), device, mesh, 0)
    with_reference = keeps_reference(config)
    sends = copies_over(config, combination.ranks, mesh.get_rank())
    memory = gpu_memory(device)
    expected, budget = decide_budget(config, device, mesh, with_reference, sends, 0)
    found: dict[str, Any] = {"budget": budget, "settings": {key: getattr(config.learner, key) for key in SETTINGS}}
    found |= {"memory": memory, "sends": sends, "described": expected.describe(budget)}
    # the copies for servers are not made here, so as much memory is held in their place
    held = torch.empty(expected.candidates[0].fixed.get("copies to send", 0), dtype=torch.uint8, device=device)
    try:
        policy = Policy(config.model, config.learner, mesh, random=True)
        reference = Policy(config.model, config.learner, mesh, frozen=True, random=True) if with_reference else None
        given = config.algorithm, Optimizer(policy, config.learner, 1000), budget, combination.tokens, reference
        algorithm = Algorithm(*given, critic=critic_of(config, mesh) if keeps_critic(config) else None)
        words, longest = vocabulary_of(model_of(combination.model)), PROMPT + combination.tokens

        def step(tokens: int, microbatches: int) -> dict[str, float]:
            samples = filled(tokens, longest, words, combination.ranks * microbatches)
            return algorithm.step(policy, part_of(samples, 0, mesh.get_rank(), combination.ranks))

        found |= {"attention": policy.attention} | measured_step(step, budget, explain)
    except torch.OutOfMemoryError as error:
        return found | {"error": f"out of memory: {str(error).splitlines()[0]}"}
    found |= {"held": held.numel() / GIB, "estimate": expected.total(int(found["largest"])) / GIB}
    return found | {"parts": expected.describe(int(found["largest"]))}


def critic_of(config: Config, mesh: DeviceMesh) -> Critic:
    """A critic as `learner/__main__.py` builds it, with random weights."""
    body = Policy(config.model, config.learner, mesh, random=True, valued=True)
    return Critic(config.algorithm.critic, body, Optimizer(body, config.learner, 1000))


def measured_step(step: Callable[[int, int], dict[str, float]], budget: int, explain: bool) -> dict[str, Any]:
    """Memory and speed of a step of two full microbatches, so that gradients are there when the second begins. A small
    step before it makes the optimizer's state. `explain`: record what holds the peak, too."""
    gpu = torch.cuda.is_available()
    step(min(budget, SMALL_STEP), 1)
    before = torch.cuda.memory_allocated()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    if gpu and explain:
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, context="alloc", stacks="python")
    began = time.perf_counter()
    metrics = step(budget, 2)
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {
        "peak": torch.cuda.max_memory_allocated() / GIB, "reserved": torch.cuda.max_memory_reserved() / GIB,
        "before": before / GIB, "seconds": seconds, "tokens/s": metrics["tokens_computed"] / seconds,
        "largest": int(metrics["tokens_microbatch_max"]), "microbatches": int(metrics["microbatches"]),
    }  # fmt: skip
    if gpu and explain:
        (events,) = [trace for trace in torch.cuda.memory._snapshot()["device_traces"] if trace]
        found["holders"] = holders(events)
    return found
