"""The nouns of the ledger: samples' figures, leases, batches, items, and what the store writes down and reads back.

Plain data, passed between `rules.py`, `buffer/store/sqlite.py` and `buffer/wire/handlers.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

OPEN = ("leased", "stored")
CLOSED = ("dropped", "quarantined")
"""States of items that have left memory; their rows in the store stay."""
FailureKind = Literal["reward", "task", "prompt", "engine", "infrastructure"]
"""Whose fault a failed attempt is: the reward function's, the task's, the row's, vLLM's, or anything else's."""
RowValues = tuple[int | str, ...]
"""The fields of a `RowRecord` (`counts.py`), as the store has them."""
Outcome = Literal["versions", "data", "failed"]
"""How a run ends: with version `run.versions`, with the data before that, or given up because attempts only fail."""


class LedgerError(ValueError):
    """A request that contradicts the ledger; the text names the values and what to do."""


@dataclass(frozen=True)
class Terms:
    """What the rules depend on of the run file."""

    problems: int
    """Rows of the data set."""
    groups: int
    """Groups of a batch."""
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
    """What the ledger knows of a sample: numbers of its tokens, its reward, whether it was truncated.

    Nobody changes one after it was made. Python takes four times as long to make a frozen one.
    """

    tokens: int
    sampled: int
    reward: float
    truncated: bool = False
    oldest: int | None = field(default=None, compare=False)
    """Policy version of its oldest sampled token; not written down, the item's dispatch version accounts for it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers of the reward function or task; written down in the sample only."""
    prompt: int = field(default=0, compare=False)
    """Tokens before the first sampled one; written down in the sample only."""
    row_images: int = field(default=0, compare=False)
    """Images of its row that it shows; written down in the sample only."""
    newest: int | None = field(default=None, compare=False)
    """Policy version of its newest sampled token; not written down."""


@dataclass(frozen=True)
class Lease:
    """An item dispatched to a server: `index` is the problem's row, `version` the dispatch version d."""

    item: int
    lease: int
    index: int
    epoch: int
    version: int


@dataclass(frozen=True)
class FormedBatch:
    """Batch `version`: its items in order (d, item), and in `dispatched` the version d of each."""

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
        """The lengths of one group."""
        tokens, sampled = sum([s.tokens for s in samples]), sum([s.sampled for s in samples])
        return cls(1, len(samples), tokens, sampled, sum([s.truncated for s in samples]))

    def plus(self, other: "Lengths", times: int = 1) -> "Lengths":
        """The sum, field by field; `times=-1` takes `other` away."""
        groups, samples, tokens, sampled, truncated = other
        return Lengths(
            self.groups + times * groups,
            self.samples + times * samples,
            self.tokens + times * tokens,
            self.sampled + times * sampled,
            self.truncated + times * truncated,
        )


@dataclass(slots=True)
class ItemState:
    """One item of the ledger, and a row of the store's table `items` (without the last three fields)."""

    number: int
    row: int
    epoch: int
    state: Literal["waiting", "leased", "stored", "batched", "dropped", "quarantined"] = "waiting"
    reason: str = ""
    """The reason of a drop or quarantine, or of the last failed attempt."""
    version: int = -1
    """Dispatch version d; -1 before the first dispatch."""
    server: str = ""
    lease: int = 0
    """Number of the last dispatch; it stays when the lease has ended."""
    request: int = 0
    """Number of the Ask that was answered with it."""
    attempts: int = 0
    batch: int = -1
    """Batch it went into; for an item that was dropped, or put into quarantine before it was in a batch, the batch that
    was being collected then; -1 while neither."""
    samples: int = 0
    tokens: int = 0
    sampled: int = 0
    truncated: int = 0
    since: float = 0.0
    """When the lease began, in the caller's clock; not written down."""
    elsewhere_until: float = 0.0
    """While it waits: until then it goes to another server than `server`, which failed at it; not written down."""
    held_back: bool = False
    """If true, a waiting item goes to no server until `elsewhere_until`; not stored."""

    def row_values(self) -> tuple[int | str, ...]:
        """What the store writes, in the order of the fields."""
        now = (self.number, self.row, self.epoch, self.state, self.reason, self.version, self.server, self.lease)
        return (*now, self.request, self.attempts, self.batch, self.samples, self.tokens, self.sampled, self.truncated)

    def as_lease(self) -> Lease:
        """The current lease, as its server gets it."""
        return Lease(self.number, self.lease, self.row, self.epoch, self.version)

    @property
    def lengths(self) -> Lengths:
        """The lengths of its group; no samples while it has none."""
        return Lengths(1, self.samples, self.tokens, self.sampled, self.truncated)

    @property
    def accepted(self) -> bool:
        """Its last lease ended with an accepted group."""
        return self.state in ("stored", "batched") or (self.state in CLOSED and self.samples > 0)

    def lease_over(self, lease: int) -> str:
        """Why a group under the ended `lease` is refused, in one line."""
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


