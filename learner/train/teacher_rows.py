"""Lays out what teachers gave for a microbatch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from buffer.wire.sample import AnySample, Sample
from learner.model.microbatch import Microbatch


class TeacherTop(NamedTuple):
    """A teacher's k most probable tokens: [sampled tokens, k], int32 and float32."""

    ids: np.ndarray
    logprobs: np.ndarray


def top_of(sample: AnySample, start: int, stop: int) -> TeacherTop | None:
    """Most probable tokens of one segment."""
    if not isinstance(sample, Sample) or (top := sample.teacher_top) is None:
        return None
    sampled = sample.sampled.numpy()
    before, inside = int(sampled[:start].sum()), int(sampled[start:stop].sum())
    return TeacherTop(*(each.numpy()[before : before + inside] for each in (top.ids, top.logprobs)))


def pieces_of(packed: Microbatch) -> list[int]:
    """Tokens of each piece of a row."""
    return packed.cu_seqlens.diff().tolist()  # type: ignore[no-any-return]


def teacher_row(taught: Sequence[np.ndarray | None], lengths: Sequence[int]) -> Tensor | None:
    """Log-probabilities of a row: [tokens] float32, 0 in pieces without a teacher."""
    if all(each is None for each in taught):
        return None
    whole = [
        np.zeros(length, np.float32) if each is None else each for each, length in zip(taught, lengths, strict=True)
    ]
    return torch.from_numpy(np.concatenate(whole).astype(np.float32))


def with_top(packed: Microbatch, tops: Sequence[TeacherTop | None]) -> Microbatch:
    """Add the teachers' tokens. A piece has all sampled tokens of its document, or none."""
    widths = {top.ids.shape[1] for top in tops if top is not None}
    if not widths:
        return packed
    (width,) = widths
    bounds, sampled = packed.cu_seqlens.tolist(), packed.sampled.numpy()
    ids, logprobs = [], []
    for start, stop, top in zip(bounds[:-1], bounds[1:], tops, strict=True):
        number = int(sampled[start:stop].sum())
        empty = TeacherTop(np.zeros((number, width), np.int32), np.zeros((number, width), np.float32))
        given = top if top is not None and number else empty
        ids.append(given.ids)
        logprobs.append(given.logprobs)
    return replace(
        packed,
        teacher_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        teacher_top=torch.from_numpy(np.concatenate(logprobs)),
    )
