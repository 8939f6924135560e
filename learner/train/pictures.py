"""The images of a rank's part of a batch, decoded as the servers did it and packed for the tower. Digests of pixels are
compared: a policy must not be trained on another picture than it saw."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch

from buffer.data.images import ImageError, ImageFormat, Picture, SeenImage, decode
from buffer.wire.protocol import Part
from buffer.wire.sample import AnySample, Sample
from configs.checks import max_sample_tokens
from configs.schema import Config
from learner.model.flops import TowerCosts
from learner.model.microbatch import Microbatch, documents
from learner.model.towers import ImageBlocks, PackedImages
from learner.model.vision import PATCHES_PER_TOKEN, Grid, rope_positions

THREADS = 8
"""PIL decodes without holding the GIL."""
SAME_PILLOW = "install the server's version of Pillow here, and launch again"
SAME_DATA = "restore the data file that the run began with"


class PictureMismatch(RuntimeError):
    """An image is not what the policy saw."""


Seen = Mapping[int, Sequence[SeenImage]]
"""Images by index in `Batch.rows`, in order of `start`."""
NOTHING_SEEN: Seen = MappingProxyType({})


class Measured(Protocol):
    """A picture, with or without its pixels."""

    @property
    def digest(self) -> str: ...

    @property
    def grid(self) -> Grid: ...


class Piece(NamedTuple):
    """One piece of a row: the `part` of a sample of `length` tokens."""

    images: Sequence[SeenImage]
    length: int
    part: slice


class Placed(NamedTuple):
    """A picture in a row."""

    start: int
    picture: Picture
    document: int


def max_sample_patches(config: Config, form: ImageFormat) -> int:
    """Most patches of one sample's images."""
    return min(config.data.max_images * form.max_tokens, max_sample_tokens(config)) * form.merge**2


def open_images(part: Part, samples: Sequence[AnySample], form: ImageFormat | None) -> tuple[Seen, str]:
    """The images of `samples`, and what is wrong with one."""
    if form is None:
        return NOTHING_SEEN, ""
    rows = part.positions.numpy().tolist()
    whole = [(row, sample) for row, sample in zip(rows, samples, strict=True) if isinstance(sample, Sample)]
    showing = [(row, sample) for row, sample in whole if sample.images]
    try:
        files = {row: list(_files(part, row, sample)) for row, sample in showing}
        distinct = {data: name for named in files.values() for name, data in named}
        with ThreadPoolExecutor(THREADS) as threads:
            pictures = threads.map(lambda data: _decoded(distinct[data], data, form), distinct)
            opened = dict(zip(distinct, pictures, strict=True))
        return {row: list(_compared(sample, files[row], opened)) for row, sample in showing}, ""
    except PictureMismatch as mismatch:
        return NOTHING_SEEN, str(mismatch)


def _files(part: Part, row: int, sample: Sample) -> Iterator[tuple[str, bytes]]:
    item = int(part.rows.item.numpy()[row])
    of_row = next((images.images for images in part.images if images.item == item), [])
    for turn, (image, number) in enumerate(zip(sample.images, sample.row_images, strict=True)):
        if number is None:
            yield f"item {item}: image {turn} of a sample, made by its task", image.data
        elif number < len(of_row):
            yield f"item {item}: image {number} of its row in data.train", of_row[number]
        else:
            problem = f"its row in data.train has {len(of_row)} images, and a sample shows more"
            raise PictureMismatch(f"item {item}: {problem}; {SAME_DATA}")


def _decoded(name: str, data: bytes, form: ImageFormat) -> Picture:
    try:
        return decode(data, form)
    except ImageError as error:
        raise PictureMismatch(f"{name}: {error}; the server could read it: {SAME_PILLOW}, or {SAME_DATA}") from None


def _compared(
    sample: Sample, files: Sequence[tuple[str, bytes]], opened: Mapping[bytes, Picture]
) -> Iterator[SeenImage]:
    for image, (name, data) in zip(sample.images, files, strict=True):
        picture = opened[data]
        if picture.digest != image.digest:
            problem = f"its pixels have the digest {picture.digest[:12]} here and {image.digest[:12]} on the server"
            raise PictureMismatch(f"{name}: {problem}; {SAME_PILLOW}, or {SAME_DATA}")
        if not _fits(sample, image.start, picture):
            problem = f"it takes {picture.num_tokens} tokens, and not so many placeholders begin at token {image.start}"
            raise PictureMismatch(f"{name}: {problem}; {SAME_PILLOW}, or {SAME_DATA}")
        yield SeenImage(image.start, picture)


