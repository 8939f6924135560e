"""Serves rows when they are dispatched, keeps untrained groups, and cuts a batch into a part for each learner rank.

A request waits while its rows are made or its image files are missing; the buffer answers other requests meanwhile.
"""

import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from math import ceil, nan
from operator import itemgetter
from typing import Any

import numpy as np

from buffer.data.image_rows import IMAGES, ImageUnavailable
from buffer.data.images import ImageError
from buffer.ledger.rules import Ledger
from buffer.ledger.types import Changes, FormedBatch, SampleStats
from buffer.problems import READ_AHEAD, Problems
from buffer.store.faults import DamagedSample
from buffer.store.sqlite import Store
from buffer.wire.limits import Limits
from buffer.wire.message import Array
from buffer.wire.protocol import Part, RowImages, SampleRows, Take
from buffer.wire.sample import stats_of
from buffer.wire.values import WrongValue
from configs.flow.capacity import CACHE_BYTES

log = logging.getLogger(__name__)
TOO_MANY = "batch %d: %d metrics left out, the %d that most samples have are kept; give metrics fixed names"
Groups = Sequence[tuple[int, int, Sequence[tuple[bytes, SampleStats]]]]
"""(item, d, packed samples with their figures)"""
MOST_OF_A_RANK = 0.75
"""Share of a rank's mean load above which a group may be cut: another rank would wait."""
MOST_COLUMNS = 1024
"""A reward function may name a metric for each problem."""
AWAY_S = 1.0
"""Pause before image files are read again."""
WARN_S = 10.0
Upcoming = Callable[[int], Sequence[int]]
BYTES_PER_ROW = 256
"""Most bytes of a sample's figures in a part."""
FREE_AT_ONCE = 8
"""In a turn of the event loop: hundreds at once would take 20 ms."""


