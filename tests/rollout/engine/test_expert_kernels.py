"""Which of vLLM's models with experts are given policies, and under which names their parameters are loaded."""

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def setup_module():
    """vLLM takes seconds to import, and each worker of pytest collects this file."""
    global RoutedExperts, loads_in_place, needs_trial, packed_anew, parameter_name, refusal
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from rollout.engine.experts.expert_kernels import (
        loads_in_place,
        needs_trial,
        packed_anew,
        parameter_name,
        refusal,
    )


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


class GptOssForCausalLM(Qwen3MoeForCausalLM):
    """Stands for vLLM's."""


class NewMoeForCausalLM(Qwen3MoeForCausalLM):
    """Stands for a class that nobody has compared."""


class OwnExperts(torch.nn.Module):
    """Stands for a mixture that vLLM computes by layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"experts": torch.nn.Linear(1, 1)})])


class MiniCPMMoE(torch.nn.Module):
    """Stands for vLLM's, of whose names none speaks of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = torch.nn.Parameter(torch.zeros(2, 4, 2))


class MiniCPMForCausalLM(torch.nn.Module):
    """Stands for vLLM's with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"mlp": MiniCPMMoE()})])


class Qwen3MoeMLP(torch.nn.Module):
    """Stands for vLLM's dense layer of a family of mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(1, 1)


IMAGES, TEXT_ALONE = SimpleNamespace(language_model_only=False), SimpleNamespace(language_model_only=True)


def vllm_config(lora: object = None, device: str = "cpu", seen: object = None, **parallel: int) -> SimpleNamespace:
    known = {"enable_expert_parallel": False, "enable_eplb": False, "tensor_parallel_size": 1} | parallel
    return SimpleNamespace(
        lora_config=lora,
        model_config=SimpleNamespace(multimodal_config=seen),
        parallel_config=SimpleNamespace(**known),
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        (
            GptOssForCausalLM,
            vllm_config(),
            "model.path: vLLM's GptOssForCausalLM on this device (cpu) keeps the experts of an earlier policy; use ano",
        ),
        (NewMoeForCausalLM, vllm_config(seen=IMAGES), "model.path: vLLM's NewMoeForCausalLM has experts and sees ima"),
        (OwnExperts, vllm_config(), "model.path: vLLM's OwnExperts has experts in layers that are not known"),
        (MiniCPMForCausalLM, vllm_config(), "model.path: vLLM's MiniCPMForCausalLM has experts in layers that are not"),
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
def test_what_fails_or_cannot_be_tried_is_refused(model, config, words):
    assert refusal(model(), config).startswith(words)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Qwen3MoeForCausalLM, vllm_config()),
        (OlmoeForCausalLM, vllm_config()),
        (lambda: Qwen3MoeForCausalLM(UnquantizedFusedMoEMethod("TRITON")), vllm_config()),
        (NewMoeForCausalLM, vllm_config()),
        (NewMoeForCausalLM, vllm_config(seen=TEXT_ALONE)),
        (lambda: torch.nn.Linear(1, 1), vllm_config()),
        (Qwen3MoeMLP, vllm_config()),  # every layer is dense: mlp_only_layers names all
        (OlmoeForCausalLM, vllm_config(lora=object())),  # only an adapter is loaded
        (lambda: OlmoeForCausalLM(UnquantizedFusedMoEMethod("TRITON")), vllm_config(lora=object(), device="cuda")),
    ],
)
def test_all_else_is_not(model, config):
    assert refusal(model(), config) == ""


@pytest.mark.parametrize(
    ("model", "config", "needed"),
    [
        (Qwen3MoeForCausalLM, vllm_config(), False),
        (Qwen3MoeForCausalLM, vllm_config(device="cuda"), False),
        (Qwen3MoeForCausalLM, vllm_config(device="cuda", tensor_parallel_size=2), True),
        (Qwen3MoeForCausalLM, vllm_config(tensor_parallel_size=2), False),
        (GptOssForCausalLM, vllm_config(device="cuda", tensor_parallel_size=2), True),
        (NewMoeForCausalLM, vllm_config(), True),
        (NewMoeForCausalLM, vllm_config(device="cuda"), True),
        (NewMoeForCausalLM, vllm_config(lora=object()), False),
        (lambda: torch.nn.Linear(1, 1), vllm_config(), False),
    ],
)
def test_a_mixture_that_nobody_has_compared_needs_a_trial(model, config, needed):
    assert needs_trial(model(), config) is needed


@pytest.mark.parametrize(
    ("model", "kernel", "device", "in_place"),
    [
        (GptOssForCausalLM, "TRITON", "cuda", True),
        (GptOssForCausalLM, "FLASHINFER_CUTLASS", "cuda", False),
        (GptOssForCausalLM, "CPU", "cpu", False),
        (Qwen3MoeForCausalLM, "TRITON", "cuda", True),
        (Qwen3MoeForCausalLM, "CPU", "cpu", False),
        (NewMoeForCausalLM, "TRITON", "cuda", False),
    ],
)
def test_a_compared_model_loads_in_place_where_the_kernel_reads_what_the_file_has(model, kernel, device, in_place):
    assert loads_in_place(model(UnquantizedFusedMoEMethod(kernel)), torch.device(device)) is in_place


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


def test_a_loader_without_a_name_is_given_one_before_a_reload():
    """vLLM's reload would raise AttributeError."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    from rollout.engine.model_load import name_loaders

    model = torch.nn.LayerNorm(4, bias=False)
    model.weight.weight_loader = partial(load, share=1)
    record_metadata_for_reloading(model)
    name_loaders(model)
    initialize_layerwise_reload(model)
    assert model.weight.is_meta and model.weight.weight_loader.__name__ == "online_process_loader"
    assert model.weight.weight_loader.__wrapped__.__name__ == "load"


def load(parameter: torch.Tensor, weight: torch.Tensor, share: int) -> None:
    parameter.data.copy_(weight)
