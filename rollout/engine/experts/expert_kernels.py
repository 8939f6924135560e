"""Decides which experts in vLLM may get a new policy, and adds what vLLM's loads lack.

Where vLLM's kernel reads experts as they are in the file, models of which loads in place were compared load in place.
All others go in by vLLM's reload, where that was seen to be right.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from configs.expert_models import OTHER_MIXTURE, PROVEN, failing, is_expert_layer, proven
from rollout.engine.door.vllm_worker import RoutedExperts

METHOD = "UnquantizedFusedMoEMethod"
BACKENDS = ("CPU", "TRITON")
"""Compared kernels; others arrange gate_up in another order."""


def refusal(model: torch.nn.Module, vllm_config: Any) -> str:
    """Return why no policy may be loaded into the experts, or "". A mixture that is not refused may need a trial."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    if vllm_config.lora_config is not None:  # the base is never loaded again
        return triton_on_cpu(layers) if vllm_config.device_config.device_type == "cpu" else ""
    if not (layers or _has_experts(model)):
        return ""
    parallel = vllm_config.parallel_config
    for field in ("enable_expert_parallel", "enable_eplb"):
        if getattr(parallel, field):
            return f"rollout.engine.{field}: no policy can be loaded into experts that are spread over GPUs; remove it"
    return _model_refusal(type(model).__name__, layers, vllm_config) or _kernel_refusal(layers)


def _has_experts(model: torch.nn.Module) -> bool:
    """Whether a module or a parameter of the model is one of experts. vLLM's `is_moe` reads a number of config.json,
    which a dense Nemotron-H has too, and only by names that vLLM knows."""
    modules = ((name.rpartition(".")[2], type(module).__name__) for name, module in model.named_modules())
    parameters = (name.rpartition(".")[2] for name, _ in model.named_parameters())
    return any(is_expert_layer(*each) for each in modules) or any("expert" in name for name in parameters)


def _model_refusal(name: str, layers: list[Any], vllm_config: Any) -> str:
    device, images = vllm_config.device_config.device_type, vllm_config.model_config.multimodal_config
    if not layers:
        return f"model.path: vLLM's {name} has experts in layers that are not known here; {OTHER_MIXTURE}"
    if images is not None and not images.language_model_only:
        return f"model.path: vLLM's {name} has experts and sees images, which no load was tried with; {OTHER_MIXTURE}"
    if fault := next((one.fault for one in failing(device) if one.architecture == name), ""):
        return f"model.path: vLLM's {name} on this device ({device}) {fault}; {OTHER_MIXTURE}"
    return ""


def _kernel_refusal(layers: list[Any]) -> str:
    methods = {type(layer.quant_method).__name__ for layer in layers} - {METHOD}
    if methods:
        problem = f"vLLM's {min(methods)} has experts in another format than policies"
        return f"rollout.engine.quantization: {problem}; remove it, or name a model whose weights are not quantised"
    kernels = {layer.quant_method.unquantized_backend.name for layer in layers} - set(BACKENDS)
    if kernels:
        problem = f"vLLM chose {min(kernels)} for the experts, into which policies were never loaded"
        return f"rollout.engine.moe_backend: {problem}; set it to triton"
    return ""


def needs_trial(model: torch.nn.Module, vllm_config: Any) -> bool:
    """Whether nobody has compared this vLLM's loads into the experts of `model` on this device, with tensor parallelism
    if each worker loads its part of every expert."""
    device, parallel = vllm_config.device_config.device_type, vllm_config.parallel_config.tensor_parallel_size
    known = {each.architecture for each in proven(device, parallel)}
    mixed = any(isinstance(layer, RoutedExperts) for layer in model.modules())
    return mixed and vllm_config.lora_config is None and type(model).__name__ not in known


def loads_in_place(model: torch.nn.Module, device: torch.device) -> bool:
    """Whether `load_weights` of a model with experts may write into the parameters that the kernel reads. gpt-oss's
    writes past the loaders that vLLM's reload wraps: after a reload it would have the old experts."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    kept = device.type == "cuda" and all(is_kept(layer.quant_method) for layer in layers)
    return kept and any(each.in_place and each.architecture == type(model).__name__ for each in PROVEN)


def is_kept(method: Any) -> bool:
    """Whether the kernel reads experts as in the file."""
    return type(method).__name__ == METHOD and method.unquantized_backend.name == "TRITON"


def triton_on_cpu(layers: list[Any]) -> str:
    """Newer vLLMs choose Triton's kernel for experts beside an adapter, and die at the first prompt."""
    methods = [layer.quant_method for layer in layers if type(layer.quant_method).__name__ == METHOD]
    if all(method.unquantized_backend.name == "CPU" for method in methods):
        return ""
    return "model.lora: beside adapters this vLLM computes experts on GPUs only; use one, or vLLM 0.26"


@contextmanager
def packed_anew(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Since 0.32 vLLM packs experts for a CPU only when it makes the kernel. A GPU's kernels stay: graphs refer to
    them."""
    methods = [layer.quant_method for layer in model.modules() if isinstance(layer, RoutedExperts)]
    kernels = [(method, method.moe_kernel) for method in methods if device.type == "cpu"]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # its weights did not come
                method.moe_kernel = kernel


def parameter_name(name: str) -> str:
    """Complete a name of vLLM 0.26's loaders, which leave out the experts' module."""
    head, between, tail = name.rpartition(".experts.w")
    return f"{head}.experts.routed_experts.w{tail}" if between else name
