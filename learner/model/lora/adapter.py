"""LoRA (arXiv 2106.09685): `W x + scale B A x` in linear layers of the text model's blocks, W frozen.

Layers keep their arithmetic and names: sharding, recomputation and compilation see an ordinary model.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from configs.load import ConfigError
from configs.schema import LoraConfig
from learner.model.loading import blocks
from learner.weights.plan import LORA_A, LORA_B


class Adapted(nn.Linear):
    lora_A: nn.Parameter
    """[rank, in_features]"""
    lora_B: nn.Parameter
    """[out_features, rank]"""
    scale: float
    on: bool

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + linear(linear(x, self.lora_A), self.lora_B) * self.scale if self.on else out


class Factor(NamedTuple):
    """A weight on the wire: an adapter's matrix, or any weight of a model without adapter."""

    name: str
    """As `model.layers.0.self_attn.q_proj.lora_A.weight`."""
    parameter: nn.Parameter
    scale: float
    """A server multiplies by nothing more."""


def adapt(model: PreTrainedModel, lora: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze `model`, on meta, in `dtype` and adapt its target layers. Raises ConfigError for unknown targets."""
    inside = {module for block in blocks(model) for module in block.modules() if type(module) is nn.Linear}
    layers = {name: module for name, module in model.named_modules() if module in inside}
    known = {_last_word(name) for name in layers}
    for target in known if lora.targets == "all" else lora.targets:
        if target not in known:
            has = f"linear layers of {type(model).__name__} that can have an adapter are {', '.join(sorted(known))}"
            raise ConfigError([f"model.lora.targets: {target}: {has}; name some of these, or set all"])
    if not known:
        raise ConfigError([f"model.lora: the blocks of {type(model).__name__} have no linear layers; set it to null"])
    for parameter in model.requires_grad_(False).parameters():
        parameter.data = parameter.data.to(dtype)  # no buffer: rotary frequencies are float32
    for name, layer in layers.items():
        if lora.targets == "all" or _last_word(name) in lora.targets:
            layer.__class__ = Adapted
            assert isinstance(layer, Adapted)
            layer.lora_A = nn.Parameter(torch.empty(lora.rank, layer.in_features, device="meta"))
            layer.lora_B = nn.Parameter(torch.empty(layer.out_features, lora.rank, device="meta"))
            layer.scale, layer.on = lora.scale, True


def _last_word(name: str) -> str:
    return name.rpartition(".")[2]


def factors(model: nn.Module) -> Iterator[Factor]:
    """The adapter's matrices by layer, A before B; none of a model without adapter."""
    for name, layer in model.named_modules():
        if isinstance(layer, Adapted):
            yield Factor(name + LORA_A, layer.lora_A, 1.0)
            yield Factor(name + LORA_B, layer.lora_B, layer.scale)


def initial(parameter: str, shape: torch.Size, seed: int) -> Tensor:
    """The same on every rank: B is zero, A as peft draws it."""
    if parameter.endswith("lora_B"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {parameter}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound: float = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True
