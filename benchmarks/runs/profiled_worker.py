"""A worker of vLLM that tells what its GPU did for a while: seconds by kind of kernel, and its share of time at work.

A worker extension for `worker_extension_cls`: `benchmarks.runs.profiled_worker.ProfiledWorker`. Tracing slows a step
down a little, so speeds are measured without it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rollout.engine.worker import WorkerExtension

GROUPS = (
    ("fused by the compiler", ("triton_",)),
    ("attention", ("flash", "fmha", "attention", "reshape_and_cache", "prepare_varlen")),
    ("matrix products", ("nvjet", "gemm", "cutlass", "cublas", "scaled_mm", "qqtst", "splitk")),
    ("casts to FP8", ("quant", "fp8", "e4m3")),
    ("sampling and log-probabilities", ("softmax", "argmax", "sort", "topk", "exponential", "logprob")),
    ("norms, activations, rotations", ("norm", "silu", "act_and_mul", "rotary")),
)
"""Kinds of kernels, and words in their names; the first that fits."""
REST, AT_WORK = "rest", "GPU at work"


class ProfiledWorker(WorkerExtension):
    """A worker that also answers `rl_trace`."""

    def rl_trace(self, begin: bool) -> dict[str, float]:
        """Begin a trace, or end it: seconds by kind of kernel, and under AT_WORK the share of the time with any."""
        if begin:
            self.rl_traced = profile(activities=[ProfilerActivity.CUDA])
            self.rl_traced.start()
            return {}
        torch.cuda.synchronize(self.device)
        self.rl_traced.stop()
        results: Any = self.rl_traced.profiler
        kernels = [
            (each.name(), each.start_ns(), each.start_ns() + each.duration_ns())
            for each in results.kineto_results.events()
            if str(each.device_type()).endswith("CUDA")
        ]
        return sums(kernels) | {AT_WORK: share_at_work([(begin, end) for _, begin, end in kernels])}


def sums(kernels: Iterable[tuple[str, int, int]]) -> dict[str, float]:
    """Seconds by kind, of names, begins and ends in ns."""
    found: Counter[str] = Counter()
    for name, begin, end in kernels:
        found[kind_of(name)] += end - begin
    return {kind: ns / 1e9 for kind, ns in found.items()}


def kind_of(kernel: str) -> str:
    """The first of GROUPS that a kernel's name fits. Example: `kind_of("nvjet_tst_128x64")` is `matrix products`."""
    name = kernel.lower()
    return next((kind for kind, words in GROUPS if any(word in name for word in words)), REST)


def share_at_work(spans: Sequence[tuple[int, int]]) -> float:
    """Share of the time, from the first begin to the last end, that any of the spans covers; 0 without spans."""
    covered, reached = 0, 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered / (reached - min(begin for begin, _ in spans)) if spans else 0.0
