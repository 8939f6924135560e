"""Copies many tensors with few launches. While the CPU launches one copy for each weight, the GPU is idle for longer
than the copies take.
"""

from collections.abc import Iterable

import torch

HELD_BYTES = 64 << 20
"""Copies are launched before their sources take more memory than this; one allocation may be larger."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Target, and source of the same shape."""


def copy_in_turn(pairs: Iterable[Pair], non_blocking: bool = False) -> None:
    """`target.copy_(source)` for all pairs, each taken from `pairs` when its turn comes. Targets share no memory."""
    together: list[Pair] = []
    held = last = 0
    for target, source in pairs:
        memory = source.untyped_storage()
        if memory.data_ptr() != last:
            if held + memory.nbytes() > HELD_BYTES:
                copy_together(together, non_blocking)
                together, held = [], 0
            held, last = held + memory.nbytes(), memory.data_ptr()
        together.append((target, source))
    copy_together(together, non_blocking)


def copy_together(pairs: Iterable[Pair], non_blocking: bool = False) -> None:
    """`target.copy_(source)` for all pairs. On a GPU torch fuses a contiguous list of one pair of dtypes."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        if target.numel():
            kind = target.dtype, source.dtype, target.is_contiguous() and source.is_contiguous()
            targets, sources = groups.setdefault(kind, ([], []))
            targets.append(target)
            sources.append(source)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources, non_blocking)
