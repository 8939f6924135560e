"""Linear layers that multiply in FP8 (`learner.matmul: fp8`): y = x Wᵀ, dx = g W and dW = gᵀ x.

Factors are cast to e4m3, with one scale for each row or column, along which no product sums. So x, g and W are cast
twice, by row and by column.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from configs.load import ConfigError
from configs.matmul import KEY, REMEDY, too_old
from configs.schema import LearnerConfig
from learner.model import state
from learner.model.experts.mixture import has_expert_layers
from learner.model.idle_parts import sees
from learner.model.loading import blocks

FP8 = torch.float8_e4m3fn
"""Gradients too: with a scale for each row, precision counts and not e5m2's range."""
LARGEST = 448.0
SMALLEST = 1e-12
"""A row of zeros stays one."""
MULTIPLE = 16
"""`torch._scaled_mm` sums over, and returns columns of, multiples of this."""
FAST_SUMS = True
"""Whether Hopper's tensor cores sum within an instruction at 14 bits."""


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Products.apply(x.reshape(-1, self.in_features), self.weight)  # type: ignore[no-untyped-call]
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


@torch._dynamo.allow_in_graph
class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(*by_row(x), *by_row(weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        grad_x = _multiply(*by_row(grad), *by_column(weight), x.dtype)
        grad_weight = _multiply(*by_column(grad), *by_column(x), weight.dtype)
        return grad_x, grad_weight


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [rows, columns] in FP8, and float32 scales [rows, 1]."""
    wide = x.float()
    scale = _scale(wide.abs().amax(1, keepdim=True))
    return (wide / scale).to(FP8), scale


def by_column(x: Tensor) -> tuple[Tensor, Tensor]:
    """`by_row` of xᵀ, contiguous, rows filled up to a multiple of 16."""
    wide = x.float()
    scale = _scale(wide.abs().amax(0, keepdim=True))
    cast = (wide / scale).to(FP8).t().contiguous()
    return pad(cast, (0, -cast.shape[1] % MULTIPLE)), scale.view(-1, 1)


def _scale(largest: Tensor) -> Tensor:
    return largest.clamp(min=SMALLEST) / LARGEST


def _multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = torch._scaled_mm(a, b.t(), a_scale, b_scale.view(1, -1), out_dtype=dtype, use_fast_accum=FAST_SUMS)
    return found


def layers_of(model: PreTrainedModel) -> Iterator[nn.Linear]:
    """Linear layers whose sizes MULTIPLE divides."""
    for block in blocks(model):
        yield from _inside(block)


def _inside(block: nn.Module) -> Iterator[nn.Linear]:
    for layer in block.modules():
        if not isinstance(layer, nn.Linear) or type(layer) not in (nn.Linear, Float8Linear):
            continue
        if not any(n % MULTIPLE for n in (layer.out_features, layer.in_features)):
            yield layer


def cast_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """What casts add to the block that needs most: bytes of its weights, and bytes per token of its outputs' gradients
    and its widest input.
    """
    sizes = [[(layer.out_features, layer.in_features) for layer in _inside(block)] for block in blocks(model)]
    weights = max(2 * sum(out * inner for out, inner in block) for block in sizes)
    tokens = max(2 * sum(out for out, _ in block) + max((i for _, i in block), default=0) for block in sizes)
    return weights, tokens


def convert(model: PreTrainedModel) -> int:
    """Have linear layers in blocks of `model`, on meta, multiply in FP8; returns their number. Raises ConfigError."""
    if problem := why_not(model):
        raise ConfigError([f"{KEY}: {problem}; {REMEDY}"])
    layers = list(layers_of(model))
    for layer in layers:
        layer.__class__ = Float8Linear
    return len(layers)


def why_not(model: PreTrainedModel) -> str:
    """Why `model` is not proven in FP8, else empty."""
    name = type(model).__name__
    if has_expert_layers(model):
        return f"{name} has experts, whose products would stay in bfloat16"
    if sees(model.config):
        return f"{name} reads images, with which it is not tested"
    if kept := state.kinds(model):
        return f"{name} has layers that keep a state ({', '.join(kept)}), with which it is not tested"
    if not any(True for _ in layers_of(model)):
        return f"the blocks of {name} have no linear layers with sizes that {MULTIPLE} divides"
    return ""


def check_device(learner: LearnerConfig, device: torch.device) -> None:
    """Raise ConfigError if the GPU is too old. A device without an index is not touched."""
    if learner.matmul != "fp8" or (device.type == "cuda" and device.index is None):
        return
    on_gpu = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if on_gpu else f"the learner is on {device.type}"
    if problem := too_old(where, torch.cuda.get_device_capability(device) if on_gpu else None):
        raise ConfigError([problem])
