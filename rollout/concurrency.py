"""Limits how many samples a rollout server makes at a time.

A sample holds a place until its task ends: neither while it is scored or stored, nor while it waits for its group.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from configs.flow.sequences import max_sequences, mean_tokens, share_of_batch
from configs.schema import Config
from rollout.tasks.trajectory import Recorded

LENGTHS = 512
GROWTH_PER_S = 1 / 16
"""Grows from 32 to 512 sequences in 45 s."""
NEARLY = 7 / 8
"""Share at which all places count as taken; a cut leaves as many."""
LULL_S = 0.25
"""An Ask that takes longer begins a lull."""
RETRY_S = 60.0
"""Time without a preemption before one more group is tried."""


class Places:
    """Places for groups of `samples`. A lower limit ends no running sample.

    `mean_tokens`: as expected, then of recent samples.
    """

    def __init__(self, limit: int, samples: int, mean_tokens: float = 1.0) -> None:
        self.samples, self.mean_tokens, self.taken = samples, mean_tokens, 0
        self._limit, self._changed = limit, asyncio.Event()
        self.lull = False

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._changed.set()

    async def room(self) -> int:
        """Wait for a free place; return for how many groups. At most `samples - 1` places more than `limit` are taken,
        for which vLLM has room."""
        while self.taken >= self._limit:
            await self.change()
        return -(-(self._limit - self.taken) // self.samples)

    async def change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Begin a lull if the Ask in the block is slow; its answer ends it."""
        timer = asyncio.get_running_loop().call_later(LULL_S, self.begin_lull)
        try:
            yield
        finally:
            timer.cancel()
            self.lull = False

    @property
    def parked(self) -> int:
        """Places that are free because the buffer admits no group."""
        return max(0, self._limit - self.taken) if self.lull else 0

    def begin_lull(self) -> None:
        self.lull = True
        self._changed.set()

    def take(self) -> "GroupPlaces":
        self.taken += self.samples
        return GroupPlaces(self)

    def free(self, count: int) -> None:
        self.taken -= count
        self._changed.set()


class GroupPlaces:
    """A group's places, each given back once."""

    def __init__(self, places: Places) -> None:
        self._places, self._held = places, places.samples

    def free_one(self, sample: "asyncio.Task[Recorded]") -> None:
        places = self._places
        if not sample.cancelled() and not sample.exception():
            places.mean_tokens += (len(sample.result().trajectory.tokens) - places.mean_tokens) / LENGTHS
        if self._held:
            self._held -= 1
            places.free(1)

    def free_all(self, group: "asyncio.Task[object]") -> None:
        self._places.free(self._held)
        self._held = 0


class SparePlaces:
    """Places for single samples: `share` of all, at least one; in a lull all that are free."""

    def __init__(self, places: Places, share: float) -> None:
        self._places, self._share, self.taken = places, share, 0

    async def take(self) -> None:
        places = self._places
        while self.taken >= max(1, int(self._share * places.limit)) and not (
            places.lull and places.taken < places.limit
        ):
            await places.change()
        self.taken += 1
        places.taken += 1

    def free(self, sample: "asyncio.Task[object]") -> None:
        self.taken -= 1
        self._places.free(1)


@dataclass(frozen=True)
class Fixed:
    """`rollout.sequences` is a number."""

    sequences: int

    def limits(self, places: Places) -> dict[str, int]:
        return {"limit_sequences": self.sequences}

    def adapt(self, now: float, places: Places, engine: Mapping[str, float], learner_waits: bool) -> None:
        """Does nothing."""


@dataclass
class Auto:
    """`rollout.sequences: auto`. The limit is the smallest of:

    1. `wanted`: this server's share of a batch, to make a synchronous batch all at once. It grows only while the
       learner waits and all places are taken, because more sequences make older samples.
    2. `max_num_seqs`, up to which vLLM has captured CUDA graphs.
    3. `by_kv`: sequences of mean length in the KV cache.
    4. After preemptions as many fewer, at most an eighth, and not again until the cut is reached; then one group more
       per minute.
    """

    wanted: float
    max_num_seqs: int
    by_kv: Callable[[float], int]
    _fits: float | None = None
    _preempted: float = 0.0
    _seen_at: float | None = None

    def limits(self, places: Places) -> dict[str, int]:
        limits = {
            "limit_learner": int(self.wanted),
            "limit_graphs": self.max_num_seqs,
            "limit_kv": self.by_kv(places.mean_tokens),
        }
        if self._fits is not None:
            limits["limit_preempted"] = int(self._fits)
        return {name: max(limit, places.samples) for name, limit in limits.items()}

    def adapt(self, now: float, places: Places, engine: Mapping[str, float], learner_waits: bool) -> None:
        """`learner_waits`: False for the run's first batch."""
        seconds, new = now - (self._seen_at or now), engine["preempted"] - self._preempted
        self._seen_at, self._preempted = now, engine["preempted"]
        limits = self.limits(places)
        full, wanted = places.taken >= places.limit * NEARLY, limits.pop("limit_learner")
        grows = learner_waits and full and not places.lull  # in a lull an evaluation fills them
        if grows and wanted < min(limits.values()):
            self.wanted *= 1 + seconds * GROWTH_PER_S
        if new > 0 and places.taken < places.limit + places.samples:
            self._fits = max(places.limit - new, places.limit * NEARLY)
        elif new <= 0 and self._fits is not None:
            self._fits += places.samples * seconds / RETRY_S
        places.limit = min(self.limits(places).values())


def start(config: Config, cpu: bool, by_kv: Callable[[float], int]) -> tuple[Places, Fixed | Auto]:
    wanted = config.rollout.sequences
    if wanted == "auto":
        rule: Fixed | Auto = Auto(share_of_batch(config), max_sequences(config, cpu), by_kv)
    else:
        rule = Fixed(wanted)
    places = Places(1, config.batch.samples, mean_tokens(config))
    places.limit = min(rule.limits(places).values())
    return places, rule
