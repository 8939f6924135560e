"""The nouns of the ledger: what it is told, what it hands out, and the rows in which it is written down and read back.

Plain data without behaviour of its own, passed between `buffer/ledger/rules.py`, `buffer/store/sqlite.py` and `buffer/wire/server.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

OPEN = ("leased", "stored")
State = Literal["waiting", "leased", "stored", "batched", "dropped"]


class LedgerError(ValueError):
    """A request that contradicts the ledger; the text names the values and what to do."""


@dataclass(frozen=True)
class SampleStats:
    """What the ledger needs to know of a sample: tokens in all, tokens sampled, reward, whether cut at the limit."""

    tokens: int
    sampled: int
    reward: float
    truncated: bool = False
    oldest: int | None = field(default=None, compare=False)
    """Policy version of its oldest sampled token; not written down, the item's dispatch version accounts for it."""

    def row_values(self) -> tuple[int | float, ...]:
        """What the store writes, in the order of the fields."""
        return self.tokens, self.sampled, self.reward, self.truncated


@dataclass(frozen=True)
class Lease:
    """An item handed to a server: `index` is the problem's row, `version` the dispatch version d."""

    item: int
    lease: int
    index: int
    epoch: int
    version: int


@dataclass(frozen=True)
class FormedBatch:
    """Batch `version`: its items in order (d, sequence), and in `dispatched` the version d of each."""

    version: int
    items: tuple[int, ...]
    dispatched: tuple[int, ...] = ()


class Lengths(NamedTuple):
    """How much text: of a group, or summed over groups. Example: `Lengths(1, 8, 9000, 8000, 1)`."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0
    sampled: int = 0
    truncated: int = 0

    @classmethod
    def of(cls, samples: Sequence[SampleStats]) -> "Lengths":
        """Of one group."""
        tokens, sampled = sum(s.tokens for s in samples), sum(s.sampled for s in samples)
        return cls(1, len(samples), tokens, sampled, sum(s.truncated for s in samples))

    def plus(self, other: "Lengths", times: int = 1) -> "Lengths":
        """The sum, field by field; `times=-1` takes `other` away."""
        return Lengths(*(a + times * b for a, b in zip(self, other, strict=True)))


@dataclass(slots=True)
class ItemState:
    """One item as the ledger knows it, and as the store's table `items` has it (the last field apart)."""

    item: int
    row: int
    epoch: int
    state: State = "waiting"
    reason: str = ""
    """Why it was dropped, or why the last dispatch failed."""
    version: int = -1
    """Dispatch version d; -1 before the first dispatch."""
    server: str = ""
    lease: int = 0
    """Number of the last dispatch; it stays when the lease has ended."""
    request: int = 0
    """Number of the Ask that was answered with it."""
    attempts: int = 0
    batch: int = -1
    """Batch it went into; for a dropped item the batch that was being collected then; -1 while neither."""
    samples: int = 0
    tokens: int = 0
    sampled: int = 0
    truncated: int = 0
    since: float = 0.0
    """When the lease began, in the caller's clock; not written down."""

    def row_values(self) -> tuple[int | str, ...]:
        """What the store writes, in the order of the fields."""
        now = (self.item, self.row, self.epoch, self.state, self.reason, self.version, self.server, self.lease)
        return (*now, self.request, self.attempts, self.batch, self.samples, self.tokens, self.sampled, self.truncated)

    @property
    def lengths(self) -> Lengths:
        """Of its group; all zero while it has none."""
        return Lengths(1, self.samples, self.tokens, self.sampled, self.truncated)

    @property
    def accepted(self) -> bool:
        """Its last lease ended with an accepted group."""
        return self.state in ("stored", "batched") or (self.state == "dropped" and self.samples > 0)


@dataclass
class Changes:
    """What has changed since the last `drain`: the store writes all of it in one transaction.

    Rows hold the latest state only, so the changes of many calls fit into one. False when nothing changed.
    """

    items: dict[int, tuple[int | str, ...]] = field(default_factory=dict)
    """`ItemState.row_values()` by item."""
    facts: dict[int, tuple[SampleStats, ...]] = field(default_factory=dict)
    """Samples of newly accepted groups, by item."""
    discarded: set[int] = field(default_factory=set)
    """Items whose stored samples are void."""
    batches: dict[int, bool] = field(default_factory=dict)
    """By batch: has it been trained?"""
    totals: dict[tuple[str, str], Lengths] = field(default_factory=dict)
    """Running totals by (what, of which kind): see `Ledger.audit`."""
    scalars: dict[str, int] = field(default_factory=dict)
    """The ledger's counters by name."""

    def __bool__(self) -> bool:
        return any((self.items, self.facts, self.discarded, self.batches, self.totals, self.scalars))


@dataclass(frozen=True)
class Transaction:
    """What the store writes at once, or not at all."""

    changes: Changes
    payloads: Mapping[int, Sequence[bytes]]
    """Samples (`Sample.pack()` each) of the groups accepted in `changes`, by item."""
    void: Collection[int]
    """Items whose samples may go."""


@dataclass(frozen=True)
class Saved:
    """What the store read back for `Ledger.restore`; empty for a new file."""

    entries: tuple[ItemState, ...] = ()
    totals: dict[tuple[str, str], Lengths] = field(default_factory=dict)
    scalars: dict[str, int] = field(default_factory=dict)
