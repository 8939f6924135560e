"""Split a batch into one part per learner rank, balanced by tokens. Pure; used by `handlers.py`."""

import heapq
from collections.abc import Mapping, Sequence
from math import nan

import numpy as np

from buffer.ledger.types import SampleStats
from buffer.wire.message import Array
from buffer.wire.protocol import Part, SampleRows

Groups = Sequence[tuple[int, int, Sequence[tuple[bytes, SampleStats]]]]
"""The groups of a batch in its order: (item, dispatch version, packed samples with their figures)."""


def cut(tokens: Sequence[int], world: int) -> list[list[int]]:
    """Positions of samples for each of `world` ranks: longest first, each to the rank with the fewest tokens so far.

    The same input gives every rank, at every repetition, the same split. No rank exceeds the mean by more than one
    sample. Example: `cut([5, 3, 2, 4], 2)` -> `[[0, 2], [1, 3]]`
    """
    ranks: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for position in sorted(range(len(tokens)), key=lambda position: (-tokens[position], position)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(position)
        heapq.heappush(loads, (load + tokens[position], rank))
    return [sorted(positions) for positions in ranks]


def sample_rows(groups: Groups) -> SampleRows:
    """A row for each sample of a batch, in its order."""
    rows = [(item, dispatched, stats) for item, dispatched, group in groups for _, stats in group]
    names = sorted({name for *_, stats in rows for name in stats.metrics})
    return SampleRows(
        item=Array.of(np.array([item for item, _, _ in rows], np.int64)),
        dispatched=Array.of(np.array([dispatched for _, dispatched, _ in rows], np.int64)),
        reward=Array.of(np.array([stats.reward for *_, stats in rows], np.float64)),
        tokens=Array.of(np.array([stats.tokens for *_, stats in rows], np.int64)),
        sampled=Array.of(np.array([stats.sampled for *_, stats in rows], np.int64)),
        truncated=Array.of(np.array([stats.truncated for *_, stats in rows], np.uint8)),
        metrics={name: Array.of(np.array([stats.metrics.get(name, nan) for *_, stats in rows])) for name in names},
    )


def parts(version: int, world: int, groups: Groups, counts: Mapping[str, int] | None = None) -> list[Part]:
    """The parts of batch `version`; `counts`: `failed` ... `places`, as in `Part`."""
    samples = [data for *_, group in groups for data, _ in group]
    rows = sample_rows(groups)
    return [
        Part(
            version=version,
            rank=rank,
            world=world,
            rows=rows,
            positions=Array.of(np.array(positions, np.int64)),
            samples=[samples[position] for position in positions],
            **(counts or {}),
        )
        for rank, positions in enumerate(cut(rows.tokens.numpy().tolist(), world))
    ]
