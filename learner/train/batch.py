"""A rank's part of a batch becomes microbatches: samples are packed into rows of at most a token budget.

Consumes the buffer's `Part`. `Batch.from_part` is a collective: every rank learns the facts (not the tokens) of all
samples, and all ranks get the same number of microbatches, so that FSDP's collectives match. Used by `step.py`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from buffer.wire.protocol import Part, PartSample
from buffer.wire.sample import Sample
from learner.model.microbatch import Microbatch, lay_out
from learner.train import collectives


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
    """Trainable tokens: all sampled ones, except a document's first token."""
    truncated: bool
    dispatched: int
    num_versions: int
    """Number of policy versions that sampled its tokens."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Batch:
    """A rank's microbatches, and the facts of the whole batch."""

    version: int
    rows: list[Row]
    """All samples of the batch on all ranks, sorted by item and index: the same list on every rank."""
    microbatches: list[Microbatch]

    @classmethod
    def from_part(cls, part: Part, budget: int, quadratic: float = 0.0) -> "Batch":
        """Pack `part` into microbatches of at most `budget` tokens; a longer sample gets one of its own.

        `quadratic`: cost of attention, so that a document of n tokens costs n + quadratic * n². Raises RuntimeError
        when the ranks' parts are not of one batch.
        """
        samples = [Sample.unpack(entry.sample) for entry in part.samples]
        mine = [_row(entry, sample) for entry, sample in zip(part.samples, samples, strict=True)]
        rows = _gather_rows(part, mine)
        index = {(row.item, row.index): i for i, row in enumerate(rows)}
        lengths = [row.tokens for row in mine]
        number = int(collectives.all_reduce_max(max(len(first_fit(lengths, budget)), 1)))
        documents = [(sample, index[row.item, row.index]) for sample, row in zip(samples, mine, strict=True)]
        bins = balance(lengths, budget, quadratic, number)
        return cls(part.version, rows, [pack([documents[i] for i in chosen]) for chosen in bins])


def _row(entry: PartSample, sample: Sample) -> Row:
    sampled = sample.sampled.numpy() != 0
    return Row(
        item=entry.item,
        index=entry.index,
        reward=sample.reward,
        tokens=sampled.size,
        sampled=int(sampled[1:].sum()),
        truncated=sample.finish == "length",
        dispatched=entry.dispatched,
        num_versions=len(np.unique(sample.versions.numpy()[sampled])),
        metrics=sample.metrics,
    )


def _gather_rows(part: Part, mine: list[Row]) -> list[Row]:
    """The rows of all ranks' parts. JSON carries them, so floats arrive as they are."""
    data = json.dumps([part.version, [vars(row) for row in mine]]).encode()
    gathered = collectives.all_gather_ragged(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    parts = [json.loads(data.numpy().tobytes()) for data in gathered]
    rows = [Row(**row) for _, rows in parts for row in rows]
    versions = [version for version, _ in parts]
    if set(versions) != {part.version} or len(rows) != part.total_samples:
        raise RuntimeError(f"not one batch: parts of versions {versions}, {len(rows)} of {part.total_samples} samples")
    return sorted(rows, key=lambda row: (row.item, row.index))


def pack(documents: Sequence[tuple[Sample, int]]) -> Microbatch:
    """A microbatch of `documents`, each with its index in `Batch.rows`; of none, a dummy without trainable tokens."""
    if not documents:
        return lay_out([np.zeros(2)], [np.zeros(2)], [np.zeros(2)], [np.full(2, -1)], [0])
    samples, rows = zip(*documents, strict=True)
    return lay_out(
        [sample.tokens.numpy() for sample in samples],
        [sample.sampled.numpy() for sample in samples],
        [sample.behaviour_logprobs.numpy() for sample in samples],
        [sample.versions.numpy() for sample in samples],
        rows,
    )


def first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: indices of `lengths` in bins of at most `budget`, few of them."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        b = next((b for b, left in enumerate(free) if lengths[i] <= left), len(bins))
        if b == len(bins):
            bins.append([])
            free.append(budget)
        bins[b].append(i)
        free[b] -= lengths[i]
    return bins


def balance(lengths: Sequence[int], budget: int, quadratic: float, number: int) -> list[list[int]]:
    """Indices of `lengths` in `number` bins of at most `budget` and of similar cost, the costliest bin first.

    `number` is at least what `first_fit` takes; where balancing does not fit the budget, its bins are the answer.
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
