"""Notes which bytes of a model's parameters a load in place writes, so that a load that brings a part of a layer is
seen. vLLM's loaders report names alone, and a name counts as loaded as soon as one part of it has come."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.engine.recorded_copies import FILLS, span, storage

WRITES = (torch.ops.aten.copy_.default, *FILLS)


class WrittenBytes(TorchDispatchMode):
    """Keeps no tensor of the load. What other operations than copies write counts as unknown."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._parameters = set(map(storage, parameters))
        self._spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._unknown: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            if func in WRITES and args[0].is_contiguous():
                self._spans[storage(args[0])].append(span(args[0]))
            else:
                touched = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
                self._unknown |= touched & self._parameters
        return func(*args, **(kwargs or {}))

    def is_part(self, parameter: torch.Tensor) -> bool:
        """Whether some bytes of `parameter` were written and others were not."""
        written = self._written(parameter, 1)
        return any(0 < count < parameter.nbytes for count in written)

    def is_uneven(self, experts: torch.Tensor) -> bool:
        """Whether more bytes of some of [experts, ...] were written than of others, or nothing of one half of each.
        Gate and up are halves; padding is less than one."""
        halves = self._written(experts, 2 * len(experts))
        sums = {first + second for first, second in zip(halves[::2], halves[1::2], strict=True)}
        return len(sums) > 1 or (any(halves) and not all(halves))

    def _written(self, parameter: torch.Tensor, pieces: int) -> list[int]:
        """The number of bytes written of each of `pieces` equal parts; none if it is not known."""
        if storage(parameter) in self._unknown or not parameter.is_contiguous():
            return []
        begin, size = parameter.data_ptr(), parameter.nbytes // pieces
        counts, reached = [0] * pieces, begin
        for start, stop in sorted(self._spans[storage(parameter)]):
            at, stop = max(start, reached), min(stop, begin + size * pieces)
            while at < stop:
                piece = (at - begin) // size
                end = min(stop, begin + (piece + 1) * size)
                counts[piece] += end - at
                at = end
            reached = max(reached, stop)
        return counts
