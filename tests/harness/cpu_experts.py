"""Experts beside an adapter on a CPU, in every vLLM: newer ones choose Triton's kernel for experts wherever there are
adapters, though no expert has one, and on a CPU die of it.

A worker extension for `worker_extension_cls`: `tests.harness.cpu_experts.CpuExpertsWorker`. Wraps vLLM's choice of
the kernel when vLLM's worker imports it.
"""

from dataclasses import replace
from typing import Any

from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized

from rollout.engine.worker import WorkerExtension

SELECT = unquantized.select_unquantized_moe_backend


def selected(moe_config: Any) -> Any:
    return SELECT(replace(moe_config, is_lora_enabled=False))


unquantized.select_unquantized_moe_backend = selected


class CpuExpertsWorker(WorkerExtension):
    """Its model's experts have the kernel that a CPU has for them."""
