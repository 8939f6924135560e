"""Times products and casts in FP8 on one GPU, apart from any model: `python -m benchmarks.lab.fp8_casts [TOKENS]`.

For the linear layers of 7B: TFLOP/s of each product in bfloat16, and in FP8 with Hopper's own sums and with float32
sums, whose errors it shows; then GB/s of the two casts of a factor, compiled as in a block. Prints a table; writes
nothing.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from learner.model import float8
from learner.model.float8 import by_column, by_row

LAYERS = {"q, o": (3584, 3584), "k, v": (3584, 512), "gate, up": (3584, 18944), "down": (18944, 3584)}
"""Sizes of inputs and outputs."""


def seconds(call: Callable[[], Any], times: int = 10) -> float:
    """GPU time of one call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        call()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
    rows, columns = torch.compile(by_row), torch.compile(by_column)
    for name, (inner, outer) in LAYERS.items():
        x, weight = (torch.randn(n, inner, device="cuda", dtype=torch.bfloat16) for n in (tokens, outer))
        grad = torch.randn(tokens, outer, device="cuda", dtype=torch.bfloat16)
        work = 2e-12 * tokens * inner * outer
        factors = {
            "forward": (x, weight, rows(x), rows(weight)),
            "grad of x": (grad, weight.t(), rows(grad), columns(weight)),
            "grad of W": (grad.t(), x.t(), columns(grad), columns(x)),
        }
        for which, (a, b, a8, b8) in factors.items():
            plain = seconds(partial(torch.matmul, a, b.t()))
            exact = a.float() @ b.float().t()
            shown = [f"bf16 {work / plain:.0f} TFLOP/s"]
            for fast in (True, False):
                float8.FAST_SUMS = fast
                took = seconds(partial(float8._multiply, *a8, *b8, torch.bfloat16))
                error = (float8._multiply(*a8, *b8, torch.bfloat16).float() - exact).norm() / exact.norm()
                shown.append(f"fp8 {'fast' if fast else 'float32'} sums {work / took:.0f}, off {float(error):.4f}")
            print(f"{name:<9} {which:<10} {'; '.join(shown)}", flush=True)
            del exact
        for which, cast in (("by row", rows), ("by column", columns)):
            took = seconds(partial(cast, grad))
            print(f"{name:<9} cast {which}: {took * 1e6:.0f} us, {3e-9 * grad.numel() / took:.0f} GB/s", flush=True)


if __name__ == "__main__":
    main()
