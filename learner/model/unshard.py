"""Gathers whole weights from the ranks that share a copy of the model, many with one all-gather: `DTensor.full_tensor`
gathers them singly, at a price for each.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from learner.mesh import shards
from learner.model.lora.adapter import Factor
from learner.weights.copying import copy_together

GATHER_BYTES = 512 << 20
"""With half as many 7B takes 1.4 to 1.7 times as long, with twice as many 0.8 to 1.0 (benchmarks/LOG.md)."""

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name from torch 2.13 on, and before. `DTensor.full_tensor` takes the CPU ten times as long."""


def unshard(weights: Iterable[Factor], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole weights, scaled, then rounded to `dtype`; in order. Weights are sharded by rows.

    A collective: all ranks must iterate to the end, and on a GPU keep the current stream. Tensors may share memory:
    copy them, or only read them.
    """
    together: list[Factor] = []
    gathered = 0
    for weight in weights:
        num_bytes = weight.parameter.numel() * dtype.itemsize
        if together and gathered + num_bytes > GATHER_BYTES:
            yield from _gather(together, device, dtype)
            together, gathered = [], 0
        together.append(weight)
        gathered += num_bytes
    if together:
        yield from _gather(together, device, dtype)


def _gather(weights: list[Factor], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each of n ranks holds ceil(rows / n) rows, the last ranks fewer or none: they are padded."""
    shards_of = [_sharded(weight.parameter) for weight in weights]
    mesh = shards_of[0].device_mesh
    number = shards(mesh)
    shapes = [shard.shape for shard in shards_of]
    lengths = [-(-shape[0] // number) * shape[1:].numel() for shape in shapes]
    mine = torch.empty(sum(lengths), dtype=dtype, device=device)
    _round(weights, shards_of, mine.split(lengths))
    every = _of_all_ranks(mine, mesh).view(number, -1)
    del mine
    for weight, shape, rows in zip(weights, shapes, every.split(lengths, dim=1), strict=True):
        padded = rows.numel() > shape.numel()
        yield weight.name, rows.reshape(-1)[: shape.numel()].view(shape) if padded else rows.reshape(shape)


@torch.no_grad()
def _round(weights: list[Factor], shards_of: list[DTensor], shares: Sequence[Tensor]) -> None:
    """Copy this rank's rows, scaled, into its `shares`."""
    together = []
    for weight, shard, share in zip(weights, shards_of, shares, strict=True):
        local = shard.to_local().flatten()
        size = local.numel()
        into = share if size == share.numel() else share[:size]
        if weight.scale == 1.0:
            together.append((into, local))
        else:  # at once, so that only one product takes memory
            into.copy_(local * weight.scale)
    copy_together(together)


def _of_all_ranks(mine: Tensor, mesh: DeviceMesh) -> Tensor:
    if shards(mesh) == 1:
        return mine
    every = mine.new_empty(shards(mesh) * mine.numel())
    all_gather(every, mine, mesh.get_group(mesh.ndim - 1))
    return every


def is_sharded(parameter: Tensor) -> bool:
    """Whether each rank has its own rows. Raises ValueError for another cut."""
    if not isinstance(parameter, DTensor):
        return False
    cut = parameter.placements[-1]
    if not cut.is_shard(0):
        raise ValueError(f"a weight is cut by {cut}, and only weights that are cut by rows can be published by rows")
    return True


def own_rows(parameter: Tensor) -> Tensor:
    """This rank's rows, or all if not sharded: a view. Within `torch.no_grad`."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _sharded(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "FSDP has gathered it: publish after a backward pass or a score"
    return parameter
