"""A rank's part of a batch becomes microbatches: samples are packed into rows of at most a token budget.

Consumes the buffer's `Part`, which has a row for each sample of the whole batch. `Batch.from_part` is a collective: the
ranks agree on the number of microbatches, so that FSDP's collectives match. Used by `step.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from buffer.wire.protocol import Part, SampleRows
from buffer.wire.sample import Sample
from learner.model.microbatch import Microbatch, lay_out
from learner.train import collectives


@dataclass(frozen=True)
class Batch:
    """A rank's microbatches, and a row for each sample of the whole batch."""

    version: int
    rows: SampleRows
    """The same on every rank."""
    num_versions: list[int]
    """For each of this rank's samples: how many policy versions sampled its tokens."""
    microbatches: list[Microbatch]

    @classmethod
    def from_part(cls, part: Part, budget: int, quadratic: float = 0.0) -> "Batch":
        """Pack `part` into microbatches of at most `budget` tokens; a longer sample gets one of its own.

        `quadratic`: cost of attention, so that a document of n tokens costs n + quadratic * n². Raises RuntimeError
        when the ranks' parts are not of one batch.
        """
        positions, samples = part.positions.numpy().tolist(), [Sample.unpack(data) for data in part.samples]
        lengths = [sample.tokens.shape[0] for sample in samples]
        least = max(len(first_fit(lengths, budget)), 1)
        version, digest = part.version, crc32(part.rows.item.data + part.rows.reward.data)
        agreed = map(int, collectives.all_reduce_max(least, version, -version, digest, -digest))
        number, newest, oldest, largest, smallest = agreed
        if (newest, largest) != (-oldest, -smallest):
            raise RuntimeError(
                f"not one batch: parts of versions {-oldest} to {newest}, of other samples if these agree"
            )
        documents = list(zip(samples, positions, strict=True))
        bins = balance(lengths, budget, quadratic, number)
        microbatches = [pack([documents[i] for i in chosen]) for chosen in bins]
        return cls(part.version, part.rows, [_num_versions(sample) for sample in samples], microbatches)


def _num_versions(sample: Sample) -> int:
    return len(np.unique(sample.versions.numpy()[sample.sampled.numpy() != 0]))


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
