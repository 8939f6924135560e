"""What does a layer of Qwen3.5 cost and lose whose kernels are given the bounds of documents?

`python -m benchmarks.lab.bounded_layer`, on a GPU with flash-linear-attention: one gated delta net in the sizes of
Qwen3.5-2B, a row of 8,192 tokens in bfloat16, forward and backward. The reference is each document alone, by
transformers' torch functions in float32. Prints differences, milliseconds and the kernels that take most of them.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from learner.model.bounded_state import in_torch, replaced, takes_bounds, within

LENGTHS = (640,) * 11 + (300, 37, 1, 814)
"""Tokens of the documents: 8,192 together."""
WIDTH, KEY_HEADS, VALUE_HEADS, HEAD = 2048, 16, 16, 128
ROUNDS = 5


def made(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=WIDTH, layer_types=["linear_attention"], num_hidden_layers=1,
        linear_num_key_heads=KEY_HEADS, linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=HEAD, linear_value_head_dim=HEAD,
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0).to(device)  # type: ignore[arg-type]


def whole(layer: nn.Module, functions: Mapping[str, Callable[..., Any]], row: Tensor) -> Tensor:
    with replaced(layer, functions):
        output: Tensor = layer(row)
    return output


def alone(layer: nn.Module, row: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Each document by itself, by transformers' torch functions."""
    with replaced(layer, in_torch(layer)):
        return torch.cat([layer(row[:, first:end]) for first, end in spans], 1)


def gradients(layer: nn.Module, output: Tensor, row: Tensor, scale: Tensor) -> list[Tensor]:
    parts = [row, *layer.parameters()]
    return [part.float() for part in torch.autograd.grad((output.float() * scale).sum(), parts)]


def off(ours: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference of a tensor, relative to its norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, right, strict=True))


def milliseconds(step: Callable[[], object]) -> float:
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1000 / ROUNDS


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        print("no GPU is seen: these kernels run on GPUs only")
        return 1
    device = torch.device("cuda")
    exact, layer = made(device), made(device).bfloat16()
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    spans = list(pairwise(starts.tolist()))
    row = torch.randn(1, sum(LENGTHS), WIDTH, device=device).bfloat16().requires_grad_()
    full, scale = row.detach().float().requires_grad_(), torch.randn(1, sum(LENGTHS), WIDTH, device=device)
    if not takes_bounds(layer):
        print("no installed kernel takes bounds: install flash-linear-attention")
        return 1
    began = time.perf_counter()
    ours = whole(layer, within(layer, starts), row)
    ours_gradients = gradients(layer, ours, row, scale)
    torch.cuda.synchronize()
    print(f"first row, kernels compiled and tuned: {time.perf_counter() - began:.0f} s", flush=True)
    right = alone(exact, full, spans)
    right_gradients = gradients(exact, right, full, scale)
    rounded = alone(layer, row, spans)
    for name, output, found in (
        ("with bounds", ours, ours_gradients),
        ("each document alone in bfloat16", rounded, gradients(layer, rounded, row, scale)),
        ("without bounds", seen := whole(layer, {}, row), gradients(layer, seen, row, scale)),
    ):
        print(
            f"{name:<34} {off([output.float()], [right]):.1e} of the norm, gradients {off(found, right_gradients):.1e}"
        )

    def bounded() -> None:
        gradients(layer, whole(layer, within(layer, starts), row), row, scale)

    print(f"with bounds, forward and backward      {milliseconds(bounded):.1f} ms")
    apart = milliseconds(lambda: gradients(layer, alone(layer, row, spans), row, scale))
    print(f"document by document, torch functions  {apart:.1f} ms", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        bounded()
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in rows[:14]:
        print(f"  {event.self_device_time_total / 1000:7.2f} ms  {event.count:4d} x {event.key[:100]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
