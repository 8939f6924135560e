"""LoRA (arXiv 2106.09685): `W x + scale B A x` in linear layers of the text model's blocks, W frozen, A and B trained.

`adapt` changes the model while it is on the meta device, before it is sharded: a layer keeps its class's arithmetic and
its weight's name, and gets two parameters more, so that sharding, recomputation and compilation see an ordinary model.
The adapter is float32 as all master weights are; what is frozen is held in the dtype that it computes in. Used by
`policy.py`, and by `memory.py` for arithmetic without weights; waits for nothing.
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
    """A linear layer with an adapter beside its frozen weight. Made by `adapt` of a plain one."""

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
    """A weight under its name on the wire: one of the two matrices of a layer's adapter, or any of a model without."""

    name: str
    """As `model.layers.0.self_attn.q_proj.lora_A.weight`."""
    parameter: nn.Parameter
    scale: float
    """What the matrix is multiplied by for a server, which multiplies by nothing more."""


def adapt(model: PreTrainedModel, lora: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze `model`, on meta, in `dtype`, and give its target layers adapters. Raises ConfigError for a target that is
    no linear layer of its blocks."""
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
        parameter.data = parameter.data.to(dtype)  # and no buffer: rotary frequencies are float32 in any model
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
    """The adapter's matrices in the order of the layers, A before B; none of a model without one."""
    for name, layer in model.named_modules():
        if isinstance(layer, Adapted):
            yield Factor(name + LORA_A, layer.lora_A, 1.0)
            yield Factor(name + LORA_B, layer.lora_B, layer.scale)


def initial(parameter: str, shape: torch.Size, seed: int) -> Tensor:
    """The adapter's parameter of that name at version 0, float32 on the CPU, the same on every rank.

    B is zero, so that the model is its base. A is drawn as peft does, uniform within 1 / sqrt(in_features), by `seed`
    and name.
    """
    if parameter.endswith("lora_B"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {parameter}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound: float = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within it, `model` is its base."""
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True
