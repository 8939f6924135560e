"""Do kernels of flash-linear-attention that get the bounds of documents compute what each document alone gives?

`python -m benchmarks.lab.delta_rules`, on a GPU: the gated delta rule in the sizes of Qwen3.5's heads, by the fla that
is installed, or by vLLM's own copy of it (forward only), against transformers' torch code of each document alone in
float32. Prints differences and milliseconds.
"""

import importlib
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import logsigmoid, normalize
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

LENGTHS = (300, 1500, 37, 640, 333, 64, 1, 129)
HEADS, WIDTH = 16, 128
PLACES = (
    "fla.ops.gated_delta_rule",
    "vllm.third_party.flash_linear_attention.ops",
    "vllm.model_executor.layers.fla.ops",
)
"""Modules that may have `chunk_gated_delta_rule`."""


def kernel() -> tuple[str, Callable[..., Any]] | None:
    """The first kernel that can be imported, and its module."""
    for place in PLACES:
        try:
            return place, importlib.import_module(place).chunk_gated_delta_rule
        except (ImportError, AttributeError) as error:
            print(f"{place}: {type(error).__name__}: {' '.join(str(error).split())[:120]}", flush=True)
    return None


def milliseconds(function: Callable[[], Any]) -> float:
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 200


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU is seen: these kernels run on GPUs only")
        return 1
    torch.manual_seed(0)
    tokens, device = sum(LENGTHS), "cuda"
    shape = 1, tokens, HEADS, WIDTH
    query, key, value = (torch.randn(shape, device=device).bfloat16() for _ in range(3))
    query, key = (normalize(x.float(), dim=-1).bfloat16() for x in (query, key))
    g, beta = logsigmoid(torch.randn(shape[:3], device=device)), torch.rand(shape[:3], device=device)
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    spans = list(pairwise(starts.tolist()))

    def alone(kind: torch.dtype) -> torch.Tensor:
        parts = (
            torch_chunk_gated_delta_rule(
                *(x[:, a:b].to(kind) for x in (query, key, value)), g=g[:, a:b], beta=beta[:, a:b]
            )
            for a, b in spans
        )
        return torch.cat([output for output, _ in parts], 1)

    exact = alone(torch.float32).float()
    whole = torch_chunk_gated_delta_rule(query, key, value, g=g, beta=beta)[0].float()
    size = exact.norm()
    rounded = float((alone(torch.bfloat16).float() - exact).norm() / size)
    print(f"document by document, bfloat16 in: {rounded:.2e} of the norm")
    print(f"without bounds, as one sequence:   {float((whole - exact).norm() / size):.2e} of the norm")
    print(f"document by document, torch:       {milliseconds(lambda: alone(torch.bfloat16)):.2f} ms", flush=True)
    if (found := kernel()) is None:
        print("no kernel is installed that takes bounds: document by document is the only way")
        return 0
    place, function = found

    def bounded() -> torch.Tensor:
        output = function(
            q=query, k=key, v=value, g=g, beta=beta.to(query.dtype),
            initial_state=torch.zeros(len(LENGTHS), HEADS, WIDTH, WIDTH, device=device),
            output_final_state=True, cu_seqlens=starts,
        )  # fmt: skip
        made: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return made

    print(f"bounds handed to {place}:")
    print(f"  against document by document:    {float((bounded().float() - exact).norm() / size):.2e} of the norm")
    print(f"  {milliseconds(bounded):.2f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
