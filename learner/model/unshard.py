"""Whole weights from the shards of the ranks that share a copy of the model, many with one all-gather.

One by one, with `DTensor.full_tensor`, each takes a rank 0.3 to 0.5 ms of processor time, whatever its size, and the
learner waits for all of them with each version that it publishes. Used by `policy.py`.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.mesh import shards
from learner.model.lora.adapter import Factor

RUN_BYTES = 512 << 20
"""Bytes of whole weights that one all-gather brings; a larger weight, as an embedding is, has one of its own. With
twice as many, 7B takes as long, with half as many up to twice as long (docs/weights.md)."""


def whole(weights: Iterable[Factor], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Each of `weights`, which are sharded over their first dimension, with its name: whole, times its scale, in
    `dtype` on `device`; in order. A collective of the ranks that share a copy: all of them must iterate to the end, on
    a GPU without changing the current stream."""
    run: list[Factor] = []
    size = 0
    for weight in weights:
        one = weight.parameter.numel() * dtype.itemsize
        if run and size + one > RUN_BYTES:
            yield from _gathered(run, device, dtype)
            run, size = [], 0
        run.append(weight)
        size += one
    if run:
        yield from _gathered(run, device, dtype)


def _gathered(run: list[Factor], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Those of one all-gather. Each rank has as many rows of a weight, but the last ones that have any fewer, as
    `torch.chunk` deals them: what they lack is padded, and cut off behind the last row."""
    mesh, placements = run[0].parameter.device_mesh, run[0].parameter.placements  # type: ignore[attr-defined]
    shapes = [weight.parameter.shape for weight in run]
    shares = [-(-shape[0] // shards(mesh)) * shape[1:].numel() for shape in shapes]
    mine = torch.empty(sum(shares), dtype=dtype, device=device)
    with torch.no_grad():
        for (_, parameter, scale), share in zip(run, mine.split(shares), strict=True):
            assert isinstance(parameter, DTensor)
            local = parameter.to_local().flatten()
            share[: len(local)].copy_(local if scale == 1.0 else local * scale)
        ranks = DTensor.from_local(mine, mesh, placements, run_check=False).full_tensor().view(shards(mesh), -1)
    for weight, shape, rows in zip(run, shapes, ranks.split(shares, dim=1), strict=True):
        yield weight.name, rows.reshape(-1)[: shape.numel()].view(shape)
