"""The samples wire: the requests of rollout servers, learner and observers, and the buffer's answers.

How a message travels is in `message.py`. Each request is idempotent: a client that gets no answer repeats it, with the
same `id`, as often as it likes. A request that cannot be answered yet is parked by the buffer, never polled for.

    rollout:  Hello -> Welcome   Where -> WeightsAddress   Ask -> Work | Finished   Put -> Stored   Fail -> Ack
              Heartbeat -> News   Evaluate -> Due   Evaluated -> Stored   Goodbye -> Ack
    learner:  Hello -> Welcome   Rewind -> Rewound   Take -> Part | Finished   Trained -> Ack
              Quarantine -> Ack   Trial -> Ack   Results -> EvaluationResult | Ack
    launcher: Scale -> Ack   Kept -> Ack
    anybody:  Status -> State    and whatever is wrong -> Refused;  NotRegistered: say Hello first, then repeat

Facts travel, opinions stay at the ends: tokens, behaviour log-probabilities, versions and rewards, never advantages.
"""

from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, FiniteFloat

from buffer.data.servable import MOST_KEYS
from buffer.ledger.types import FailureKind as FailureKind  # part of the wire
from buffer.ledger.types import Outcome, SampleStats
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
OVERHEAD_PER_ROW = 256
"""More bytes than a row of a `Part` takes; if not, the packer makes room."""
MOST_REASON = 1000
"""Characters of a reason for a quarantine."""
LAUNCHER: Literal["launcher"] = "launcher"
OBSERVER: Literal["observer"] = "observer"
"""LAUNCHER is also the name of the process that keeps the rollout servers; `actors scale` has its role alone."""
ServerLife = Literal["placing", "started", "failed", "draining", "gave_up", "refused", "ended"]
"""`failed`: it is started again after a pause; the last three: it is not."""


class WorkItem(Message):
    """A dispatched problem. `lease` names this dispatch of it: a later one has another."""

    item: Count
    lease: Count
    version: Count
    """Version it was dispatched under: the group's age counts from here."""
    problem: Row
    """The row of the data set; its `images`, if it has some, are encoded files."""


class Waiter(Message):
    """Who waits in the buffer, for what, and for how long."""

    who: Name
    kind: Name
    why: Text
    seconds: FiniteFloat


# requests


class Hello(Message):
    """First message of a process. `token` is new at each start; under a known name it ends the old one's leases."""

    name: Name
    token: Name
    role: Literal["rollout", "learner", "launcher", "observer"]
    """The role of its key, or `observer`."""
    protocol: Count
    fingerprint: Name
    """Fingerprint of the shared config (`configs.load.fingerprint`); launchers and observers send an empty one."""
    serves: LongName | None = None
    """The learner's weights wire."""


class Where(Message):
    """Where is the learner's weights wire? Parked until there is one other than `known`."""

    known: LongName | None = None


class Ask(Message):
    """Room for `room` more groups. Parked until there is work; a repeated `request` gets the same work."""

    request: Count
    version: Count
    room: Annotated[int, Field(ge=1, lt=2**62)]


class Put(Message):
    """A finished group: `samples` are `Sample.pack()` each. Parked, or put off (`Later`), while the byte budget is
    full."""

    item: Count
    lease: Count
    samples: Held[bytes]

    @cached_property
    def figures(self) -> list[SampleStats]:
        """Figures of each sample once the samples are judged, which is done once however often the Put is tried. They
        do not travel. A private attribute would take pydantic ten times as long."""
        return []


class Fail(Message):
    """The item could not become a group.

    `permanent`: no other attempt can do better (a prompt that is too long). `returned`: the server drains and gives the
    item back; the attempt does not count. On the wire `kind` names the message, so the failure's is `failure_kind`.
    """

    item: Count
    lease: Count
    reason: Text
    failure_kind: FailureKind = "infrastructure"
    permanent: bool = False
    returned: bool = False


class Heartbeat(Message):
    """The server is alive, runs `version` and works on the leases `holding`."""

    version: Count
    holding: Held[Count]
    stats: Stats = Field(default_factory=dict)
    """Figures to display: tokens/s, running and waiting sequences, places for them and what bounds their number."""
    evaluating: Count | None = None
    """The evaluation that it makes, by the version at which that was due."""


class Evaluate(Message):
    """The server has loaded `version`: is it to evaluate it, and to hold newer ones back until that is done?"""

    version: Count


class SetResult(Message):
    """What came of one set."""

    figures: Figures
    """By name, as in `mean@8`."""
    reasons: Few[Text] = Field(default_factory=list)
    """Why attempts failed, where some did."""
    examples: Few[Row] = Field(default_factory=list)
    """Some answers: `problem` (the row), `answer`, `reward`, `finish`."""


class Evaluated(Message):
    """The server has made the evaluation `due`, all of it under `version`."""

    due: Count
    version: Count
    sets: ByName[SetResult]


