"""vLLM 0.26 on a CPU that reports which experts it chose: its kernel there does not, and routes come back as zeros.

A worker extension for `worker_extension_cls`: `tests.harness.told_routes.TellingWorker`. Wraps vLLM's choice of experts
when vLLM's worker imports it.
"""

from typing import Any

from vllm.model_executor.layers.fused_moe import cpu_fused_moe

from rollout.engine.worker import WorkerExtension

TELL: dict[int, Any] = {}
"""By the id of a layer of experts, what vLLM captures its choices with."""
CALL, SELECT = cpu_fused_moe.CPUFusedMOE.__call__, cpu_fused_moe.select_experts
RUNNING: list[int] = [0]


def called(self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    RUNNING[0] = id(layer)
    return CALL(self, layer, *args, **kwargs)


def selected(**kwargs: Any) -> Any:
    weights, ids = SELECT(**kwargs)
    TELL[RUNNING[0]](ids)
    return weights, ids


class TellingWorker(WorkerExtension):
    """Tells vLLM's capturer from the first stamp on."""

    def rl_stamp(self, version: int) -> None:
        if not TELL:
            for module in self.model_runner.get_model().modules():
                router = getattr(module, "router", None)
                if getattr(router, "capture_fn", None) is not None:
                    TELL[id(module.routed_experts)] = router.capture_fn
            cpu_fused_moe.CPUFusedMOE.__call__, cpu_fused_moe.select_experts = called, selected
        super().rl_stamp(version)
