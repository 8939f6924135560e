"""Samples packed without padding: a rank's part of a batch becomes microbatches of documents in a row.

Consumes the buffer's `Part`. `Batch.from_part` is a collective: every rank learns the facts (not the tokens) of all
samples, and all ranks get the same number of microbatches, so that FSDP's collectives match. Used by `learner.step`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffer.wire.protocol import Part, PartSample
from buffer.wire.sample import Sample
from learner import collectives


@dataclass(frozen=True)
class Row:
    """Facts of one sample of the batch, known to all ranks."""

    item: int
    """The problem's item: equal for the samples of a group."""
    index: int
    reward: float
    tokens: int
    """Prompt and answer."""
    sampled: int
    """Trainable tokens: sampled ones, save a document's first."""
    truncated: bool
    dispatched: int
    num_versions: int
    """Different versions that sampled its tokens."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Microbatch:
    """Documents in a row. Per-token tensors are [tokens] long and indexed by the token they speak of."""

    tokens: Tensor
    """int64 token ids."""
    positions: Tensor
    """int64, from 0 in each document."""
    starts: Tensor
    """int32 [documents + 1]: where each document starts, and the end."""
    longest: int
    sampled: Tensor
    """bool: trainable. Never a document's first token: nothing predicts it."""
    scored: Tensor
    """int64 [scored]: where `sampled` is true."""
    behaviour: Tensor
    """float32 log-probability under which the token was sampled."""
    versions: Tensor
    """int64 policy version that sampled the token, -1 where none did."""
    sequence: Tensor
    """int64: the token's document in `Batch.rows`; 0 in a dummy."""

    def to(self, device: torch.device) -> "Microbatch":
        """The same on `device`."""
        moved = {name: x.to(device, non_blocking=True) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return Microbatch(longest=self.longest, **moved)


@dataclass(frozen=True)
class Batch:
    """A rank's microbatches and the facts of the whole batch."""

    version: int
    rows: list[Row]
    """All samples of the batch on all ranks, sorted by item and index: the same list on every rank."""
    microbatches: list[Microbatch]

    @classmethod
    def from_part(cls, part: Part, budget: int, quadratic: float = 0.0) -> "Batch":
        """Pack `part` into microbatches of at most `budget` tokens; a longer sample gets one of its own.

        `quadratic`: cost of attention, so that a document of n tokens costs n + quadratic * n². Raises RuntimeError
        when the parts of the ranks are not of one batch.
        """
        samples = [Sample.unpack(entry.sample) for entry in part.samples]
        mine = [_row(entry, sample) for entry, sample in zip(part.samples, samples, strict=True)]
        parts = collectives.gather({"version": part.version, "rows": [vars(row) for row in mine]})
        rows = sorted((Row(**row) for p in parts for row in p["rows"]), key=lambda row: (row.item, row.index))
        if {p["version"] for p in parts} != {part.version} or len(rows) != part.total_samples:
            versions = [p["version"] for p in parts]
            raise RuntimeError(
                f"not one batch: parts of versions {versions}, {len(rows)} of {part.total_samples} samples"
            )
        places = {(row.item, row.index): place for place, row in enumerate(rows)}
        lengths = [row.tokens for row in mine]
        number = int(collectives.all_reduce_max(len(first_fit(lengths, budget))))
        bins = spread(lengths, budget, quadratic, max(number, 1))
        documents = [(sample, places[row.item, row.index]) for sample, row in zip(samples, mine, strict=True)]
        microbatches = [pack([documents[i] for i in chosen]) for chosen in bins]
        return cls(part.version, rows, microbatches)


def pack(documents: Sequence[tuple[Sample, int]]) -> Microbatch:
    """Lay `documents`, each with its place in `Batch.rows`, in a row. None at all make a dummy that trains nothing."""
    if not documents:
        return lay([np.zeros(2)], [np.zeros(2)], [np.zeros(2)], [np.full(2, -1)], [0])
    samples = [sample for sample, _ in documents]
    names = ("tokens", "sampled", "behaviour_logprobs", "versions")
    tokens, sampled, behaviour, versions = ([getattr(sample, name).numpy() for sample in samples] for name in names)
    return lay(tokens, sampled, behaviour, versions, [place for _, place in documents])


def whole(tokens: Sequence[int]) -> Microbatch:
    """One document of which every token but the first is scored."""
    ids = np.asarray(tokens)
    return lay([ids], [np.ones(len(ids))], [np.zeros(len(ids))], [np.full(len(ids), -1)], [0])


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Places in `lengths` by bin of at most `budget`, longest first into the first bin with room: few bins."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if lengths[i] <= free), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(i)
        room[place] -= lengths[i]
    return bins


def spread(lengths: Sequence[int], budget: int, quadratic: float, number: int) -> list[list[int]]:
    """Places in `lengths` over `number` bins of at most `budget`, of even cost, the costliest bin first.

    `number` is at least what `first_fit` takes; where evening out finds no room, its bins are the answer.
    """
    costs = [n + quadratic * n * n for n in lengths]
    bins: list[list[int]] = [[] for _ in range(number)]
    load, used = [0.0] * number, [0] * number
    for i in sorted(range(len(lengths)), key=lambda i: -costs[i]):
        fits = [b for b in range(number) if used[b] + lengths[i] <= budget or not bins[b]]
        if not fits:
            tight = first_fit(lengths, budget)
            bins = tight + [[] for _ in range(number - len(tight))]
            break
        b = min(fits, key=load.__getitem__)
        bins[b].append(i)
        load[b] += costs[i]
        used[b] += lengths[i]
    return sorted(bins, key=lambda chosen: -sum(costs[i] for i in chosen))


def _row(entry: PartSample, sample: Sample) -> Row:
    sampled = sample.sampled.numpy() != 0
    return Row(
        item=entry.item,
        index=entry.index,
        reward=sample.reward,
        tokens=sample.tokens.shape[0],
        sampled=int(sampled[1:].sum()),
        truncated=sample.finish == "length",
        dispatched=entry.dispatched,
        num_versions=len(np.unique(sample.versions.numpy()[sampled])),
        metrics=sample.metrics,
    )


def lay(
    tokens: Sequence[Any], sampled: Sequence[Any], behaviour: Sequence[Any], versions: Sequence[Any], places: list[int]
) -> Microbatch:
    lengths = [len(ids) for ids in tokens]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    trainable = np.concatenate(list(sampled)).astype(bool)
    trainable[starts[:-1]] = False
    return Microbatch(
        tokens=torch.from_numpy(np.concatenate(list(tokens)).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        starts=torch.from_numpy(starts.astype(np.int32)),
        longest=max(lengths),
        sampled=torch.from_numpy(trainable),
        scored=torch.from_numpy(trainable.nonzero()[0]),
        behaviour=torch.from_numpy(np.concatenate(list(behaviour)).astype(np.float32)),
        versions=torch.from_numpy(np.concatenate(list(versions)).astype(np.int64)),
        sequence=torch.from_numpy(np.repeat(places, lengths).astype(np.int64)),
    )
