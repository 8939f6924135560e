"""A policy that sees: a tower's features go to their places in the text.

Places, not token ids, decide: a sampled placeholder is text. The tower runs for every microbatch, if need be on a blank
image: ranks gather its weights together, and every parameter gets a gradient.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.architecture import MUTUAL
from learner.model.idle_parts import idle_names
from learner.model.towers import GridTower, PackedImages, PooledTower, tower_parts

PATCHES_PER_TOKEN = 2
"""A token of an image is 4 patches, so images may fill half of a row. A sample with more gets its own microbatch."""
COLOURS = 3
Grid = tuple[int, int, int]
"""Patches in time, height and width."""


def rope_positions(length: int, images: Iterable[tuple[int, Grid]], merge: int) -> np.ndarray:
    """Rotary positions of a document in time, height and width: [3, length] int64.

    `images`: where each begins, and its grid. What follows an image begins after its longer side. Equal to
    transformers' `get_rope_index` for still images.

    Example: `rope_positions(7, [(1, (1, 4, 4))], 2)` is [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2,
    3, 4]].
    """
    out = np.empty((3, length), np.int64)
    end = now = 0
    for start, (frames, height, width) in images:
        grid = np.indices((frames, height // merge, width // merge)).reshape(3, -1)
        out[:, end:start] = now + np.arange(start - end)
        now += start - end
        end = start + grid.shape[1]
        out[:, start:end] = now + grid
        now += max(height, width) // merge
    out[:, end:] = now + np.arange(length - end)
    return out


def freeze(model: PreTrainedModel, parts: Sequence[str]) -> None:
    """Freeze what `model.freeze` names, and idle parts."""
    for name in idle_names(model):
        if isinstance(idle := model.get_parameter_or_buffer(name), nn.Parameter):
            idle.requires_grad_(False)
    seeing = tower_parts(model)
    if seeing is None or not parts:
        return
    projected = {parameter for projector in seeing.projectors for parameter in projector.parameters()}
    for parameter in {*seeing.tower.parameters()} | projected:  # projectors may be parts of the tower
        if ("projector" if parameter in projected else "vision") in parts:
            parameter.requires_grad_(False)


class Sight:
    """Runs the tower, changed where transformers is slow or waits for the GPU."""

    def __init__(self, model: PreTrainedModel, attention: str) -> None:
        parts, config = tower_parts(model), model.config.vision_config
        assert parts is not None, "a model whose images are trained"
        self.decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self.config: Any = config
        self.merge = parts.merge
        self.trained = any(parameter.requires_grad for parameter in parts.parameters)
        self.tower: GridTower | PooledTower
        if model.config.model_type in MUTUAL:
            self.tower = PooledTower(parts, config, attention)
        else:
            self.tower = GridTower(parts, self.decoder, config, attention)
        self._blank: PackedImages | None = None

    def inputs(self, tokens: Tensor, images: PackedImages | None) -> dict[str, Any]:
        """The decoder's arguments in place of `input_ids`."""
        if images is None:
            images = self._blank = self._blank or self._make_blank(tokens.device)
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            found = self.tower.features(images)
        embedded = self.decoder.embed_tokens(tokens)
        features, *deeper = (x.to(embedded.dtype).index_select(0, images.take) for x in found)
        given = {"inputs_embeds": embedded.index_copy(0, images.places, features)[None]}
        if deeper:
            given |= {"visual_pos_masks": images.places, "deepstack_visual_embeds": deeper}
        return given

    def positions(self, given: Tensor) -> Tensor:
        """Positions for the decoder: [4, tokens] for a tower with a grid, also in a row of text, [tokens] otherwise.

        If rows of text had another shape, the compiler would compile each block for both.
        """
        return given.expand(4, -1) if given.dim() == 1 and isinstance(self.tower, GridTower) else given

    def lay_out(self, images: PackedImages) -> PackedImages:
        """Add on the CPU what the tower would compute on the GPU."""
        return replace(images, layout=self.tower.layout(images.grid))

    def _make_blank(self, device: torch.device) -> PackedImages:
        merge, channels, nothing = self.merge, COLOURS, torch.zeros(0, dtype=torch.int64)
        pixels = torch.zeros(merge**2, channels, self.config.patch_size**2, dtype=torch.uint8)
        one = torch.ones(2, channels, 1)
        return self.lay_out(PackedImages(pixels, one, torch.tensor([[1, merge, merge]]), nothing, nothing)).to(device)
