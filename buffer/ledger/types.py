"""The nouns of the ledger, as plain data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

OPEN = ("leased", "stored")
CLOSED = ("dropped", "quarantined")
"""States of items that have left memory."""
FailureKind = Literal["reward", "task", "prompt", "engine", "infrastructure"]
"""Whose fault it is; `infrastructure`: anything else's."""
RowValues = tuple[int | str, ...]
Outcome = Literal["versions", "data", "failed"]


class LedgerError(ValueError):
    """A request that contradicts the ledger."""


@dataclass(frozen=True)
class Terms:
    problems: int
    groups: int
    max_staleness: int
    target_staleness: int
    versions: int | None = None
    epochs: int | None = None
    seed: int = 0
    shuffle: bool = True
    attempts: int = 3
    lease_s: float = 10.0
    skip_zero_variance: bool = False
    max_failed_share: float = 0.5

    def __post_init__(self) -> None:
        problems, groups, attempts, max_staleness = self.problems, self.groups, self.attempts, self.max_staleness
        if problems < 1 or groups < 1 or max_staleness < 0 or attempts < 1:
            raise LedgerError(f"{problems=}, {groups=}, {attempts=} must be at least 1 and {max_staleness=} at least 0")


@dataclass(slots=True)
class SampleStats:
    """What the ledger knows of a sample. A frozen class would take four times as long to make."""

    tokens: int
    sampled: int
    reward: float
    truncated: bool = False
    oldest: int | None = field(default=None, compare=False)
    """Version of its oldest sampled token."""
    metrics: dict[str, float] = field(default_factory=dict)
    prompt: int = field(default=0, compare=False)
    """Tokens before the first sampled one."""
    row_images: int = field(default=0, compare=False)
    newest: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Lease:
    item: int
    lease: int
    index: int
    epoch: int
    version: int


@dataclass(frozen=True)
class FormedBatch:
    """Items in order (d, item), and d of each."""

    version: int
    items: tuple[int, ...]
    dispatched: tuple[int, ...] = ()


class Lengths(NamedTuple):
    """How much text, of a group or of many."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0
    sampled: int = 0
    truncated: int = 0


NO_SAMPLES = Lengths(groups=1)
"""The group was never made, or was discarded."""


@dataclass(slots=True)
class ItemState:
    """One item; the store has all but the last three fields."""

    number: int
    row: int
    epoch: int
    state: Literal["waiting", "leased", "stored", "batched", "dropped", "quarantined"] = "waiting"
    reason: str = ""
    """Reason of a drop, quarantine, or the last failure."""
    version: int = -1
    """Dispatch version d; -1: never dispatched."""
    server: str = ""
    lease: int = 0
    """Number of the last dispatch."""
    request: int = 0
    attempts: int = 0
    batch: int = -1
    """Its batch; if it left before it had one, the next batch then; else -1."""
    lengths: Lengths = NO_SAMPLES
    since: float = 0.0
    elsewhere_until: float = 0.0
    """Until then a waiting item does not go to `server`."""
    held_back: bool = False
    """Until `elsewhere_until` it goes to no server."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> "ItemState":
        item = cls(*values[:-4])
        item.lengths = Lengths(1, *values[-4:])
        return item

    @property
    def accepted(self) -> bool:
        """Whether its last lease ended with an accepted group."""
        return self.state in ("stored", "batched") or (self.state in CLOSED and self.lengths.samples > 0)

    def lease_over(self, lease: int) -> str:
        now = {
            "waiting": "the item waits to be dispatched again",
            "leased": f"the item is with {server_name(self.server)} under lease {self.lease}",
            "stored": f"the item was delivered by {server_name(self.server)} under lease {self.lease}",
            "batched": f"the item is in batch {self.batch}",
            "dropped": f"the item was dropped: {self.reason}",
            "quarantined": f"its group was put into quarantine: {self.reason}",
        }[self.state]
        reason = f" ({self.reason})" if self.reason and self.state in ("waiting", "leased") else ""
        return f"lease {lease} of item {self.number} is over{reason}; {now}"


item_values: Callable[[ItemState], tuple[int | str, ...]] = attrgetter(
    *("number", "row", "epoch", "state", "reason", "version", "server", "lease", "request", "attempts", "batch"),
    *("lengths.samples", "lengths.tokens", "lengths.sampled", "lengths.truncated"),
)


class EvaluationRow(NamedTuple):
    """Example: `EvaluationRow(10, "done", 10, "rollout-0#3f", 1, "", '{"eval": {"mean@1": 0.5}}', "[]")`"""

    due: int
    state: str
    """running, lost, done or failed"""
    version: int
    server: str
    attempts: int
    reason: str
    results: str
    samples: str
    """JSON: answers kept for reading."""


@dataclass
class Changes:
    items: dict[int, tuple[int | str, ...]] = field(default_factory=dict)
    sample_stats: dict[int, tuple[SampleStats, ...]] = field(default_factory=dict)
    discarded: set[int] = field(default_factory=set)
    quarantined: set[int] = field(default_factory=set)
    batches: dict[int, bool] = field(default_factory=dict)
    totals: dict[tuple[str, str], Lengths] = field(default_factory=dict)
    """By (what, which), see `counts.py`."""
    rows: Mapping[int, RowValues] = field(default_factory=dict)
    evaluations: Mapping[int, EvaluationRow] = field(default_factory=dict)
    scalars: dict[str, int | str] = field(default_factory=dict)
    """Counters; `ended` is the text of `reasons.ended`."""


NO_CHANGES = Changes()


@dataclass(frozen=True)
class Transaction:
    """Written at once, or not at all."""

    changes: Changes
    payloads: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    """Packed samples of new groups, by item."""
    void_before: int | None = None
    """Samples of earlier batches and drops are deleted."""
    noted: Sequence[tuple[str, object, object]] = ()
    """Keys of the run file that changed, with old and new value."""


@dataclass(frozen=True)
class Saved:
    items: tuple[ItemState, ...] = ()
    totals: dict[tuple[str, str], Lengths] = field(default_factory=dict)
    scalars: dict[str, int] = field(default_factory=dict)
    failed_rows: tuple[tuple[int, str], ...] = ()
    """(row, reason), oldest first."""
    evaluations: tuple[EvaluationRow, ...] = ()
    rows: tuple[RowValues, ...] = ()


def server_name(server: str) -> str:
    """`NAME#TOKEN` -> `NAME`: each start of a server has a token."""
    return server.partition("#")[0]