class GroupCache:
    """The latest groups: most are batched before they would be read back."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self.groups: dict[int, Sequence[bytes]] = {}
        self.forgotten: list[Sequence[bytes]] = []

    def add(self, item: int, group: Sequence[bytes]) -> None:
        self.bytes += sum(map(len, group)) - sum(map(len, self.groups.pop(item, ())))
        self.groups[item] = group
        while self.bytes > self.max_bytes:
            oldest = self.groups.pop(next(iter(self.groups)))
            self.bytes -= sum(map(len, oldest))

    def forget(self, items: Iterable[int]) -> None:
        for item in items:
            if group := self.groups.pop(item, None):
                self.bytes -= sum(map(len, group))
                self.forgotten.append(group)


class NothingMade:
    """Stands for `Problems` where all rows are there from the start."""

    num_made = 0


class ServedRows:
    """Rows of the data set by `Lease.index`."""

    def __init__(self, problems: Sequence[Mapping[str, Any]]) -> None:
        self._rows, self._problems = problems, problems if isinstance(problems, Problems) else None
        self.away = ""
        self._away_until = self._warned_at = -math.inf
        self.returns = 0
        self.made = self._problems or NothingMade

    @property
    def why_away(self) -> str:
        return f"images cannot be read: {self.away}" if self.away else ""

    def expire(self, now: float) -> float | None:
        """Try image files again when it is time; returns when to call again."""
        if now < self._away_until:
            return self._away_until
        self.away = ""
        self.returns += 1
        return None

    def note_away(self, error: ImageUnavailable, now: float, pause: bool = True) -> None:
        """`pause`: no other file is read for AWAY_S."""
        if now >= self._warned_at + WARN_S:
            self._warned_at = now
            log.warning("images cannot be read now, and are tried again: %s", error)
        if pause:
            self.away, self._away_until = str(error), now + AWAY_S

    def room(self, upcoming: Upcoming, wanted: int) -> int:
        """The next rows are made meanwhile."""
        if not self._problems:
            return wanted
        self._problems.expect(lambda: upcoming(READ_AHEAD))
        ready = self._problems.num_ready(lambda: upcoming(wanted))
        return wanted if ready is None else min(wanted, ready)

    def has_next(self, upcoming: Upcoming) -> bool:
        return not self._problems or self._problems.num_ready(lambda: upcoming(1)) != 0

    def problem(self, row: int) -> dict[str, Any]:
        """Raises ImageError, or ImageUnavailable for an image that may come back."""
        problem = dict(self._rows[row])
        return problem | {IMAGES: list(problem[IMAGES])} if problem.get(IMAGES) else problem

    def images_of(self, row: int) -> Sequence[bytes]:
        """Neither makes the row nor reads its files."""
        if self._problems:
            return (self._problems.images and self._problems.images.of(row)) or ()
        files: Sequence[bytes] = self._rows[row].get(IMAGES, ())
        return files

    def read_images(self, item: int, row: int) -> RowImages | None:
        """Raises ImageUnavailable, and ImageError for a file that is gone or has changed."""
        try:
            files = list(self.images_of(row))
        except ImageUnavailable:
            raise
        except ImageError as error:
            raise ImageError(f"item {item}, row {row}: {error}, and start the learner again") from None
        return RowImages(item=item, images=files) if files else None


@dataclass
class LoopTurn:
    """The work for Takes in one turn: a batch of gigabytes must not hold up a heartbeat."""

    seconds: float = math.inf
    """0: no part is made."""
    room: float = math.inf
    ends: float | None = None
    postponed: bool = False

    def over(self) -> bool:
        """Whether what is left has to wait. Something is done in each turn that has time at all."""
        now = time.monotonic()
        is_late = self.seconds <= 0 if self.ends is None else now >= self.ends
        self.ends = now + self.seconds if self.ends is None else self.ends
        self.postponed = self.postponed or self.room <= 0 or is_late
        return self.postponed


class UntrainedGroups:
    def __init__(self, ledger: Ledger, store: Store, limits: Limits, rows: ServedRows) -> None:
        self._ledger, self._store, self._limits, self._rows = ledger, store, limits, rows
        self.turn = LoopTurn()
        self.learner_waiting = False
        """Puts above `buffer.max_gib` are accepted until the Take is answered."""
        self.revision = 0
        self.cache = GroupCache(CACHE_BYTES)
        self._payloads: dict[int, list[bytes]] = {}
        self._figures: dict[int, Sequence[SampleStats]] = {}
        self._bytes: dict[int, int] = store.untrained_bytes()
        self.bytes_stored = sum(self._bytes.values())
        self._cut: tuple[tuple[int, int, bool, tuple[int, ...]], BatchCut] | None = None
        """The batch that was cut last."""

    @property
    def full(self) -> bool:
        return self.bytes_stored >= self._limits.max_bytes and not self.learner_waiting

    def add(self, item: int, samples: list[bytes], figures: Sequence[SampleStats], is_stored: bool) -> None:
        """The ledger has accepted this group. Not `is_stored`: a filter left it out."""
        self._payloads[item] = samples
        if is_stored:
            self.cache.add(item, samples)
            self._figures[item] = figures
            self._bytes[item] = sum(map(len, samples))
            self.bytes_stored += self._bytes[item]

    def written(self, changes: Changes) -> Mapping[int, Sequence[bytes]]:
        if void := changes.discarded | changes.quarantined:
            self.forget(void)
        payloads, self._payloads = self._payloads, {}
        return {item: payloads[item] for item in changes.sample_stats}

    def forget(self, items: Collection[int]) -> None:
        self.cache.forget(items)
        for item in items:
            self._figures.pop(item, None)
            self.bytes_stored -= self._bytes.pop(item, 0)

    def rewind(self, version: int, replay: int) -> None:
        """The learner takes `replay` batches a second time: they are untrained again."""
        self._cut = None  # its batch was undone
        if replay:
            self._bytes |= self._store.bytes_batched_since(version)
            self.bytes_stored = sum(self._bytes.values())

    def part(self, take: Take, batch: FormedBatch, counts: Callable[[], Mapping[str, Any]]) -> Part | None:
        """None: not in this turn, or a group went into quarantine. Raises ImageUnavailable and ImageError."""
        key, items = (take.version, take.world, take.share_prompts, batch.items), self._ledger.state.items
        try:
            if self._cut is None or self._cut[0] != key:
                missing = [item for item in batch.items if item not in self._figures]
                if (missing and not self._read_figures(missing)) or self.turn.over():
                    return None
                groups = [(item, d, self._figures[item]) for item, d in zip(batch.items, batch.dispatched, strict=True)]
                if take.version <= self._ledger.state.last_trained:  # no Trained will follow, which would forget them
                    for item in batch.items:
                        self._figures.pop(item, None)
                cut = BatchCut(take.version, take.world, groups, counts(), take.share_prompts)
                self._cut = key, cut
                if cut.metrics_left_out:
                    log.warning(TOO_MANY, take.version, cut.metrics_left_out, MOST_COLUMNS)
            if self.turn.over():
                return None
            part = self._cut[1].part(take.rank, self._fetch, lambda item: self._rows.read_images(item, items[item].row))
        except DamagedSample as damage:
            self._leave_out(damage, take.version)
            return None
        files = sum([len(data) for row in part.images for data in row.images])
        self.turn.room -= sum(map(len, part.samples)) + files + BYTES_PER_ROW * len(self._cut[1].samples)
        return part

    def _read_figures(self, items: Sequence[int]) -> bool:
        """Read what a restart forgot. False: not all in this turn, or a group went into quarantine. Raises
        DamagedSample."""
        for item in items:
            if self.turn.over():
                return False
            try:
                self._figures[item] = stats_of(item, self._store.group(item), self._limits.bounds)
            except WrongValue as error:
                self.quarantine(item, str(error))
                return False
        return True

    def quarantine(self, item: int, reason: str) -> None:
        row = self._ledger.state.items[item].row if item in self._ledger.state.items else None
        if self._ledger.batches.quarantine(item, " ".join(reason.split())):
            log.error("item %d (row %s) is in quarantine and is not trained: %s", item, row, reason)

    def _leave_out(self, damage: DamagedSample, version: int) -> None:
        """Ranks that hold the damaged group take the batch again before they train (`learner/sound.py`)."""
        if self._ledger.batches.quarantine(damage.item, damage.reason):
            where = f"item {damage.item} is put into quarantine, batch {version} is served without it"
            log.error("%s: %s", where, damage)
        self._cut = None
        self.forget([damage.item])

    def _fetch(self, item: int, indexes: Sequence[int]) -> list[bytes]:
        held = self._payloads.get(item) or self.cache.groups.get(item)
        return self._store.samples(item, indexes) if held is None else [held[index] for index in indexes]


def cut(tokens: Sequence[int], world: int) -> list[list[int]]:
    """Longest first, each to the rank with the fewest tokens so far: no rank exceeds the mean by more than one sample.
    Example: `cut([5, 3, 2, 4], 2)` -> `[[0, 2], [1, 3]]`"""
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
    return rows_of([(item, dispatched, [stats for _, stats in group]) for item, dispatched, group in groups])


def rows_of(groups: Sequence[tuple[int, int, Sequence[SampleStats]]]) -> SampleRows:
    """Only the MOST_COLUMNS most frequent metrics are kept."""
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
        self.samples = [(item, index) for item, _, group in groups for index in range(len(group))]
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
        found = groupby(map(self.samples.__getitem__, positions), itemgetter(0))
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
    """All parts of batch `version`; `images` by item."""
    figures = [(item, dispatched, [stats for _, stats in group]) for item, dispatched, group in groups]
    samples = {item: [data for data, _ in group] for item, _, group in groups}
    made = BatchCut(version, world, figures, counts or {}, share_prompts)

    def fetch(item: int, indexes: Sequence[int]) -> list[bytes]:
        return [samples[item][index] for index in indexes]

    return [made.part(rank, fetch, (images or {}).get) for rank in range(world)]
