"""Exchanges between ranks besides gradients. Each is a collective, which waits up to `learner.timeout_s`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def all_gather_ragged(values: Tensor) -> list[Tensor]:
    """`values` [n] of every rank, in rank order; n differs by rank."""
    world = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([len(values)]))
    padded = values.new_zeros(int(max(lengths)))
    padded[: len(values)] = values
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    return [whole[: int(length)] for whole, length in zip(gathered, lengths, strict=True)]


def all_reduce_max(*numbers: float) -> list[float]:
    """The largest of any rank's, for each number."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()  # type: ignore[no-any-return]


def meet() -> None:
    """Return once every rank has called this."""
    all_reduce_max(0)


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum of every rank's `values`."""
    total = values.clone()
    dist.all_reduce(total)
    return total


def broadcast_from_rank0(number: int) -> int:
    """Rank 0's `number`."""
    tensor = torch.tensor(number, dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return int(tensor)


def broadcast_from_first(number: int, group: dist.ProcessGroup) -> int:
    """The number of the group's first rank."""
    tensor = torch.tensor(number, dtype=torch.int64)
    dist.broadcast(tensor, group=group, group_src=0)
    return int(tensor)


def broadcast_state(state: dict[Any, Any], group: dist.ProcessGroup) -> None:
    """Broadcast nested `state` in place from the group's first rank. All must have the same shards."""
    for _, value in sorted(state.items(), key=lambda item: str(item[0])):
        if isinstance(value, dict):
            broadcast_state(value, group)
        elif isinstance(value, Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            if local.numel():
                dist.broadcast(local, group=group, group_src=0)
