"""The few words that learner ranks exchange beside gradients: facts about samples, sums, agreements.

They travel as CPU tensors over gloo, whatever the device of the model. Each call is a collective: every rank must make
it, and waits for the last to come, up to `learner.timeout_s`.
"""

import json
from typing import Any

import torch
import torch.distributed as dist


def gather(fact: Any) -> list[Any]:
    """`fact` of every rank, in rank order; JSON carries it, so floats arrive as they are."""
    if dist.get_world_size() == 1:
        return [json.loads(json.dumps(fact))]
    data = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(rows, padded)
    return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def all_reduce_max(number: float) -> float:
    """The all_reduce_max `number` of any rank."""
    tensor = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def concatenate(values: torch.Tensor, blank: float) -> torch.Tensor:
    """`values` [n], each rank with its own n, of all ranks one after another; `blank` fills gaps."""
    longest = int(all_reduce_max(len(values)))
    padded = values.new_full((longest,), blank)
    padded[: len(values)] = values
    rows = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, padded)
    return torch.cat(rows)


def broadcast_from_rank0(number: int) -> int:
    """Rank 0's `number`, on every rank."""
    tensor = torch.tensor(number, dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor)