def _fits(sample: Sample, start: int, picture: Picture) -> bool:
    """Whether exactly as many given placeholders stand at `start` as the picture takes."""
    own = (sample.tokens.numpy() == picture.format.image_token) & (sample.sampled.numpy() == 0)
    stop = start + picture.num_tokens
    more = stop < own.size and own[stop] and all(image.start != stop for image in sample.images)
    return stop <= own.size and bool(own[start:stop].all()) and not more


def num_patches(images: Iterable[tuple[int, Measured]]) -> int:
    """Patches that the tower encodes."""
    return sum({picture.digest: prod(picture.grid) for _, picture in images}.values())


def room(tokens: int, images: Sequence[tuple[int, Measured]]) -> int:
    """Tokens of a microbatch's budget that a text with `images` takes."""
    return max(tokens, -(-num_patches(images) // PATCHES_PER_TOKEN))


def tower_work(rows: Iterable[Microbatch], costs: TowerCosts | None) -> dict[str, float]:
    """Images and patches that the tower encodes, and its FLOPs; empty for a model of text."""
    if costs is None:
        return {}
    grids = [row.images.grid.prod(-1) for row in rows if row.images is not None]
    patches = [number for grid in grids for number in grid.tolist()]
    return {"images": len(patches), "patches": sum(patches), "tower": costs.total(patches)}


def show(row: Microbatch, pieces: Sequence[Piece]) -> Microbatch:
    """Add the images of `pieces` to `row`; each distinct one is encoded once."""
    placed = [
        Placed(begins + image.start - start, image.picture, begins)
        for begins, (images, length, part) in zip(row.cu_seqlens.tolist(), pieces, strict=False)
        for start, stop, _ in (part.indices(length),)
        for image in images
        if start <= image.start < stop
    ]
    if not placed:
        return row
    form = placed[0].picture.format
    if form.mutual:
        assert not row.groups, "prompts are not shared where the tokens of an image see each other"
        return replace(row, images=replace(pack_images(placed), blocks=_blocks(placed)))
    rotary = [
        rope_positions(length, ((image.start, image.picture.grid) for image in images), form.merge)[:, part]
        for images, length, part in pieces
    ]
    positions = torch.cat([row.positions[None], torch.from_numpy(np.concatenate(rotary, axis=1))])
    return replace(row, positions=positions, images=pack_images(placed))


def _blocks(placed: Sequence[Placed]) -> ImageBlocks:
    ends = [each.start + each.picture.num_tokens for each in placed]
    own = [np.arange(each.start, end) for each, end in zip(placed, ends, strict=True)]
    seen = [np.arange(each.document, end) for each, end in zip(placed, ends, strict=True)]

    def laid(arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor, int]:
        starts = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
        return torch.from_numpy(np.concatenate(arrays)), torch.from_numpy(starts), max(map(len, arrays))

    return ImageBlocks(*laid(own), *laid(seen))


def shown_row(texts: Sequence[tuple[Sequence[int], Sequence[SeenImage]]]) -> Microbatch:
    """Pack documents with their images; all but the first tokens are trainable."""
    return show(
        documents([tokens for tokens, _ in texts]),
        [Piece(images, len(tokens), slice(None)) for tokens, images in texts],
    )


def pack_images(placed: Sequence[Placed]) -> PackedImages:
    """Pictures in a row, without `blocks`."""
    distinct = {each.picture.digest: each.picture for each in placed}
    sizes = [picture.num_tokens for picture in distinct.values()]
    features = dict(zip(distinct, (np.cumsum(sizes) - sizes).tolist(), strict=True))

    def ranges(starts: Iterable[int]) -> torch.Tensor:
        each = [np.arange(start, start + x.picture.num_tokens) for start, x in zip(starts, placed, strict=True)]
        return torch.from_numpy(np.concatenate(each))

    form = placed[0].picture.format
    return PackedImages(
        pixels=torch.from_numpy(np.concatenate([picture.cells() for picture in distinct.values()])),
        normaliser=255 * torch.tensor([form.mean, form.std], dtype=torch.float32)[:, :, None],
        grid=torch.tensor([picture.grid for picture in distinct.values()]),
        take=ranges(features[each.picture.digest] for each in placed),
        places=ranges(each.start for each in placed),
    )
