"""The case `ours`: `Algorithm.step` with the learner's own policy and optimizer, timed from barrier to barrier.

Two small batches before the measured ones warm up the compiler and the allocator. Run by `benchmarks.learner`, once on
each rank of a case; waits for the other ranks.
"""

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.learner.cases import LONGEST, Case, documents, part_of
from benchmarks.weights.family_shapes import text_alone
from buffer.wire.protocol import Part
from configs.schema import AlgorithmConfig, LearnerConfig, LoraConfig, ModelConfig
from learner.model.flops import peak
from learner.model.gather_choice import choose_gather
from learner.model.memory import GIB, SHARE, Estimate, RankRoom, estimate, gpu_memory
from learner.model.policy import Policy
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm

OURS = {"activation_checkpointing": "none", "compile": True, "tokens_per_microbatch": "auto", "head_chunk_tokens": 4096}
H200 = 989e12
"""The peak FLOP/s assumed without a GPU."""


def run(case: Case, folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Results of the measured steps together, and one row per step."""
    gpu = mesh.device_type == "cuda"
    lora = None if case.lora is None else LoraConfig(**case.lora)
    alone, dtype = text_alone(case.model), "bfloat16" if gpu else "float32"
    model = ModelConfig(path=str(folder), dtype=dtype, lora=lora, text_alone=alone)
    memory = gpu_memory(torch.device(mesh.device_type))
    given = LearnerConfig(**(OURS | case.learner))
    learner = choose_gather(model, given, RankRoom(mesh.size(), memory, LONGEST))
    expected = estimate(model, learner, mesh.size())
    started = time.perf_counter()
    policy = Policy(model, learner, mesh, random=True)
    config, budget = AlgorithmConfig(**case.algorithm), tokens(learner, expected, memory)
    algorithm = Algorithm(config, Optimizer(policy, learner, 100), budget, LONGEST)
    loaded = time.perf_counter() - started
    warm = min(case.samples, 64 * mesh.size())
    rows: list[dict[str, Any]] = []
    for version, samples in enumerate([warm, warm, *[case.samples] * case.steps]):
        rows.append(timed(policy, algorithm, batch(policy, mesh, samples, version, version)))
        print(f"{case.kind} {case.model} x{mesh.size()} step {version}: {rows[-1]}", flush=True)
    if case.profile:
        small = batch(policy, mesh, warm, 0, len(rows))
        profile(lambda: algorithm.step(policy, small))
    found = {"rows": rows, "budget": algorithm.budget, "loaded_s": loaded, "attention": policy.attention}
    found |= {"gather": learner.gather, "estimate": expected.describe(algorithm.budget)}
    return found | summed(rows, mesh, expected)


def tokens(learner: LearnerConfig, expected: Estimate, memory: int | None) -> int:
    """Tokens per microbatch: `auto` fills the GPU as in the learner."""
    wanted = learner.tokens_per_microbatch
    return max(expected.fit(int(SHARE * (memory or 8 * GIB))), LONGEST) if wanted == "auto" else wanted


def batch(policy: Policy, mesh: DeviceMesh, samples: int, seed: int, version: int) -> Part:
    """This rank's part of a random batch."""
    made = documents(samples, seed, policy.model.config.get_text_config().vocab_size)
    return part_of(made, version, mesh.get_rank(), mesh.size())


def timed(policy: Policy, algorithm: Algorithm, part: Part) -> dict[str, Any]:
    """One step: seconds, size of its batch, its phases, and peak memory."""
    gpu = policy.device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    start = time.perf_counter()
    figures = algorithm.step(policy, part)
    dist.barrier()
    seconds = time.perf_counter() - start
    return (
        {"seconds": seconds, "tokens": figures["tokens"], "flops": figures["flops"]}
        | {key: value for key, value in figures.items() if key.startswith("time/")}
        | {"microbatches": figures["microbatches"], "largest": figures["tokens_microbatch_max"]}
        | {"loss": figures["loss"], "norm": figures.get("gradient/norm")}
        | {"gib": torch.cuda.max_memory_allocated() / GIB if gpu else 0.0}
        | {"reserved_gib": torch.cuda.max_memory_reserved() / GIB if gpu else 0.0}
    )


def summed(rows: list[dict[str, Any]], mesh: DeviceMesh, expected: Estimate) -> dict[str, Any]:
    """The measured steps together."""
    measured = rows[2:]
    spent = sum(row["seconds"] for row in measured)
    return {
        "seconds": median(row["seconds"] for row in measured),
        "tokens_per_s": sum(row["tokens"] for row in measured) / spent,
        "flops_per_s": sum(row["flops"] for row in measured) / spent / mesh.size(),
        "peak": peak(torch.cuda.get_device_name()) if mesh.device_type == "cuda" else H200,
        "gib": max(row["gib"] for row in measured),
        "estimate_gib": expected.total(int(max(row["largest"] for row in measured))) / GIB,
        "warm_s": rows[0]["seconds"],
    }


def profile(step: Any) -> None:
    """Kernels of one step by time, on stdout."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=90), flush=True)
