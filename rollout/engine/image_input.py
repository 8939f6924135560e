"""Images for vLLM's engine, beside tokens that are already as long as they will be.

vLLM's processor would expand sampled placeholders too, and would see other pixels than the learner.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import BatchFeature

from buffer.data.images import Picture
from rollout.engine.door.vllm_client import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
    mm_input,
)
from rollout.tasks.trajectory import PlacedImage


def image_input(tokens: list[int], images: Sequence[PlacedImage], salt: str, names_salt: str, dtype: Any) -> Any:
    """`salt` is the prefix cache's. `names_salt` is in the names of images, because other weights see an image
    otherwise."""
    items = MultiModalKwargsItems({"image": [item(image.picture, dtype) for image in images]})
    names = {"image": [f"{image.picture.digest}-{names_salt}" for image in images]}
    ranges = {"image": [PlaceholderRange(offset=each.start, length=each.picture.num_tokens) for each in images]}
    return mm_input(tokens, items, names, ranges, cache_salt=salt)


@lru_cache(maxsize=16)
def item(picture: Picture, dtype: Any) -> MultiModalKwargsItem:
    """The picture as the tower takes it, kept for further turns. NumPy takes bfloat16 as bits; a cast by torch takes
    twice the processor time."""
    square = picture.format.side is not None
    name, given = ("num_patches", [1]) if square else ("image_grid_thw", [picture.grid])
    sizes = torch.tensor(given)  # vLLM calls a square image a patch
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes if square else sizes.prod(-1)),
        name: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    levels = torch.from_numpy(picture.format.levels()).to(dtype)
    bits = levels.view({2: torch.int16, 4: torch.int32}[dtype.itemsize]).numpy()
    values = picture.planes(bits)[None] if square else picture.patches(bits)
    tensors = BatchFeature({"pixel_values": torch.from_numpy(values).view(dtype), name: sizes})
    found: MultiModalKwargsItem = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"][0]
    return found
