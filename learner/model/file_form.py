"""Reverts how transformers renames and joins weights: readers expect the names of a model's files.

Models in PROVEN need it for experts alone (`learner/saved/export.py`, `rollout/engine/experts/`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from configs.architecture import PROVEN
from learner.model.loading import persistent_buffers

Shapes = list[tuple[str, tuple[int, ...]]]

DEEPER = {"gemma3": ("vision_tower.", "vision_tower.vision_model.")}
"""transformers 5 shortens such names and does not restore them; vLLM knows only the longer ones."""


class FileForm:
    """The form of a model's files; weights must be whole, with or without storage."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._changed: dict[str, Shapes] = {}
        if model.config.model_type not in PROVEN:
            for name, tensor in [*model.named_parameters(), *persistent_buffers(model)]:
                held = [(key, tuple(x.shape)) for key, x in self._reverted(name, tensor.detach().to("meta")).items()]
                if held != [(name, tuple(tensor.shape))]:
                    self._changed[name] = held

    @property
    def changed(self) -> Iterable[str]:
        return self._changed.keys()

    @property
    def joined(self) -> str:
        """A tensor of the files that joins several weights, which this form cannot do."""
        names = Counter(name for held in self._changed.values() for name, _ in held)
        return next((name for name, number in names.items() if number > 1), "")

    def shapes(self, name: str, shape: Iterable[int]) -> Shapes:
        return self._changed.get(name) or [(name, tuple(shape))]

    def tensors(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views of `weight`."""
        held = self._changed.get(name)
        if held is None:
            yield name, weight
        elif len(held) == 1 and held[0][1] == weight.shape:
            yield held[0][0], weight
        else:
            yield from self._reverted(name, weight).items()

    @torch.no_grad()
    def _reverted(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        held: dict[str, Tensor] = revert_weight_conversion(self._model, {name: weight})
        begins = DEEPER.get(self._model.config.model_type)
        return held if begins is None else {_deeper(key, *begins): tensor for key, tensor in held.items()}


def _deeper(name: str, begins: str, deeper: str) -> str:
    return deeper + name.removeprefix(begins) if name.startswith(begins) and not name.startswith(deeper) else name
