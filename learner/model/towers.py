"""The towers that turn patches of images into features."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from configs.architecture import MUTUAL
from learner.model.host_copies import sent
from learner.model.idle_parts import sees

STARTS = ("cu_seqlens", "cu_window_seqlens")
"""Keys of a layout that blocks of a tower get."""


class ImageBlocks(NamedTuple):
    """Images whose tokens see each other, and what is before them in their document.

    Example: an image of 4 from the second token of a document that begins at 2: `places` [3, 4, 5, 6] and `keys` [2, 3,
    4, 5, 6] int64, `starts` [0, 4] and `key_starts` [0, 5] int32.
    """

    places: Tensor
    starts: Tensor
    longest: int
    keys: Tensor
    key_starts: Tensor
    longest_keys: int


@dataclass(frozen=True)
class PackedImages:
    """A microbatch's distinct images."""

    pixels: Tensor
    """uint8 [patches, 3, patch²]: colours; a token's patches are adjacent."""
    normaliser: Tensor
    """float32 [2, 3, 1]: mean and standard deviation, from 0 to 255."""
    grid: Tensor
    """int64 [images, 3]: patches in time, height and width."""
    take: Tensor
    """int64 [placeholders]: the feature of each."""
    places: Tensor
    """int64 [placeholders]"""
    blocks: ImageBlocks | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    """The result of `Sight.lay_out`."""

    def to(self, device: torch.device) -> "PackedImages":
        return sent(self, device)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "PackedImages":
        """Apply `function` to each tensor, in order."""

        def changed(x: Any) -> Any:
            return function(x) if isinstance(x, Tensor) else x

        layout = {name: changed(x) for name, x in self.layout.items()}
        tensors = {name: function(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        blocks = None if self.blocks is None else ImageBlocks(*map(changed, self.blocks))
        return PackedImages(blocks=blocks, layout=layout, **tensors)


class TowerParts(NamedTuple):
    tower: Any
    blocks: list[nn.Module]
    projectors: list[nn.Module]
    embedding: nn.Module
    merge: int
    """A token is `merge` x `merge` patches."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        every = [each for part in (self.tower, *self.projectors) for each in part.parameters()]
        return list({id(each): each for each in every}.values())


def tower_parts(model: PreTrainedModel) -> TowerParts | None:
    """The parts that see images; None where images are not trained."""
    if not sees(model.config):
        return None
    config: Any = model.config
    core: Any = model.model
    if config.model_type in MUTUAL:
        tower, projector = core.vision_tower, core.multi_modal_projector
        tower = getattr(tower, "vision_model", tower)  # until about transformers 5.17 it was one module deeper
        blocks = list(tower.encoder.layers)
        return TowerParts(tower, blocks, [projector], tower.embeddings.patch_embedding, projector.kernel_size)
    tower, merge = core.visual, config.vision_config.spatial_merge_size
    mergers = [tower.merger, *getattr(tower, "deepstack_merger_list", [])]
    return TowerParts(tower, list(tower.blocks), mergers, tower.patch_embed.proj, merge)


class GridTower:
    """A Qwen model's tower, for images of any size at once."""

    def __init__(self, parts: TowerParts, decoder: Any, config: Any, attention: str) -> None:
        tower = self.tower = parts.tower
        self.frames: int = config.temporal_patch_size
        tower.config._attn_implementation_internal = attention  # transformers does not take the name while it builds
        tower.patch_embed.forward = MethodType(_embed_patches, tower.patch_embed)
        if hasattr(decoder, "_deepstack_process"):
            decoder._deepstack_process = _add_at_places

    def features(self, images: PackedImages) -> list[Tensor]:
        """Features of each token [tokens, width], then deeper ones."""
        patches = _normalised(images, self.frames)
        found = self.tower(patches, grid_thw=images.grid, return_dict=True, **_compiled_once(images.layout))
        return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]

    def layout(self, grid: Tensor) -> dict[str, Any]:
        from transformers import vision_utils  # since 5.16; text models do without

        tower = self.tower
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

    def compute_block(self, block: nn.Module, hidden: Tensor, starts: Tensor) -> Tensor:
        width = hidden.shape[1] // self.tower.config.num_heads
        angles = 2 * [hidden.new_zeros(len(hidden), width, dtype=torch.float32)]
        out: Tensor = block(hidden, cu_seqlens=starts, max_seqlen=len(hidden), position_embeddings=angles)
        return out

    def project(self, projector: nn.Module, hidden: Tensor) -> Tensor:
        out: Tensor = projector(hidden)
        return out


class PooledTower:
    """Gemma 3's tower and projector, for images of one size.

    Patches come token by token, because order changes only their positions: a token's features are the mean of
    successive patches.
    """

    def __init__(self, parts: TowerParts, config: Any, attention: str) -> None:
        self.tower, (projector,) = parts.tower, parts.projectors
        self.projector: Any = projector
        self.merge, self.side = parts.merge, config.image_size // config.patch_size
        self.tower.config._attn_implementation_internal = attention
        self.tower.encoder.config._attn_implementation_internal = attention

    def features(self, images: PackedImages) -> list[Tensor]:
        layout, embeddings = _compiled_once(images.layout), self.tower.embeddings
        embedded = _embedded(embeddings.patch_embedding, _normalised(images, 1))
        places = embeddings.position_embedding(layout["position_ids"])
        hidden = (embedded.unflatten(0, (-1, len(places))) + places).flatten(0, 1)[None]
        bounds = {"cu_seq_lens_q": layout["cu_seqlens"], "max_length_q": layout["max_seqlen"]}
        hidden = self.tower.encoder(inputs_embeds=hidden, **bounds).last_hidden_state
        return [self.project(self.projector, self.tower.post_layernorm(hidden)[0])]

    def compute_block(self, block: nn.Module, hidden: Tensor, starts: Tensor) -> Tensor:
        out: Tensor = block(hidden[None], attention_mask=None, cu_seq_lens_q=starts, max_length_q=len(hidden))
        return out

    def project(self, projector: Any, hidden: Tensor) -> Tensor:
        pooled = hidden.unflatten(0, (-1, self.merge**2)).mean(1)
        return torch.matmul(projector.mm_soft_emb_norm(pooled), projector.mm_input_projection_weight)

    def layout(self, grid: Tensor) -> dict[str, Any]:
        _, high, wide = grid[0].tolist()
        rows = torch.arange(high)[:, None] * self.side + torch.arange(wide)
        tokens = rows.reshape(high // self.merge, self.merge, wide // self.merge, self.merge).transpose(1, 2)
        starts = torch.arange(len(grid) + 1, dtype=torch.int32) * (high * wide)
        return {"position_ids": tokens.flatten(), "cu_seqlens": starts, "max_seqlen": high * wide}


def _compiled_once(layout: dict[str, Any]) -> dict[str, Any]:
    """Copy starts of images out of the row's buffer: the compiler tells tensors that begin their memory, as those of a
    row without images do, from others."""
    return {name: x.clone() if name in STARTS else x for name, x in layout.items()}


def _normalised(images: PackedImages, frames: int) -> Tensor:
    """transformers' `pixel_values`: [patches, 3 * frames * patch²] float32."""
    mean, deviation = images.normaliser
    colours: Tensor = (images.pixels.float() - mean) / deviation
    return colours[:, :, None].expand(-1, -1, frames, -1).flatten(1)


def _embed_patches(self: Any, patches: Tensor) -> Tensor:
    return _embedded(self.proj, patches)


def _embedded(convolution: Any, patches: Tensor) -> Tensor:
    """As a convolution this is slow since torch 2.9; patches do not overlap."""
    weight: Tensor = convolution.weight
    embedded: Tensor = linear(patches.to(weight.dtype), weight.flatten(1), convolution.bias)
    return embedded


def _add_at_places(hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """A mask would wait for the GPU."""
    return hidden.index_add(1, places, features.to(hidden.dtype)[None])
