"""Random weights under the names of a model's files, to try vLLM's loads."""

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from configs.model_facts import TEXT_PARTS, UNREAD
from configs.model_folder import FolderError, header_of, weight_files

GAIN, MOVED = 1.5, 0.2
"""Scales of matrices, and of noise on vectors of ones."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
LAYER = re.compile(r"\.layers\.(\d+)\.")
EVERY_KIND = "*"


def kind_of(name: str) -> str:
    """`model.layers.0.mlp.experts.3.up_proj.weight` -> `model.layers.#.mlp.experts.#.up_proj.weight`"""
    return NUMBER.sub("#", name)


class TrialWeights:
    """Weights for a worker on `device`. Raises FolderError for a model without files of weights."""

    def __init__(self, model_config: Any, device: torch.device) -> None:
        text = model_config.hf_text_config
        self._device, self._dtype = device, model_config.dtype
        self._layers = int(getattr(text, "num_hidden_layers", 0))
        self._tied = bool(getattr(text, "tie_word_embeddings", False))
        self._text_alone = bool(model_config.is_multimodal_model)
        files = weight_files(Path(model_config.model))
        if not files:
            raise FolderError(f"{model_config.model} has no files of them")
        every = [each for file in files for each in header_of(file).shapes.items()]
        self._shapes = {name: shape for name, shape in every if self._is_read(name)}

    def _is_read(self, name: str) -> bool:
        """vLLM reads no tied head, rotary frequencies or layers that predict further tokens."""
        layer = LAYER.search(f".{name}")
        if name.startswith(UNREAD) or name.endswith(".inv_freq") or (layer and int(layer[1]) >= self._layers):
            return False
        return not (self._tied and name.endswith("lm_head.weight"))

    def kinds(self) -> list[str]:
        """Return kinds of weights that text passes."""
        names = (name for name in self._shapes if not self._text_alone or TEXT_PARTS.search(name))
        return sorted({kind_of(name) for name in names})

    def tensors(self, changed: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, with other values for the kind `changed` or every kind."""
        source = torch.Generator(self._device)
        for name, shape in self._shapes.items():
            source.manual_seed(2 * zlib.crc32(name.encode()) + (changed in (EVERY_KIND, kind_of(name))))
            drawn = torch.randn(shape, generator=source, device=self._device)
            scaled = drawn * GAIN / shape[-1] ** 0.5 if len(shape) > 1 else 1 + MOVED * drawn
            yield name, scaled.to(self._dtype)


def cannot_be_tried(model_config: Any) -> str:
    """Return why loads cannot be tried, or ""."""
    try:
        TrialWeights(model_config, torch.device("meta"))
    except FolderError as error:
        what = "a server tries this mixture of experts with the names of its weights (docs/experts.md)"
        return f"model.path: {what}, but {error}; name a folder with the model's .safetensors files"
    return ""