class Results(Message):
    """A rank of the learner asks for the result of an evaluation that is not among `known`. Parked until there is one;
    Ack: there will be no more."""

    known: Known[Count]


class Goodbye(Message):
    """The server ends, drained or done: what it still has goes to others, and counts no attempt."""


class Rewind(Message):
    """The learner restored `version`: batches from there on are to be served again, the same groups in each."""

    version: Count


class Take(Message):
    """Part `rank` of `world` of batch `version`. Parked until the batch is ready."""

    version: Count
    rank: Count
    world: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    share_prompts: bool = False
    """The learner computes each prompt once on a rank: the parts are to have whole groups."""


class Trained(Message):
    """Batch `version` has been trained. Batches before `oldest_kept`, the oldest checkpoint's version, may go."""

    version: Count
    oldest_kept: Count


class Quarantine(Message):
    """The group of `item`, which is in a batch that is not trained, cannot be trained. The batch is to be taken again:
    it is served without that group."""

    item: Count
    reason: Annotated[str, BeforeValidator(written), Field(max_length=MOST_REASON)]
    """One line."""


class Trial(Message):
    """The learner tries the group of `item` of batch `version` by itself, because the batch is suspect; null: it has
    tried all of them. Should it end meanwhile, that group is the culprit."""

    version: Count
    item: Count | None


class Scale(Message):
    """So many rollout servers are wanted, until the next Scale, also over restarts; null: as many as the run file says.

    Refused beyond what the launcher can keep. `rule`: the launcher's own wish, which changes nothing while a person's
    number holds.
    """

    servers: Annotated[int, Field(ge=1, lt=2**62)] | None
    by: Literal["person", "rule"] = "person"
    why: Text = ""
    """In a few words."""


class Kept(Message):
    """The launcher's word on the rollout servers that it keeps; each replaces the one before."""

    servers: ByName[ServerLife]
    """By name, those that have left apart."""
    left: Held[Name] = Field(default_factory=list)
    """Names of those that were drained and are gone: what they had goes to others, and counts no attempt."""
    wanted: Count
    """Servers that the launcher works towards."""
    least: Count
    most: Count
    """What `Scale` may ask for."""
    bound: Text = ""
    """Why not more."""
    advice: Text = ""
    """What would help where the number of servers does not."""


class Status(Message):
    """Who waits for what, and the ledger in numbers?"""


# answers


class Welcome(Message):
    max_message: Count
    """Bytes of the largest message the buffer takes (`buffer.max_message_mib`): clients refuse to send a larger one."""


class WeightsAddress(Message):
    address: LongName


class Work(Message):
    items: Many[WorkItem]


class Stored(Message):
    """`accepted` is false for a group whose lease moved on: the answer is final, the group is not trained."""

    accepted: bool
    reason: Text = ""
    unfit: bool = False
    """Its values cannot be trained, and `reason` names one: the attempt has failed."""


class Later(Message):
    """The answer to a Put of which a full buffer keeps nothing. The client keeps the group, and repeats the Put when it
    gets `Again`, or on a new connection."""


class Again(Message):
    """A Put that was answered with `Later` is to be repeated."""


class Ack(Message):
    pass


class News(Message):
    """What a server should know by now."""

    revoked: Many[Count]
    """Leases that are over; the server may abort their generations."""
    learner_waits: bool
    """A Take is parked: more sequences at a time would bring the next batch sooner."""
    evaluation: Literal["none", "due", "over"] = "none"
    """`due`: there is one that the server may claim. `over`: the one that it makes is not its own any more."""


class Due(Message):
    """The evaluation that the server is to make of what it runs, by the version at which it was due; null: none."""

    due: Count | None


class EvaluationResult(Message):
    """An evaluation that ended. Example of `figures`: `{"aime": {"mean@8": 0.4}}`."""

    due: Count
    version: Count
    server: Name
    figures: ByName[Figures]
    reason: Text = ""
    """Why the evaluation was given up; then there are no figures."""


class Rewound(Message):
    """`replay`: batches that will be served again as they were."""

    replay: Count


class SampleRows(Message):
    """What every rank knows of each sample of a batch, as columns of [samples] in the order of the batch."""

    item: Array
    """int64: equal for the samples of a group."""
    dispatched: Array
    """int64: version its group was dispatched under."""
    reward: Array
    """float64."""
    tokens: Array
    """int64: prompt and answer."""
    sampled: Array
    """int64: trainable tokens, which are all sampled ones except a sample's first token."""
    truncated: Array
    """uint8: 1 where the answer was cut at `sampling.max_tokens`."""
    metrics: ByLabel[Array]
    """float64 by name, NaN for samples without that metric."""


class RowImages(Message):
    """The images of an item's row, as encoded files: those that its samples have no data of."""

    item: Count
    images: Held[bytes]


