"""Split a batch into one part per learner rank, balanced by tokens. Pure; used by `handlers.py`."""

import heapq
from collections.abc import Sequence
from typing import Any

from buffer.ledger.types import SampleStats
from buffer.wire.protocol import Part


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


def parts(
    version: int,
    world: int,
    groups: Sequence[tuple[int, int, Sequence[tuple[bytes, SampleStats]]]],
    failed: int = 0,
    dropped: int = 0,
) -> list[Part]:
    """The parts of batch `version`: `groups` are (item, dispatch version, packed samples with their figures), in the
    batch's order; `failed` attempts and `dropped` items are those of the run so far."""
    samples: list[dict[str, Any]] = []
    stats: list[SampleStats] = []
    for item, dispatched, group in groups:
        rewards = [one.reward for _, one in group]
        stats += [one for _, one in group]
        samples += [
            {"item": item, "index": index, "dispatched": dispatched, "rewards": rewards, "sample": data}
            for index, (data, _) in enumerate(group)
        ]
    return [
        Part.model_validate(  # of plain values: one call for all samples
            {
                "version": version,
                "rank": rank,
                "world": world,
                "samples": [samples[position] for position in positions],
                "total_groups": len(groups),
                "total_samples": len(samples),
                "total_tokens": sum(one.tokens for one in stats),
                "total_sampled": sum(one.sampled for one in stats),
                "failed": failed,
                "dropped": dropped,
            }
        )
        for rank, positions in enumerate(cut([one.tokens for one in stats], world))
    ]
