"""Counts bytes alive at each moment of a computation on the meta device, which frees tensors as a GPU would."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.model.kernels.operators import ATTEND_BACKWARD


class Line(NamedTuple):
    """Bytes: `fixed + per_token * tokens`."""

    fixed: int
    per_token: int

    def at(self, tokens: int) -> int:
        return self.fixed + self.per_token * tokens


IN_PLACE: dict[Any, Any] = {
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}
"""Backward passes write into zeros, but copy them first where a dispatch mode is active."""


class Alive(TorchDispatchMode):
    """Counts storages made within it while they live. Views and in-place results make none."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.levels = [0]
        """Bytes after each change."""
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in IN_PLACE and torch._C._current_autograd_node() is not None:
            func = IN_PLACE[func]
        output = func(*args, **(kwargs or {}))
        for made in tree_leaves(output):
            if isinstance(made, Tensor):
                self._count(made)
        if func is ATTEND_BACKWARD:
            self._pass_through(_workspace(*args[1:4]))
        return output

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._known:
            return
        self.levels.append(self.levels[-1] + size)

        def freed(_: Any) -> None:
            del self._alive[key]
            self.levels.append(self.levels[-1] - size)

        self._alive[key] = weakref.ref(storage, freed)

    def _pass_through(self, size: int) -> None:
        self.levels += [self.levels[-1] + size, self.levels[-1]]


def _workspace(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Bytes that attention's backward kernels hold besides: float32 gradients of queries and, for shared heads of keys,
    gradients of keys and values for each head of queries.
    """
    shared = 2 * q.nbytes if k.shape[1] < q.shape[1] else 0
    return 4 * q.numel() + shared


def lines(short: Sequence[int], long: Sequence[int], tokens: int) -> list[Line]:
    """Lines over tokens through the levels of the same moments with `tokens` and with twice as many; only those that
    are highest somewhere.
    """
    if len(short) != len(long):  # some code loops over tokens
        short, long = [max(short)], [max(long)]
    slopes = ((b - a) / tokens for a, b in zip(short, long, strict=True))
    return highest({Line(round(a - slope * tokens), round(slope)) for a, slope in zip(short, slopes, strict=True)})


def highest(found: Iterable[Line]) -> list[Line]:
    """The upper envelope for 0 or more tokens, by rising slope."""
    envelope: list[Line] = []
    for line in sorted(found, key=lambda line: (line.per_token, line.fixed)):
        while envelope and (line.fixed >= envelope[-1].fixed or _hidden(envelope, line)):
            envelope.pop()
        envelope.append(line)
    return envelope


def _hidden(envelope: Sequence[Line], line: Line) -> bool:
    if len(envelope) < 2:
        return False
    first, middle = envelope[-2:]
    return (first.fixed - line.fixed) * (middle.per_token - first.per_token) <= (first.fixed - middle.fixed) * (
        line.per_token - first.per_token
    )
