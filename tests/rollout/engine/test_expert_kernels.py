"""Which of vLLM's models with experts are given policies, and under which names their parameters are loaded."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def setup_module():
    """vLLM takes seconds to import, and each worker of pytest collects this file."""
    global RoutedExperts, packed_anew, parameter_name, refusal
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from rollout.engine.experts.expert_kernels import packed_anew, parameter_name, refusal


CPU = torch.device("cpu")


class UnquantizedFusedMoEMethod:
    """Stands for vLLM's."""

    def __init__(self, backend: str = "CPU") -> None:
        self.unquantized_backend, self.moe_kernel = SimpleNamespace(name=backend), object()


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    """Stands for vLLM's."""


class Qwen3MoeForCausalLM(torch.nn.Module):
    """Stands for vLLM's, with one layer of experts."""

    def __init__(self, method: Any = None) -> None:
        super().__init__()
        self.experts = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(self.experts)
        self.experts.quant_method = method or UnquantizedFusedMoEMethod()


class OlmoeForCausalLM(Qwen3MoeForCausalLM):
    """Stands for vLLM's."""


class MiniMaxM2ForCausalLM(Qwen3MoeForCausalLM):
    """Stands for vLLM's."""


def vllm_config(is_moe: bool = True, lora: object = None, device: str = "cpu", **parallel: bool) -> SimpleNamespace:
    known = {"enable_expert_parallel": False, "enable_eplb": False} | parallel
    return SimpleNamespace(
        lora_config=lora,
        model_config=SimpleNamespace(is_moe=is_moe),
        parallel_config=SimpleNamespace(**known),
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        (
            OlmoeForCausalLM,
            vllm_config(device="cuda"),
            "model.path: vLLM's OlmoeForCausalLM has experts, and policies were tried on Qwen3MoeForCausalLM only",
        ),
        (
            MiniMaxM2ForCausalLM,
            vllm_config(),
            "model.path: vLLM's MiniMaxM2ForCausalLM has experts, and policies were tried on Qwen3MoeForCausalLM, G",
        ),
        (lambda: torch.nn.Linear(1, 1), vllm_config(), "model.path: vLLM's Linear has experts"),
        (
            lambda: Qwen3MoeForCausalLM(Fp8MoEMethod()),
            vllm_config(),
            "rollout.engine.quantization: vLLM's ",
        ),
        (
            lambda: Qwen3MoeForCausalLM(UnquantizedFusedMoEMethod("FLASHINFER_TRTLLM")),
            vllm_config(),
            "rollout.engine.moe_backend: vLLM chose FLASHINFER_TRTLLM for the experts",
        ),
        (Qwen3MoeForCausalLM, vllm_config(enable_eplb=True), "rollout.engine.enable_eplb: "),
        (
            Qwen3MoeForCausalLM,
            vllm_config(enable_expert_parallel=True),
            "rollout.engine.enable_expert_parallel: ",
        ),
        (
            lambda: Qwen3MoeForCausalLM(UnquantizedFusedMoEMethod("TRITON")),
            vllm_config(lora=object()),
            "model.lora: beside adapters this vLLM computes experts on GPUs only",
        ),
    ],
)
def test_what_was_never_tried_is_refused(model, config, words):
    assert refusal(model(), config).startswith(words)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Qwen3MoeForCausalLM, vllm_config()),
        (OlmoeForCausalLM, vllm_config()),
        (lambda: Qwen3MoeForCausalLM(UnquantizedFusedMoEMethod("TRITON")), vllm_config()),
        (lambda: torch.nn.Linear(1, 1), vllm_config(is_moe=False)),
        (OlmoeForCausalLM, vllm_config(lora=object())),  # only an adapter is loaded
        (lambda: OlmoeForCausalLM(UnquantizedFusedMoEMethod("TRITON")), vllm_config(lora=object(), device="cuda")),
    ],
)
def test_what_was_is_not(model, config):
    assert refusal(model(), config) == ""


def test_only_a_cpu_has_its_kernels_made_anew_and_those_that_were_not_loaded_stay():
    model = Qwen3MoeForCausalLM()
    method, before = model.experts.quant_method, model.experts.quant_method.moe_kernel
    with packed_anew(model, torch.device("cuda")):
        assert method.moe_kernel is before
    with packed_anew(model, CPU):
        assert method.moe_kernel is None
    assert method.moe_kernel is before
    with packed_anew(model, CPU):
        method.moe_kernel = after = object()
    assert method.moe_kernel is after


def test_experts_have_one_name_in_every_vllm():
    now = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert parameter_name("model.layers.0.mlp.experts.w13_weight") == parameter_name(now) == now
    assert parameter_name("model.layers.0.mlp.gate.weight") == "model.layers.0.mlp.gate.weight"
