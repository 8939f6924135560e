"""The samples wire: all requests and answers. docs/design/samples-wire.md says what they mean in sequence.

A client repeats a request, with the same `id`, until it is answered: each request is idempotent. The buffer parks what
cannot be answered yet, and answers what is wrong with Refused.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, FiniteFloat

from buffer.data.servable import MOST_KEYS
from buffer.ledger.types import FailureKind as FailureKind  # part of the wire
from buffer.ledger.types import Outcome
from buffer.wire.message import (
    MOST_RANKS,
    Array,
    ByLabel,
    ByName,
    Count,
    Few,
    Figures,
    Held,
    Known,
    LongName,
    Many,
    Message,
    Name,
    Report,
    Row,
    Stats,
    Text,
    VersionOrNone,
    written,
)

PROTOCOL = 14
MOST_REASON = 1000
LAUNCHER: Literal["launcher"] = "launcher"
OBSERVER: Literal["observer"] = "observer"
ServerLife = Literal["placing", "started", "failed", "draining", "gave_up", "refused", "ended"]
"""A server that `failed` is started again after a pause; the last three are not."""


class WorkItem(Message):
    """Each dispatch of a problem has another `lease`."""

    item: Count
    lease: Count
    version: Count
    """The group's age counts from here."""
    problem: Row


class Waiter(Message):
    who: Name
    kind: Name
    why: Text
    seconds: FiniteFloat


# requests


class Hello(Message):
    """First message of a process. A new `token` under a known name ends the old one's leases."""

    name: Name
    token: Name
    role: Literal["rollout", "learner", "launcher", "observer"]
    protocol: Count
    fingerprint: Name
    serves: LongName | None = None


class Where(Message):
    """Parked until the weights wire is another than `known`."""

    known: LongName | None = None


class Ask(Message):
    """Parked until there is work for up to `room` items; a repeated `request` gets the same work."""

    request: Count
    version: Count
    room: Annotated[int, Field(ge=1, lt=2**62)]


class Put(Message):
    """`samples` are `Sample.pack()` each. Parked, or put off (`Later`), while the byte budget is full."""

    item: Count
    lease: Count
    samples: Held[bytes]


class Fail(Message):
    """`permanent`: no other attempt can do better. `returned`: the attempt does not count."""

    item: Count
    lease: Count
    reason: Text
    failure_kind: FailureKind = "infrastructure"
    permanent: bool = False
    returned: bool = False


class Heartbeat(Message):
    version: Count
    holding: Held[Count]
    stats: Stats = Field(default_factory=dict)
    evaluating: Count | None = None


class Evaluate(Message):
    version: Count


class SetResult(Message):
    figures: Figures
    reasons: Few[Text] = Field(default_factory=list)
    examples: Few[Row] = Field(default_factory=list)
    """`problem` (the row), `answer`, `reward`, `finish`."""


class Evaluated(Message):
    """The evaluation `due` was made, all of it under `version`."""

    due: Count
    version: Count
    sets: ByName[SetResult]


class Results(Message):
    """Parked until an evaluation ends that is not `known`; Ack: there will be no more."""

    known: Known[Count]


class Goodbye(Message):
    """What the server has goes to others, and counts no attempt."""


class Rewind(Message):
    """Batches from `version` on are to be served again, with the same groups."""

    version: Count


class Take(Message):
    """Asks for part `rank` of `world`. Parked until the batch is ready."""

    version: Count
    rank: Count
    world: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    share_prompts: bool = False
    """Each prompt is computed once on a rank: parts are to have whole groups."""


class Trained(Message):
    """Batches before `oldest_kept`, the oldest checkpoint, may go."""

    version: Count
    oldest_kept: Count


class Quarantine(Message):
    item: Count
    reason: Annotated[str, BeforeValidator(written), Field(max_length=MOST_REASON)]
    """One line."""


class Trial(Message):
    """The learner tries this group of a suspect batch by itself; null: it has tried all. If it ends meanwhile, that
    group is the culprit."""

    version: Count
    item: Count | None


class Scale(Message):
    """Null: as many as the run file says. Refused beyond what the launcher can keep. A `rule` changes nothing while a
    person's number holds."""

    servers: Annotated[int, Field(ge=1, lt=2**62)] | None
    by: Literal["person", "rule"] = "person"
    why: Text = ""


class Kept(Message):
    """What servers that have `left` had goes to others, and counts no attempt."""

    servers: ByName[ServerLife]
    """Without those that have left."""
    left: Held[Name] = Field(default_factory=list)
    wanted: Count
    least: Count
    most: Count
    bound: Text = ""
    advice: Text = ""


class Status(Message):
    pass


# answers


class Welcome(Message):
    max_message: Count


class WeightsAddress(Message):
    address: LongName


class Work(Message):
    items: Many[WorkItem]


class Stored(Message):
    """Not `accepted`: the lease moved on, and the answer is final."""

    accepted: bool
    reason: Text = ""
    unfit: bool = False
    """Its values cannot be trained."""