class Part(Message):
    """The samples of batch `version` that rank `rank` trains, and a row for each sample of the whole batch."""

    version: Count
    rank: Count
    world: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    rows: SampleRows
    positions: Array
    """int64 [len(samples)]: the row of each of `samples`."""
    samples: Many[bytes]
    """`Sample.pack()` each."""
    images: Many[RowImages] = Field(default_factory=list)
    """Images of the rows, once for each item that has a sample here."""
    failed: Count = 0
    """Attempts that failed in the run so far."""
    dropped: Count = 0
    """Items dropped in the run so far."""
    retried: Count = 0
    """Groups of the run so far that were not made at the first attempt."""
    generated: Count = 0
    """Groups made in the run so far."""
    running: Count = 0
    """Sequences that all servers ran when the batch was cut, by their last heartbeats."""
    places: Count = 0
    """Sequences that they had places for."""
    restored: Count = 0
    reached: Count = 0
    """A token whose version is above `restored` and at most `reached` may come from a policy that a rewind undid."""
    quarantined: Count = 0
    """Groups put into quarantine in the run so far."""
    flat_groups: Count = 0
    """Groups with equal rewards among `new_groups`."""
    new_groups: Count = 0
    """Groups made between the batch before and this one; 0: a later batch was formed, or the buffer started, since."""
    problems: ByLabel[Count] = Field(default_factory=dict)
    """As in `State`."""
    suspect: bool = False
    """Starts of the learner ended with this batch, and nobody knows why: its groups are to be tried one by one."""
    FRAMED: ClassVar[str] = "samples"

    def size_hint(self) -> int:
        """About how many bytes the samples and images have, which are megabytes."""
        files = [len(data) + OVERHEAD_PER_ROW for row in self.images for data in row.images]
        return sum(map(len, self.samples)) + sum(files) + OVERHEAD_PER_ROW * (int(self.rows.item.shape[0]) + 1)


class Finished(Message):
    """The run is over: no version is left (`run.versions`), no problem is left (`data.epochs`), or the run was given
    up, because all attempts fail (`rollout.max_failed_share`) or all groups lack variance
    (`batch.skip_zero_variance`)."""

    outcome: Outcome
    why: Report
    """For people. If nothing could be trained: several lines, with counts by kind and reason, and example rows."""
    last: Count | None = None
    """The run's last version, where it ends with one."""


class State(Message):
    """The ledger in numbers and the parked requests, as `python -m actors status` and the display show them."""

    version: Count
    """Next batch to be formed."""
    trained: VersionOrNone
    """Last batch reported trained; -1 before the first."""
    counts: ByLabel[Count]
    """Items by state: leased, stored, batched, trained, waiting, dropped."""
    dropped: ByLabel[Count]
    """Dropped items by reason."""
    failed: ByLabel[Count] = Field(default_factory=dict)
    """Failed attempts of the whole run by `KIND: REASON`, dropped ones included; returned ones do not count."""
    recent_failed: ByLabel[Count] = Field(default_factory=dict)
    """The same since the last batch was formed."""
    recent_groups: ByLabel[Count] = Field(default_factory=dict)
    """Groups made since the last batch was formed: `varied`, and by reason those that a filter left out."""
    retried: Count = 0
    """Groups that were not made at the first attempt."""
    problems: ByLabel[Count] = Field(default_factory=dict)
    """Rows of the data set by band, `unseen`, `unsolved`, `between`, `solved`; with `data.difficulty` how many are
    `retired`; and `left_out`, in no band."""
    left_out: Few[Text] = Field(default_factory=list)
    """Rows that are left out, for people: file, line, and why every attempt at them failed."""
    ended: Report = ""
    """Why no further batch will be formed, as in `Finished`; empty while one may be."""
    lengths: ByLabel[Few[Count]] = Field(default_factory=dict)
    """[groups, samples, tokens, sampled, truncated] by what became of them, whole run: `generated`, `trained`,
    `dropped: REASON`, `discarded: REASON`. Means that differ show a loss of long or short answers."""
    ages: Annotated[dict[Count, Count], Field(max_length=MOST_KEYS)]
    """Trained groups by age."""
    bytes_stored: Count
    servers: ByName[Row]
    """By server: version, leases held, seconds since its last message, its stats; `gone_s`, seconds since it ended, if
    it has not been started again."""
    learner_gone_s: FiniteFloat | None = None
    """Seconds since the learner ended, or a rank of it, until it is started again."""
    waiters: Many[Waiter]
    errors: Count
    """Messages refused since the start."""
    evaluation: Text = ""
    """The one that is being made, in words."""
    wanted_servers: Count | None = None
    """Rollout servers that are wanted; null while nobody has said so."""
    wanted_by_person: bool = False
    """`Scale` said so, and not the run file or its rule."""
    kept: Kept | None = None
    """The launcher's last word; null without a launcher."""
    launcher_gone_s: FiniteFloat | None = None
    """Seconds since the launcher ended, if it kept servers: they are kept no longer."""


class Refused(Message):
    """`reason` is one line for people: what, which value, what to do."""

    reason: Text


class NotRegistered(Message):
    """The buffer does not know the sender (the buffer restarted): say Hello, then repeat."""


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
