"""The groups that are stored and not yet trained, and the parts of the batch that is taken."""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffer.ledger.rules import Ledger
from buffer.ledger.types import Changes, FormedBatch, SampleStats
from buffer.store.faults import DamagedSample
from buffer.store.segments import GroupCache
from buffer.store.sqlite import Store
from buffer.wire.limits import Limits
from buffer.wire.protocol import Part, Take
from buffer.wire.sample import stats_of
from buffer.wire.served_rows import ServedRows
from buffer.wire.split import MOST_COLUMNS, BatchCut
from buffer.wire.values import WrongValue
from configs.flow.capacity import CACHE_BYTES

log = logging.getLogger(__name__)
TOO_MANY = "batch %d: %d metrics left out, the %d that most samples have are kept; give metrics fixed names"


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
    """All untrained groups, whether their samples are in memory or on disk."""

    def __init__(self, ledger: Ledger, store: Store, limits: Limits, rows: ServedRows) -> None:
        self._ledger, self._store, self._limits, self._rows = ledger, store, limits, rows
        self.turn = LoopTurn()
        self.learner_waiting = False
        """Puts above `buffer.max_gib` are accepted until the pending Take is answered."""
        self.revision = 0
        self.cache = GroupCache(CACHE_BYTES)
        self._payloads: dict[int, list[bytes]] = {}
        self._figures: dict[int, Sequence[SampleStats]] = {}
        self._bytes: dict[int, int] = store.untrained_bytes()
        self.bytes_stored = sum(self._bytes.values())
        self._cut: tuple[tuple[int, int, bool, tuple[int, ...]], BatchCut] | None = None
        """The batch that was cut last; it may lose a group."""

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
        self.cache.release(items)
        for item in items:
            self._figures.pop(item, None)
            self.bytes_stored -= self._bytes.pop(item, 0)

    def rewind(self, version: int, replay: int) -> None:
        """The learner takes `replay` batches a second time: they are untrained again."""
        self._cut = None  # its batch was undone
        if replay:
            self._bytes |= self._store.bytes_batched_since(version)
            self.bytes_stored = sum(self._bytes.values())

    def trained(self, items: Collection[int]) -> None:
        self.forget(items)
        last = self._ledger.state.last_trained
        if self._cut and self._cut[0][0] <= last:  # a rank may have taken the next batch by now
            self._cut = None

    def part(self, take: Take, batch: FormedBatch, counts: Callable[[], Mapping[str, Any]]) -> Part | None:
        """The part of a rank. None: not in this turn, or a group went into quarantine. Raises ImageUnavailable and
        ImageError."""
        key, items = (take.version, take.world, take.share_prompts, batch.items), self._ledger.state.items
        try:
            if self._cut is None or self._cut[0] != key:
                if not self._opened(batch) or self.turn.over():
                    return None
                groups = [(item, d, self._figures[item]) for item, d in zip(batch.items, batch.dispatched, strict=True)]
                if take.version <= self._ledger.state.last_trained:  # no Trained will follow that would forget them
                    for item in batch.items:
                        self._figures.pop(item, None)
                cut = BatchCut(take.version, take.world, groups, counts(), take.share_prompts)
                self._cut = key, cut
                if cut.metrics_left_out:
                    log.warning(TOO_MANY, take.version, cut.metrics_left_out, MOST_COLUMNS)
            if self.turn.over():
                return None
            part = self._cut[1].part(
                take.rank, self._fetch, lambda item: self._rows.images_of_item(item, items[item].row)
            )
        except DamagedSample as damage:
            self._leave_out(damage, take.version)
            return None
        self.turn.room -= part.size_hint()
        return part

    def _opened(self, batch: FormedBatch) -> bool:
        """Read figures that are missing after a restart. False: not all yet, or a group went into quarantine. Raises
        DamagedSample."""
        for item in batch.items:
            if item not in self._figures:
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
        held = self._payloads.get(item) or self.cache.get(item)
        return self._store.samples(item, indexes) if held is None else [held[index] for index in indexes]
