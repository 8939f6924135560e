"""Batches with images for the learner's tests, and transformers' own answer to each sample of them."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from buffer.data.images import ImageFormat, SeenImage, decode
from buffer.wire.message import Array
from buffer.wire.protocol import Part, RowImages
from buffer.wire.sample import Sample, SampleImage
from configs.schema import DataConfig, ModelConfig
from learner.certify.images import given_images
from learner.model.microbatch import Microbatch
from tests.harness.tiny_vlm import encoded, picture, tiny_vlm
from tests.harness.world import Entry, cut

SIZES = [(56, 56), (75, 130), (200, 60), (90, 40), (40, 190)]
"""Height and width of the images' files: none is the size that a model sees."""


class Pictured(NamedTuple):
    """A batch: its samples, and the files of the images of each item that has any."""

    entries: list[Entry]
    files: dict[int, list[bytes]]

    def part(self, version: int, cuts: Sequence[int], rank: int) -> Part:
        """Part `rank`, with the files of its own items only."""
        part = cut(self.entries, version, cuts, rank)
        items = {self.entries[row].item for row in part.positions.numpy()}
        images = [RowImages(item=item, images=files) for item, files in self.files.items() if item in items]
        return part.model_copy(update={"images": images})


def seeing_model(folder: Path, kind: str, **shape: Any) -> ModelConfig:
    """A tiny model whose weights are wide enough that its answer depends on the images."""
    tiny_vlm(folder, kind, **{"deviation": 0.1, **shape})
    return ModelConfig(path=str(folder), dtype="float32")


def form_of(model: ModelConfig) -> ImageFormat:
    """How the tiny model sees images: from 1 to 16 tokens of each."""
    form = ImageFormat.of(model.path, DataConfig(train="x"))
    assert form is not None
    few, many = form.factor**2, 16 * form.factor**2
    again = ImageFormat.of(model.path, DataConfig(train="x", min_pixels=few, max_pixels=many))
    assert again is not None
    return again


def make_pictured(form: ImageFormat, version: int = 3, size: int = 3) -> Pictured:
    """Five groups: an image; two, one of them twice; no image; an image, and one of each sample's own in a second turn;
    no image. Samples of the last two sample placeholders."""
    draw = np.random.default_rng(version)
    files = [encoded(picture(*shape, seed=version * 10 + number)) for number, shape in enumerate(SIZES)]
    of_items = {0: [files[0]], 1: [files[1], files[2], files[1]], 3: [files[3]]}
    entries = []
    for item in range(5):
        rewards = [float(x) for x in draw.integers(0, 3, size) / 2]
        prompt = draw.integers(7, 50, 3).tolist()
        for index in range(size):
            tokens, images = list(prompt), []
            for data in of_items.get(item, []):
                _show(tokens, images, data, form, b"")
            tokens += prompt[:2]
            sampled = [0] * len(tokens)
            answer = draw.integers(7, 50, int(draw.integers(2, 12)))
            answer[1:2] = form.image_token if item > 2 else answer[1:2]
            tokens += answer.tolist()
            sampled += [1] * (len(tokens) - len(sampled))
            if item == 3:
                made = encoded(picture(60 + 30 * index, 80, seed=100 + index))
                _show(tokens, images, made, form, made)
                sampled += [0] * (len(tokens) - len(sampled))
                tokens += draw.integers(7, 50, 4).tolist()
                sampled += [1] * 4
            entries.append(Entry(item, max(version - 2, 0), rewards, _pack(tokens, sampled, images, draw, version)))
    return Pictured(entries, of_items)


def _show(tokens: list[int], images: list[SampleImage], data: bytes, form: ImageFormat, sent: bytes) -> None:
    seen = decode(data, form)
    tokens.append(form.vision_start)
    images.append(SampleImage(start=len(tokens), digest=seen.digest, data=sent))
    tokens += [form.image_token] * seen.num_tokens + [form.vision_end]


def _pack(
    tokens: list[int], sampled: list[int], images: list[SampleImage], draw: np.random.Generator, version: int
) -> bytes:
    chosen = np.array(sampled, np.uint8)
    return Sample(
        tokens=Array.of(np.array(tokens, np.int32)),
        sampled=Array.of(chosen),
        behaviour_logprobs=Array.of(np.where(chosen, -draw.exponential(2.0, len(chosen)), 0).astype(np.float32)),
        versions=Array.of(np.where(chosen, version, -1).astype(np.int32)),
        reward=float(draw.integers(0, 3)) / 2,
        finish="stop",
        images=images,
    ).pack()


TWIN = 63
"""A token that no sample has: `own_logprobs` feeds it for sampled placeholders, with their embedding."""


def own_model(model: ModelConfig, form: ImageFormat) -> Any:
    """transformers' model, whose embedding of TWIN is the placeholder's; for a head that is not tied to it."""
    own = AutoModelForImageTextToText.from_pretrained(model.path, attn_implementation="eager").train()
    table = own.get_input_embeddings().weight
    assert table is not own.get_output_embeddings().weight
    with torch.no_grad():
        table[TWIN] = table[form.image_token]
    return own


def own_logprobs(own: Any, batch: Pictured, row: int, form: ImageFormat) -> torch.Tensor:
    """Its log-probabilities of sample `row`, each given the tokens before: [tokens], 0 for the first.

    Its forward pass takes every placeholder for an image's, so it gets TWIN for those that were sampled.
    """
    sample = Sample.unpack(batch.entries[row].sample)
    rest = iter(batch.files.get(batch.entries[row].item, []))
    pictures = [decode(image.data or next(rest), form) for image in sample.images]
    ids = torch.from_numpy(sample.tokens.numpy().astype(np.int64))
    given = ids.clone()
    given[(ids == form.image_token) & torch.from_numpy(sample.sampled.numpy() == 1)] = TWIN
    seen = [SeenImage(image.start, picture) for image, picture in zip(sample.images, pictures, strict=True)]
    own.model.rope_deltas = None
    logits = own(input_ids=given[None], **given_images(given.numpy(), seen)).logits[0, :-1]
    found = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    return torch.cat([found.new_zeros(1), found])


class Brought:
    """Counts the images that were brought to a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = self.now = self.most = 0
        bring = Microbatch.to

        def counted(microbatch: Microbatch, device: torch.device) -> Microbatch:
            copy = bring(microbatch, device)
            if copy.images is not None:
                self.all, self.now = self.all + 1, self.now + 1
                self.most = max(self.most, self.now)
                weakref.finalize(copy.images, self._gone)
            return copy

        monkeypatch.setattr(Microbatch, "to", counted)

    def _gone(self) -> None:
        self.now -= 1
