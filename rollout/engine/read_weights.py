"""Notes which weights a load reads. Loaders of vLLM skip biases and norms for which its model has no parameter, without
an error; the server would compute another model than the learner trains."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.engine.recorded_copies import span


class ReadWeights(TorchDispatchMode):
    """Keeps no tensor of the load. `unread`: names of weights that came and that no operation has read so far."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = set[str]()
        self._spans: list[tuple[int, int, str]] = []
        """Sorted: where a weight begins and ends, and its name."""

    def watch(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            if weight.numel():
                self._note(*span(weight), name)
            yield name, weight

    def _note(self, start: int, stop: int, name: str) -> None:
        """What the memory held before is gone."""
        first = self._before(start)
        while first < len(self._spans) and self._spans[first][0] < stop:
            if self._spans[first][1] > start:
                del self._spans[first]
            else:
                first += 1
        self._spans.insert(first, (start, stop, name))
        self.unread.add(name)

    def _before(self, address: int) -> int:
        """The place of the last span that begins at or before `address`; 0 if there is none."""
        return max(0, bisect_right(self._spans, address, key=lambda each: each[0]) - 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._spans and not func.is_view:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    start, stop, name = self._spans[self._before(leaf.data_ptr())]
                    if start <= leaf.data_ptr() < stop:
                        self.unread.discard(name)
        return func(*args, **(kwargs or {}))
