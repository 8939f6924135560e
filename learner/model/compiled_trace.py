"""What the compiler keeps of a block for its backward pass, found without compiling.

It keeps factors and results of matmuls and attention, and the block's input, and recomputes all else. In the backward
pass it fuses what is between two matmuls, so all factors that one kernel writes are alive together.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.model.kernels.operators import ATTEND

MATMULS = (
    *(torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default),
    torch.ops.aten._grouped_mm.default,
)


class Flow(TorchDispatchMode):
    """Records which storages come from which. Holding tensors keeps addresses unique."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._tensors = {weight.untyped_storage()._cdata: weight for weight in weights}
        self._sources: dict[int, set[int]] = defaultdict(set)
        self._products: set[int] = set()
        self._saved: dict[int, None] = {}
        self._outside: set[int] = set()
        self._late: set[int] = set()
        self._within = False

    def begin(self, hidden: Tensor) -> None:
        """Others keep what exists now, except the block's input."""
        self._outside = set(self._tensors)
        self._products, self._saved, self._within = {self._key(hidden)}, {}, True
        self._outside.discard(self._key(hidden))

    def end(self) -> None:
        self._within = False

    @property
    def hooks(self) -> saved_tensors_hooks:
        def keep(tensor: Tensor) -> Tensor:
            if self._within:
                self._saved[self._key(tensor)] = None
            return tensor

        return saved_tensors_hooks(keep, lambda tensor: tensor)

    @cached_property
    def kept(self) -> frozenset[int]:
        found: set[int] = set()
        for key in self._saved:
            found |= self._border(key, found, {})
        return frozenset(found)

    @property
    def kept_bytes(self) -> int:
        return sum(map(self._size, self.kept))

    @property
    def working_bytes(self) -> int:
        """What the backward pass adds between the two widest matmuls: one's result and the other's factors.

        Kept factors, such as an MLP's activations, have been used by then.
        """
        widest = max(map(self._size, self._products - self._outside), default=0)
        late = {key for key in self._late - self._outside if self._size(key) == widest}
        return widest * (len(late - self.kept) - len(late & self.kept))

    def _border(self, key: int, found: set[int], known: dict[int, set[int]]) -> set[int]:
        """The least bytes to keep beside `found` to compute `key` again from the nearest matmuls."""
        if key in self._outside:
            return set()
        if key in self._products or key in found:
            return {key}
        if key not in known:
            sources = [self._border(source, found, known) for source in self._sources[key]]
            needed = set().union(*sources)
            known[key] = {key} if sum(map(self._size, needed - found)) > self._size(key) else needed
        return known[key]

    def _size(self, key: int) -> int:
        size: int = self._tensors[key].untyped_storage().nbytes()
        return size

    def _key(self, tensor: Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        self._tensors.setdefault(key, tensor)
        return key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = {self._key(x) for x in tree_leaves(output) if isinstance(x, Tensor)}
        barrier = func in MATMULS or func is ATTEND
        if self._within:
            if barrier:
                self._products |= given | made
            else:
                for key in made - given:
                    self._sources[key] |= given
        elif func in MATMULS and torch._C._current_autograd_node() is not None:
            self._late |= given | made
        return output