class EvaluationRow(NamedTuple):
    """An evaluation as the store has it. Example: `EvaluationRow(10, "done", 10, "rollout-0#3f", 1, "", '{"eval":
    {"mean@1": 0.5}}', "[]")`"""

    due: int
    state: str
    """running, lost, done, failed"""
    version: int
    server: str
    attempts: int
    reason: str
    results: str
    samples: str
    """JSON: by set, the answers that are kept for reading; written with the results only."""


@dataclass
class Changes:
    """What has changed since the last `drain`: the store writes all of it in one transaction.

    Rows hold the latest state only, so the changes of many calls fit into one. False when nothing changed.
    """

    items: dict[int, tuple[int | str, ...]] = field(default_factory=dict)
    """`ItemState.row_values()` by item."""
    sample_stats: dict[int, tuple[SampleStats, ...]] = field(default_factory=dict)
    """Samples of newly accepted groups, by item."""
    discarded: set[int] = field(default_factory=set)
    """Items whose stored samples are void."""
    quarantined: set[int] = field(default_factory=set)
    """Items whose samples are kept and never trained."""
    batches: dict[int, bool] = field(default_factory=dict)
    """By batch: has it been trained?"""
    totals: dict[tuple[str, str], Lengths] = field(default_factory=dict)
    """Running totals by (what, which), see `counts.py`."""
    rows: Mapping[int, RowValues] = field(default_factory=dict)
    """`RowRecord.row_values()` by row of the data set."""
    evaluations: Mapping[int, EvaluationRow] = field(default_factory=dict)
    """By the version at which they were due."""
    scalars: dict[str, int | str] = field(default_factory=dict)
    """The ledger's counters by name; `ended` is the text of `reasons.ended`."""

    def __bool__(self) -> bool:
        changed = self.items, self.sample_stats, self.discarded, self.batches, self.totals, self.scalars
        return any((*changed, self.rows, self.evaluations))


@dataclass(frozen=True)
class Transaction:
    """What the store writes at once, or not at all."""

    changes: Changes
    payloads: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    """Samples (`Sample.pack()` each) of the groups accepted in `changes`, by item."""
    void_before: int | None = None
    """The samples of batches before this version, and of what was dropped before it, are deleted."""
    noted: Sequence[tuple[str, object, object]] = ()
    """Keys of the run file that were changed while the ledger is served, with the old and the new value."""


@dataclass(frozen=True)
class Saved:
    """What the store read back for `Ledger.restore`; empty for a new file."""

    items: tuple[ItemState, ...] = ()
    totals: dict[tuple[str, str], Lengths] = field(default_factory=dict)
    scalars: dict[str, int] = field(default_factory=dict)
    failed_rows: tuple[tuple[int, str], ...] = ()
    """(row, reason) of items that failed last, oldest first."""
    evaluations: tuple[EvaluationRow, ...] = ()
    rows: tuple[RowValues, ...] = ()


def server_name(server: str) -> str:
    """`NAME#TOKEN` -> `NAME`: the ledger knows each start of a server by its token, people know the name."""
    return server.partition("#")[0]
