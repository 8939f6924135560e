"""The certificate's rows with images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isqrt

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from buffer.data.images import ImageFormat, Picture, SeenImage
from configs.architecture import MUTUAL
from learner.certify.rows import Case
from learner.model.exactness import packed_row
from learner.model.idle_parts import AROUND_KEYS
from learner.model.microbatch import Microbatch
from learner.model.policy import Policy
from learner.model.shrink import VOCABULARY
from learner.train.pictures import Piece, show

HALF = (0.5, 0.5, 0.5)
Seen = Sequence[SeenImage]
Part = int | tuple[int, int, int]
"""Tokens of text, or a picture: number, height and width in tokens."""
DOCUMENTS: tuple[tuple[Part, ...], ...] = (
    (4, (0, 2, 3), 6),
    (3, (1, 1, 1), (0, 2, 3), 9, (2, 4, 2), 5),
    (11,),
    (23,),
)
PROMPT: tuple[Part, ...] = (3, (3, 3, 2), 4, (1, 1, 1), 2)
ANSWERS: tuple[tuple[Part, ...], ...] = ((4,), (1,), (3, (4, 2, 2), 5))


def image_cases(config: PreTrainedConfig) -> Iterator[Case]:
    form, draw = form_of(config), np.random.default_rng(3)
    texts, seen = zip(*(_written(form, draw, parts) for parts in DOCUMENTS), strict=True)
    yield _packed("images, one document = eager", texts[1:2], seen[1:2])
    yield _packed("images, packed = alone", texts, seen)
    if form.mutual:
        return  # its prompts are not shared
    prompt, before = _written(form, draw, PROMPT)
    written = [_written(form, draw, parts) for parts in ANSWERS]
    behind = [[SeenImage(len(prompt) + start, picture) for start, picture in own] for _, own in written]
    whole = [
        (np.concatenate([prompt, answer]), [*before, *own]) for (answer, _), own in zip(written, behind, strict=True)
    ]
    pieces = [Piece(before, len(prompt), slice(None))]
    pieces += [Piece(own, len(text), slice(len(prompt), None)) for text, own in whole]
    row = packed_row([prompt, *(answer for answer, _ in written)], [len(written)])
    given = [len(prompt)] * len(written)
    for what, each in (("shared", row), ("copied", row.copying(inf))):
        texts, seen = zip(*whole, strict=True)
        yield Case(f"images, {what} prompt = unshared", show(each, pieces), list(texts), given, True, seen)


def _packed(what: str, texts: Sequence[np.ndarray], seen: Sequence[Seen]) -> Case:
    return Case(what, shown_row(texts, seen), list(texts), [1] * len(texts), seen=seen)


def shown_row(texts: Sequence[np.ndarray], seen: Sequence[Seen], groups: Sequence[int] = ()) -> Microbatch:
    return show(
        packed_row(texts, groups),
        [Piece(images, len(text), slice(None)) for text, images in zip(texts, seen, strict=True)],
    )


def form_of(config: PreTrainedConfig) -> ImageFormat:
    vision, mutual = config.vision_config, config.model_type in MUTUAL
    side = vision.image_size if mutual else None
    merge = side // vision.patch_size // isqrt(config.mm_tokens_per_image) if side else vision.spatial_merge_size
    start, end = AROUND_KEYS[mutual]
    return ImageFormat(
        model_type=config.model_type,
        patch=vision.patch_size,
        merge=merge,
        temporal=getattr(vision, "temporal_patch_size", 1),
        mean=HALF,
        std=HALF,
        min_pixels=1,
        max_pixels=1 << 20,
        image_token=config.image_token_id,
        vision_start=getattr(config, start),
        vision_end=getattr(config, end),
        side=side,
    )


def _written(form: ImageFormat, draw: np.random.Generator, parts: Sequence[Part]) -> tuple[np.ndarray, list[SeenImage]]:
    tokens, seen = list[int](), list[SeenImage]()
    for part in parts:
        if isinstance(part, int):
            tokens += draw.integers(2, VOCABULARY, part).tolist()
            continue
        number, *sides = part
        high, wide = (form.side or side * form.factor for side in sides)
        picture = Picture(np.random.default_rng(number).integers(0, 256, (high, wide, 3), dtype=np.uint8), form)
        seen.append(SeenImage(len(tokens) + 1, picture))
        tokens += [form.vision_start, *[form.image_token] * picture.num_tokens, form.vision_end]
    return np.array(tokens), seen


def given_images(text: np.ndarray, seen: Seen) -> Mapping[str, Tensor]:
    """What transformers' processor gives a model for a document's images."""
    if not seen:
        return {}
    pictures = [picture for _, picture in seen]
    form = pictures[0].format
    shown = torch.from_numpy(text == form.image_token).int()[None]
    if form.mutual:
        planes = torch.from_numpy(np.stack([picture.planes() for picture in pictures]))
        return {"pixel_values": planes, "token_type_ids": shown}
    return {
        "pixel_values": torch.from_numpy(np.concatenate([picture.patches() for picture in pictures])),
        "image_grid_thw": torch.tensor([picture.grid for picture in pictures]),
        "mm_token_type_ids": shown,
    }


def placed(policy: Policy, row: Microbatch) -> Microbatch:
    """`row` on the policy's device, its prompts shared or copied as before."""
    if policy.sight is not None and row.images is not None:
        row = replace(row, images=policy.sight.lay_out(row.images))
    return row.to(policy.device)
