"""Split a batch into one part per learner rank, balanced by tokens."""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, groupby
from math import ceil, nan
from operator import itemgetter
from typing import Any

import numpy as np

from buffer.ledger.types import SampleStats
from buffer.wire.message import Array
from buffer.wire.protocol import Part, RowImages, SampleRows

Groups = Sequence[tuple[int, int, Sequence[tuple[bytes, SampleStats]]]]
"""(item, dispatch version, packed samples with their figures)"""


MOST_OF_A_RANK = 0.75
"""Share of a rank's mean load; a larger group may be cut, as it would leave another rank waiting."""


MOST_COLUMNS = 1024
"""A reward function may name a metric for each problem."""


def cut(tokens: Sequence[int], world: int) -> list[list[int]]:
    """Longest first, each to the rank with the fewest tokens so far: every rank gets the same split, and none exceeds
    the mean by more than one sample. Example: `cut([5, 3, 2, 4], 2)` -> `[[0, 2], [1, 3]]`"""
    ranks: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for position in sorted(range(len(tokens)), key=lambda position: (-tokens[position], position)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(position)
        heapq.heappush(loads, (load + tokens[position], rank))
    return [sorted(positions) for positions in ranks]


def cut_groups(groups: Sequence[Sequence[SampleStats]], world: int) -> list[list[int]]:
    """Like `cut`, where a rank computes each prompt of a group only once: of whole groups, or of pieces of large ones
    if that leaves the fullest rank with less."""
    prompt_of = [(group, stats.prompt) for group, members in enumerate(groups) for stats in members]
    answer_of = [stats.tokens - stats.prompt for members in groups for stats in members]

    def load(positions: Sequence[int]) -> int:
        prompts = set(map(prompt_of.__getitem__, positions))
        return sum(prompt for _, prompt in prompts) + sum(map(answer_of.__getitem__, positions))

    def distribute(units: Sequence[Sequence[int]]) -> list[list[int]]:
        ranks = cut([load(unit) for unit in units], world)
        return [sorted(position for chosen in rank for position in units[chosen]) for rank in ranks]

    starts = accumulate(map(len, groups), initial=0)
    whole = [range(start, start + len(members)) for start, members in zip(starts, groups, strict=False)]
    most, pieces = MOST_OF_A_RANK * load(range(len(answer_of))) / world, []
    for unit in whole:
        answers = [answer_of[position] for position in unit]
        number = min(ceil(load(unit) / most), len(unit))
        pieces += [[unit[i] for i in chosen] for chosen in cut(answers, number)]
    return min((distribute(units) for units in (whole, pieces)), key=lambda ranks: max(map(load, ranks)))


def sample_rows(groups: Groups) -> SampleRows:
    """A row for each sample of a batch, in its order."""
    return rows_of([(item, dispatched, [stats for _, stats in group]) for item, dispatched, group in groups])


def rows_of(groups: Sequence[tuple[int, int, Sequence[SampleStats]]]) -> SampleRows:
    """Only the MOST_COLUMNS metrics that most samples have are kept."""
    rows = [stats for *_, group in groups for stats in group]
    sizes = np.array([len(group) for *_, group in groups], np.int64)
    named = Counter(chain.from_iterable([stats.metrics for stats in rows]))
    names = sorted(sorted(named, key=lambda name: (-named[name], name))[:MOST_COLUMNS])
    return SampleRows(
        item=Array.of(np.repeat(np.array([item for item, _, _ in groups], np.int64), sizes)),
        dispatched=Array.of(np.repeat(np.array([dispatched for _, dispatched, _ in groups], np.int64), sizes)),
        reward=Array.of(np.array([stats.reward for stats in rows], np.float64)),
        tokens=Array.of(np.array([stats.tokens for stats in rows], np.int64)),
        sampled=Array.of(np.array([stats.sampled for stats in rows], np.int64)),
        truncated=Array.of(np.array([stats.truncated for stats in rows], np.uint8)),
        metrics={name: Array.of(np.array([stats.metrics.get(name, nan) for stats in rows])) for name in names},
    )


class BatchCut:
    """`counts`: further fields of `Part`."""

    def __init__(
        self,
        version: int,
        world: int,
        groups: Sequence[tuple[int, int, Sequence[SampleStats]]],
        counts: Mapping[str, Any],
        share_prompts: bool,
    ) -> None:
        self.version, self.world, self._counts = version, world, counts
        self._rows = rows_of(groups)
        self.metrics_left_out = 0
        if len(self._rows.metrics) == MOST_COLUMNS:
            named = {name for *_, group in groups for stats in group for name in stats.metrics}
            self.metrics_left_out = len(named) - MOST_COLUMNS
        self._samples = [(item, index) for item, _, group in groups for index in range(len(group))]
        if share_prompts:
            self._ranks = cut_groups([group for *_, group in groups], world)
        else:
            self._ranks = cut(self._rows.tokens.numpy().tolist(), world)

    def part(
        self,
        rank: int,
        fetch: Callable[[int, Sequence[int]], Sequence[bytes]],
        images_of: Callable[[int], RowImages | None],
    ) -> Part:
        """`fetch` returns samples of an item, by their places in the group."""
        positions = self._ranks[rank]
        found = groupby(map(self._samples.__getitem__, positions), itemgetter(0))
        chosen = [(item, [index for _, index in of_item]) for item, of_item in found]
        files = (images_of(item) for item, _ in sorted(chosen))
        return Part(
            version=self.version,
            rank=rank,
            world=self.world,
            rows=self._rows,
            positions=Array.of(np.array(positions, np.int64)),
            samples=[data for item, indexes in chosen for data in fetch(item, indexes)],
            images=[found for found in files if found],
            **self._counts,
        )


def parts(
    version: int,
    world: int,
    groups: Groups,
    counts: Mapping[str, int] | None = None,
    share_prompts: bool = False,
    images: Mapping[int, RowImages] | None = None,
) -> list[Part]:
    """The parts of batch `version`, all at once; `share_prompts` as in `Take`; `images` by item."""
    figures = [(item, dispatched, [stats for _, stats in group]) for item, dispatched, group in groups]
    samples = {item: [data for data, _ in group] for item, _, group in groups}
    made = BatchCut(version, world, figures, counts or {}, share_prompts)

    def fetch(item: int, indexes: Sequence[int]) -> list[bytes]:
        return [samples[item][index] for index in indexes]

    return [made.part(rank, fetch, (images or {}).get) for rank in range(world)]