class Later(Message):
    """A full buffer keeps nothing of this Put. The client repeats it when it gets `Again`, or on a new connection."""


class Again(Message):
    """The Put is to be repeated."""

    pass


class Ack(Message):
    pass


class News(Message):
    revoked: Many[Count]
    """Leases whose generations may be aborted."""
    learner_waits: bool
    """More sequences would bring the next batch sooner."""
    evaluation: Literal["none", "due", "over"] = "none"
    """`due`: the server may claim an evaluation. `over`: the one that it makes is no longer its own."""


class Due(Message):
    """Named by the version at which it was due."""

    due: Count | None


class EvaluationResult(Message):
    """Example of `figures`: `{"aime": {"mean@8": 0.4}}`."""

    due: Count
    version: Count
    server: Name
    figures: ByName[Figures]
    reason: Text = ""


class Rewound(Message):
    replay: Count


class SampleRows(Message):
    """Columns of [samples] in the order of the batch: float64 rewards, uint8 `truncated`, int64 else."""

    item: Array
    dispatched: Array
    reward: Array
    tokens: Array
    sampled: Array
    """Trainable tokens."""
    truncated: Array
    metrics: ByLabel[Array]
    """float64; NaN: none."""


class RowImages(Message):
    """Images of a row that its samples do not carry."""

    item: Count
    images: Held[bytes]


class Part(Message):
    """The samples of a rank, and the figures of the whole batch. Counts are of the run so far."""

    version: Count
    rank: Count
    world: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    rows: SampleRows
    positions: Array
    """int64 [len(samples)]: the row of each of `samples`."""
    samples: Many[bytes]
    images: Many[RowImages] = Field(default_factory=list)
    failed: Count = 0
    dropped: Count = 0
    retried: Count = 0
    generated: Count = 0
    running: Count = 0
    """Sequences when the batch was cut; `places`: how many could run."""
    places: Count = 0
    restored: Count = 0
    reached: Count = 0
    """A token of a version above `restored`, up to `reached`, may come from a policy that a rewind undid."""
    quarantined: Count = 0
    flat_groups: Count = 0
    new_groups: Count = 0
    """Made since the batch before; 0 if a later batch was formed, or the buffer started, since."""
    problems: ByLabel[Count] = Field(default_factory=dict)
    suspect: bool = False
    """Starts of the learner ended with this batch: its groups are to be tried one by one."""
    FRAMED: ClassVar[str] = "samples"


class Finished(Message):
    outcome: Outcome
    why: Report
    last: Count | None = None


class State(Message):
    version: Count
    """The next batch."""
    trained: VersionOrNone
    """-1 before the first batch."""
    counts: ByLabel[Count]
    """By state: leased, stored, batched, trained, waiting, dropped."""
    dropped: ByLabel[Count]
    failed: ByLabel[Count] = Field(default_factory=dict)
    """Attempts by `KIND: REASON`."""
    recent_failed: ByLabel[Count] = Field(default_factory=dict)
    recent_groups: ByLabel[Count] = Field(default_factory=dict)
    """Groups since the last batch: `varied`, and by reason those left out."""
    retried: Count = 0
    problems: ByLabel[Count] = Field(default_factory=dict)
    """Rows by band: `unseen`, `unsolved`, `between`, `solved`; `left_out`; with `data.difficulty` also `retired`."""
    left_out: Few[Text] = Field(default_factory=list)
    """Place of each row, and why every attempt failed."""
    ended: Report = ""
    lengths: ByLabel[Few[Count]] = Field(default_factory=dict)
    """[groups, samples, tokens, sampled, truncated] by `generated`, `trained`, `dropped: REASON`, `discarded:
    REASON`."""
    ages: Annotated[dict[Count, Count], Field(max_length=MOST_KEYS)]
    bytes_stored: Count
    servers: ByName[Row]
    """Version, leases held, `silent_s`, stats; `gone_s`, seconds since it ended."""
    learner_gone_s: FiniteFloat | None = None
    """Since a rank ended."""
    waiters: Many[Waiter]
    errors: Count
    evaluation: Text = ""
    wanted_servers: Count | None = None
    wanted_by_person: bool = False
    """A person's `Scale` said so."""
    kept: Kept | None = None
    launcher_gone_s: FiniteFloat | None = None


class Refused(Message):
    reason: Text


class NotRegistered(Message):
    """Say Hello, then repeat."""


REQUESTS: dict[str, type[Message]] = {
    m.__name__: m
    for m in (
        Hello, Where, Ask, Put, Fail, Heartbeat, Evaluate, Evaluated, Rewind, Take, Trained, Quarantine, Trial, Results,
        Goodbye, Scale, Kept, Status,
    )
}  # fmt: skip
ANSWERS: dict[str, type[Message]] = {
    m.__name__: m
    for m in (
        Welcome, WeightsAddress, Work, Stored, Ack, News, Due, Rewound, Part, EvaluationResult, Finished, State,
        Refused, NotRegistered, Later, Again,
    )
}  # fmt: skip
