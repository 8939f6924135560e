"""A policy that sees: its images go through the tower, and the tower's features to the places that they stand for.

transformers' parts are called one by one. Its own forward pass looks for placeholders by token id, and stops once the
policy has sampled such a token itself; here features go by place, and a sampled one is text. The tower runs for every
microbatch, on a blank image where there is none: ranks gather its weights together, and every parameter gets a
gradient. `learner/train/pictures.py` packs the images, `policy.py` calls `Sight`; waits for nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from learner.model.idle_parts import idle_names, sees

PATCHES_PER_TOKEN = 2
"""Patches that a microbatch may have, times its budget of tokens: a token of an image is 4 patches, so images may fill
half of a row. A sample that has more gets a microbatch of its own."""
Grid = tuple[int, int, int]
"""Patches of an image in time, height and width."""


@dataclass(frozen=True)
class PackedImages:
    """The images of a microbatch, each distinct one once."""

    pixels: Tensor
    """uint8 [patches, 3, patch²]: the colours of each patch, patches of a token side by side."""
    normaliser: Tensor
    """float32 [2, 3, 1]: mean and standard deviation of the three colours, from 0 to 255."""
    grid: Tensor
    """int64 [images, 3]: patches in time, height and width."""
    take: Tensor
    """int64 [placeholders]: the feature of each placeholder, counted over all images."""
    places: Tensor
    """int64 [placeholders]: where the placeholders are in the row."""
    layout: dict[str, Any] = field(default_factory=dict)
    """What the tower computes of `grid`, so that it need not wait for the GPU; see `Sight.lay_out`."""

    def to(self, device: torch.device) -> "PackedImages":
        """The same images on `device`."""

        def moved(x: Any) -> Any:
            return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x

        layout = {name: moved(x) for name, x in self.layout.items()}
        tensors = {name: moved(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return PackedImages(layout=layout, **tensors)


def rope_positions(length: int, images: Iterable[tuple[int, Grid]], merge: int) -> np.ndarray:
    """Rotary positions of a document of `length` tokens in time, height and width: [3, length] int64.

    `images`: where the placeholders of each begin, in order, and its grid. Text counts on by 1 in all three rows; the
    tokens of an image are on its grid, counted from where it begins, and what follows begins after its longer side.
    Equal to transformers' `get_rope_index` for still images. A property of the document alone: packing changes nothing.

    Example: `rope_positions(7, [(1, (1, 4, 4))], 2)` is
    [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]].
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


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """The module that turns patches into features; None for a model whose images are not trained."""
    return model.model.visual if sees(model.config) else None  # type: ignore[no-any-return]


def mergers(tower: nn.Module) -> list[nn.Module]:
    """The projector: what makes features of the text model's width of a token's patches."""
    return [tower.merger, *getattr(tower, "deepstack_merger_list", [])]  # type: ignore[list-item]


def freeze(model: PreTrainedModel, parts: Sequence[str]) -> None:
    """Take the gradient from the parts that `model.freeze` names: `projector`, and `vision`, the tower without it; and
    from all that text does not pass where images are not trained."""
    for name in idle_names(model):
        if isinstance(idle := model.get_parameter_or_buffer(name), nn.Parameter):
            idle.requires_grad_(False)
    tower = tower_of(model)
    if tower is None or not parts:
        return
    tower.requires_grad_("vision" not in parts)
    for merger in mergers(tower):
        merger.requires_grad_("projector" not in parts)


class Sight:
    """Runs the tower of `model`, which it changes where transformers' own code would be slow or wait for the GPU.

    `attention`: as `attention.of_tower` names it.
    """

    def __init__(self, model: PreTrainedModel, attention: str) -> None:
        tower: Any = tower_of(model)
        self.tower = tower
        self.decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self.config: Any = model.config.vision_config
        self.trained = any(parameter.requires_grad for parameter in tower.parameters())
        tower.config._attn_implementation_internal = attention  # transformers takes no such name while it builds
        tower.patch_embed.forward = MethodType(_embed_patches, tower.patch_embed)
        if hasattr(self.decoder, "_deepstack_process"):
            self.decoder._deepstack_process = _add_at_places
        self._blank: PackedImages | None = None

    def inputs(self, tokens: Tensor, images: PackedImages | None) -> dict[str, Any]:
        """The decoder's arguments in place of `input_ids`, for a row of `tokens` [tokens] with `images`."""
        if images is None:
            images = self._blank = self._blank or self._make_blank(tokens.device)
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            patches = _normalised(images, self.config.temporal_patch_size)
            found = self.tower(patches, grid_thw=images.grid, return_dict=True, **images.layout)
        embedded = self.decoder.embed_tokens(tokens)
        features, *deeper = (
            x.to(embedded.dtype).index_select(0, images.take)
            for x in (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
        )
        given = {"inputs_embeds": embedded.index_copy(0, images.places, features)[None]}
        if deeper:
            given |= {"visual_pos_masks": images.places, "deepstack_visual_embeds": deeper}
        return given

    def lay_out(self, images: PackedImages) -> PackedImages:
        """`images`, still on the CPU, with what the tower would otherwise compute of their grid on the GPU."""
        return replace(images, layout=_layout(images.grid, self.tower))

    def _make_blank(self, device: torch.device) -> PackedImages:
        """The smallest image, which no token stands for."""
        merge, nothing = self.config.spatial_merge_size, torch.zeros(0, dtype=torch.int64)
        pixels = torch.zeros(merge**2, self.config.in_channels, self.config.patch_size**2, dtype=torch.uint8)
        one = torch.ones(2, self.config.in_channels, 1)
        return self.lay_out(PackedImages(pixels, one, torch.tensor([[1, merge, merge]]), nothing, nothing)).to(device)


def _normalised(images: PackedImages, frames: int) -> Tensor:
    """transformers' `pixel_values`: [patches, 3 * frames * patch²] float32."""
    mean, deviation = images.normaliser
    colours: Tensor = (images.pixels.float() - mean) / deviation
    return colours[:, :, None].expand(-1, -1, frames, -1).flatten(1)


def _embed_patches(self: Any, patches: Tensor) -> Tensor:
    """The convolution of patches that do not overlap is a matmul, and slow as a convolution since torch 2.9."""
    weight: Tensor = self.proj.weight
    embedded: Tensor = linear(patches.to(weight.dtype), weight.flatten(1), self.proj.bias)
    return embedded


def _add_at_places(hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Qwen3-VL adds deeper features to the first blocks' output [1, tokens, width]; by index, for a mask would wait."""
    return hidden.index_add(1, places, features.to(hidden.dtype)[None])


def _layout(grid: Tensor, tower: Any) -> dict[str, Any]:
    """Bounds, positions and order of the patches, by the names under which the tower takes them."""
    from transformers import vision_utils  # since 5.16; text models do without

    merge = tower.spatial_merge_size
    starts = vision_utils.get_vision_cu_seqlens(grid)
    found = {"cu_seqlens": starts, "max_seqlen": int(starts.diff().max())}
    found["position_ids"] = vision_utils.get_vision_position_ids(grid, merge)
    if hasattr(tower, "window_size"):
        index, windows = vision_utils.get_vision_window_index(grid, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": index, "cu_window_seqlens": windows}
        found["max_window_seqlen"] = int(windows.diff().max())
    if hasattr(tower, "num_grid_per_side"):
        side, mode, corners = tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners
        interpolate = vision_utils.get_vision_interpolation_indices_and_weights
        indices, weights = interpolate(grid, side, mode=mode, align_corners=corners, spatial_merge_size=merge)
        found |= {"interp_indices": indices, "interp_weights": weights}
    return found
