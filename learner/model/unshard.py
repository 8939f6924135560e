"""Gathers whole weights from the ranks that share a copy of the model, many with one all-gather: `DTensor.full_tensor`
gathers them singly, at a price for each.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.mesh import shards
from learner.model.lora.adapter import Factor

GATHER_BYTES = 512 << 20
"""With half as many 7B takes 1.4 to 1.7 times as long, with twice as many 0.8 to 1.0 (benchmarks/LOG.md)."""


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
    mesh, placements = shards_of[0].device_mesh, shards_of[0].placements
    shapes = [shard.shape for shard in shards_of]
    lengths = [-(-shape[0] // shards(mesh)) * shape[1:].numel() for shape in shapes]
    mine = torch.empty(sum(lengths), dtype=dtype, device=device)
    with torch.no_grad():
        for weight, shard, share in zip(weights, shards_of, mine.split(lengths), strict=True):
            local = shard.to_local().flatten()
            share[: len(local)].copy_(local if weight.scale == 1.0 else local * weight.scale)
        every = DTensor.from_local(mine, mesh, placements, run_check=False).full_tensor().view(shards(mesh), -1)
    for weight, shape, rows in zip(weights, shapes, every.split(lengths, dim=1), strict=True):
        yield weight.name, rows.reshape(-1)[: shape.numel()].view(shape)


def is_sharded(parameter: Tensor) -> bool:
    """Whether each rank has its own rows. Raises ValueError for another cut."""
    if not isinstance(parameter, DTensor):
        return False
    cut = parameter.placements[-1]
    if not cut.is_shard(0):
        raise ValueError(f"a weight is cut by {cut}, and only weights that are cut by rows can be published by rows")
    return True


@torch.no_grad()
def own_rows(parameter: Tensor) -> Tensor:
    """This rank's rows, or all if not sharded: a view."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _sharded(parameter: Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "FSDP has gathered it: publish after a backward pass or a score"
    return parameter
