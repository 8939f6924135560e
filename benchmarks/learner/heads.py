"""The case `head`: forward and backward pass of the log-probability head alone, with the model's vocabulary and hidden
size.

Ours computes gradients while a chunk's logits exist (`ours`; `dppo` is the same with that loss instead of a sum), or
recomputes the logits if the loss needs all tokens first (`twice`). Compared with all logits at once (`naive`) and
Liger's fused loss, if installed. Run by `benchmarks.learner`; waits for nothing.
"""

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.learner.cases import SHAPES, Case
from configs.schema import AlgorithmConfig
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES
from learner.model.head import HeadOptions, chunked_loss, logprobs_and_entropy

Head = Callable[[Tensor, Tensor], Tensor]
"""(hidden states, targets) -> loss."""
OPTIONS = HeadOptions(chunk_size=4096)
TOKENS = {"cuda": (4096, 16384, 32768), "cpu": (64, 128)}


def run(case: Case, folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Milliseconds and GiB of each head at each number of tokens."""
    shape, device = SHAPES[case.model], torch.device(mesh.device_type)
    vocabulary, width = shape["vocab_size"], shape["hidden_size"]
    weight = (torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16) * 0.02).requires_grad_()
    heads, answer = contenders(weight), {}
    for tokens in TOKENS[device.type]:
        for name, head in heads.items():
            hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            targets = torch.randint(vocabulary, (tokens,), device=device)
            passes = [timed(head, hidden, targets, weight) for _ in range(4)]
            answer[f"{name} {tokens}"] = {"ms": median(ms for ms, _ in passes[1:]), "gib": passes[-1][1]}
    return {"heads": answer}


def contenders(weight: Tensor) -> dict[str, Head]:
    """The heads to compare, by name."""
    default = policy_loss(max(TOKENS[weight.device.type]), weight.device)

    def ours(hidden: Tensor, targets: Tensor) -> Tensor:
        return chunked_loss(hidden, weight, targets, lambda logprobs, entropy, chunk: logprobs.sum(), OPTIONS)[2]

    def dppo(hidden: Tensor, targets: Tensor) -> Tensor:
        return chunked_loss(hidden, weight, targets, default, OPTIONS)[2]

    def twice(hidden: Tensor, targets: Tensor) -> Tensor:
        return logprobs_and_entropy(hidden, weight, targets, OPTIONS)[0].sum()

    def naive(hidden: Tensor, targets: Tensor) -> Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None]).sum()

    heads: dict[str, Head] = {"ours": ours, "dppo": dppo, "twice": twice, "naive": naive}
    if find_spec("liger_kernel") is None:
        print("head: liger-kernel is not installed", flush=True)
        return heads
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # a competitor, not a dependency

    liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return heads | {"liger": lambda hidden, targets: liger(weight, hidden, targets)}


def policy_loss(tokens: int, device: torch.device) -> Callable[[Tensor, Tensor, slice], Tensor]:
    """The learner's default loss, with random advantages."""
    config = AlgorithmConfig()
    behaviour, advantages = torch.randn(2, tokens, device=device).unbind()
    sampled = torch.ones(tokens, dtype=torch.bool, device=device)
    sequence = torch.zeros(tokens, dtype=torch.int64, device=device)

    def loss(logprobs: Tensor, entropy: Tensor, chunk: slice) -> Tensor:
        inputs = LossInputs(logprobs, behaviour[chunk], advantages[chunk], sampled[chunk], sequence[chunk], 1, tokens)
        return LOSSES[config.loss].of_tokens(inputs, config)

    return loss


def timed(head: Head, hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[float, float]:
    """Milliseconds of one forward and backward pass, and its peak GiB beyond what was allocated before."""
    gpu = hidden.is_cuda
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    before, start = torch.cuda.memory_allocated() if gpu else 0, time.perf_counter()
    head(hidden, targets).backward()
    if gpu:
        torch.cuda.synchronize()
    spent = time.perf_counter() - start
    weight.grad = hidden.grad = None
    return 1e3 * spent, (torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else 0.0
