"""The samples wire: what rollout servers, learner and observers say to the buffer, and what it answers.

A message is one ZeroMQ frame of MessagePack: a map with `kind`, `id` (chosen by the asker, repeated in the answer) and
the fields of the model of that name below. Each request is idempotent: an asker that hears nothing repeats it, with the
same `id`, as often as it likes. A request that cannot be answered yet is parked by the buffer, never polled for.

    rollout:  Hello -> Welcome   Where -> WeightsAddress   Ask -> Work | Finished   Put -> Stored   Fail -> Ack
              Heartbeat -> Revoked
    learner:  Hello -> Welcome   Rewind -> Rewound   Take -> Part | Finished   Trained -> Ack
    anybody:  Status -> State    and whatever is wrong -> Refused;  NotRegistered: say Hello first, then repeat

Facts travel, opinions stay at the ends: tokens, behaviour log-probabilities, versions and rewards, never advantages.
"""

import math
from typing import Annotated, Any, ClassVar, Literal

import msgpack
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PROTOCOL = 2
ROOM_A_SAMPLE = 256
"""Bytes that the rest of a `PartSample` takes, and more; if not, the packer makes room."""
LIMITS: dict[str, Any] = {"strict_map_key": False, "max_array_len": 2**20, "max_map_len": 2**16, "max_ext_len": 16}
"""Of what is unpacked before anything is known of it."""
Frame = bytes | memoryview
"""A message as it travels."""
Count = Annotated[int, Field(ge=0, lt=2**62)]
FailureKind = Literal["reward", "task", "prompt", "engine", "infrastructure"]
"""Whose fault a failed attempt is: the reward function's, the task's, the row's, vLLM's, or anything else's."""


class Message(BaseModel):
    """What every message is: frozen, no unknown fields, numbers as numbers and bytes as bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)


class Array(Message):
    """A tensor as it travels: little-endian bytes with dtype and shape.

    Example: `Array.of(np.array([1, 2], np.int32))` -> `Array(dtype="int32", shape=[2],
    data=b"\\x01\\0\\0\\0\\x02\\0\\0\\0")`
    """

    dtype: Literal["uint8", "int32", "int64", "float32"]
    shape: Annotated[list[Count], Field(max_length=8)]
    data: bytes

    @model_validator(mode="after")
    def _size(self) -> "Array":
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if size != len(self.data):
            raise ValueError(f"{self.dtype}{self.shape} takes {size} bytes, not {len(self.data)}")
        return self

    @classmethod
    def of(cls, array: np.ndarray) -> "Array":
        """Pack `array`; raises ValidationError for a dtype that does not travel."""
        array = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(dtype=array.dtype.name, shape=list(array.shape), data=array.tobytes())  # type: ignore[arg-type]

    def numpy(self) -> np.ndarray:
        """The array, read-only, without a copy."""
        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class Sample(Message):
    """One completion of a problem, prompt included. The four arrays are [tokens] long.

    Example: prompt of 2 tokens, answer of 2, sampled under versions 6 and 7:
    `tokens` int32 [5, 9, 12, 2], `sampled` uint8 [0, 0, 1, 1], `behaviour_logprobs` float32 [0, 0, -0.7, -0.1],
    `versions` int32 [-1, -1, 6, 7], `reward` 1.0, `finish` "stop".
    """

    tokens: Array
    """int32: token ids of prompt, answer and, in several turns, of what the environment said."""
    sampled: Array
    """uint8: 1 where the policy sampled the token, 0 where it was given."""
    behaviour_logprobs: Array
    """float32: behaviour log-probability of each sampled token under the sampling temperature; 0 elsewhere."""
    versions: Array
    """int32: policy version that sampled each token; -1 elsewhere."""
    reward: Annotated[float, Field(allow_inf_nan=False)]
    finish: Literal["stop", "length"]
    """`length`: cut at `sampling.max_tokens`."""
    answer: str = ""
    """The sampled text, for people."""
    metrics: dict[str, float] = {}
    """Further numbers of the reward function or task, averaged into the metrics of the batch."""

    DTYPES: ClassVar[dict[str, str]] = {
        "tokens": "int32",
        "sampled": "uint8",
        "behaviour_logprobs": "float32",
        "versions": "int32",
    }

    @model_validator(mode="after")
    def _alike(self) -> "Sample":
        for name, dtype in self.DTYPES.items():
            array: Array = getattr(self, name)
            if array.dtype != dtype or array.shape != self.tokens.shape or len(array.shape) != 1:
                raise ValueError(
                    f"{name} must be {dtype}{self.tokens.shape}, one-dimensional; is {array.dtype}{array.shape}"
                )
        if not self.sampled.numpy().any():
            raise ValueError("a sample without a sampled token")
        return self

    def pack(self) -> bytes:
        """The sample as bytes: what `Put` carries, the store keeps and `Part` hands on, unopened."""
        return bytes(msgpack.packb(self.model_dump()))

    @classmethod
    def unpack(cls, data: bytes) -> "Sample":
        """Undo `pack`; raises ValueError for anything else."""
        return cls.model_validate(open_map(data))


class WorkItem(Message):
    """A dispatched problem. `lease` names this dispatch of it: a later one has another."""

    item: Count
    lease: Count
    version: Count
    """Version it was dispatched under: the group's age counts from here."""
    problem: dict[str, Any]
    """The row of the data set."""


class Waiter(Message):
    """Who waits in the buffer, for what, and for how long."""

    who: str
    kind: str
    why: str
    seconds: float


# requests


class Hello(Message):
    """First word of a process. `token` is new at each start: a new one under an old name ends the old one's leases."""

    name: str
    token: str
    role: Literal["rollout", "learner", "observer"]
    protocol: int
    fingerprint: str
    """Of the shared config (`configs.load.fingerprint`); observers send an empty one."""
    serves: str | None = None
    """The learner's weights wire."""


class Where(Message):
    """Where is the learner's weights wire? Parked until there is one other than `known`."""

    who: str
    known: str | None = None


class Ask(Message):
    """Room for `room` more groups. Parked until there is work; a repeated `request` gets the same work."""

    server: str
    request: Count
    version: Count
    room: Annotated[int, Field(ge=1)]


class Put(Message):
    """A finished group: `samples` are `Sample.pack()` each. Parked while the byte budget is full."""

    server: str
    item: Count
    lease: Count
    samples: list[bytes]


class Fail(Message):
    """The item could not become a group.

    `permanent`: no other attempt can do better (a prompt that is too long). `returned`: the server drains and gives it
    back; the attempt does not count.
    """

    server: str
    item: Count
    lease: Count
    reason: str
    kind: FailureKind = "infrastructure"
    permanent: bool = False
    returned: bool = False


class Heartbeat(Message):
    """The server lives, runs `version` and works on the leases `holding`."""

    server: str
    version: Count
    holding: list[Count]
    stats: dict[str, float] = {}
    """Engine figures for people: tokens/s, running and waiting sequences."""


class Rewind(Message):
    """The learner restored `version`: batches from there on are to be served again, the same groups in each."""

    version: Count


class Take(Message):
    """Part `rank` of `world` of batch `version`. Parked until the batch is ready."""

    version: Count
    rank: Count
    world: Annotated[int, Field(ge=1)]


class Trained(Message):
    """Batch `version` has been trained. Batches before `oldest_kept`, the oldest checkpoint's version, may go."""

    version: Count
    oldest_kept: Count


class Status(Message):
    """How is everything?"""


# answers


class Welcome(Message):
    run: str
    token: str
    """Of this start of the buffer."""
    max_message: Count
    """Bytes of the largest message the buffer takes (`buffer.max_message_mib`): an asker holds back what is larger."""


class WeightsAddress(Message):
    address: str


class Work(Message):
    items: list[WorkItem]


class Stored(Message):
    """`accepted` is false for a group whose lease moved on: the answer is final, the group is not trained."""

    accepted: bool
    reason: str = ""


class Ack(Message):
    pass


class Revoked(Message):
    """`revoked`: leases the server holds in vain; it may abort them."""

    revoked: list[Count]


class Rewound(Message):
    """`replay`: batches that will be served again as they were."""

    version: Count
    replay: Count


class PartSample(Message):
    """One sample of a batch with what its advantage needs: the rewards of its whole group, itself at `index`."""

    item: Count
    index: Count
    dispatched: Count
    rewards: list[float]
    sample: bytes


class Part(Message):
    """What rank `rank` trains of batch `version`; the four totals are of the whole batch."""

    version: Count
    rank: Count
    world: Annotated[int, Field(ge=1)]
    samples: list[PartSample]
    total_groups: Count
    total_samples: Count
    total_tokens: Count
    total_sampled: Count
    failed: Count = 0
    """Attempts that failed in the run so far."""
    dropped: Count = 0
    """Items dropped in the run so far."""


class Finished(Message):
    """No problem is left (`data.epochs`), or no version (`run.versions`)."""


class State(Message):
    """The ledger in numbers and the parked requests, as `python -m buffer stats` and the display show them."""

    version: Count
    """Next batch to be formed."""
    trained: int
    """Last batch reported trained; -1 before the first."""
    counts: dict[str, int]
    """Items by state: leased, stored, batched, trained, waiting, dropped."""
    dropped: dict[str, int]
    """Dropped items by reason."""
    failed: dict[str, int] = {}
    """Failed attempts of the whole run by `KIND: REASON`, dropped ones included; returned ones do not count."""
    lengths: dict[str, list[int]] = Field(default_factory=dict)
    """[groups, samples, tokens, sampled, truncated] by what became of them, whole run: `generated`, `trained`,
    `dropped: REASON`, `discarded: REASON`. Means that differ show a loss of long or short answers."""
    ages: dict[int, int]
    """Trained groups by age."""
    bytes_stored: Count
    servers: dict[str, dict[str, Any]]
    """By server: version, leases held, seconds since its last word, its stats."""
    waiters: list[Waiter]
    errors: Count
    """Messages refused since the start."""


class Refused(Message):
    """`reason` is one line for people: what, which value, what to do."""

    reason: str


class NotRegistered(Message):
    """The buffer does not know the asker (it restarted): say Hello, then repeat."""


REQUESTS: dict[str, type[Message]] = {
    m.__name__: m for m in (Hello, Where, Ask, Put, Fail, Heartbeat, Rewind, Take, Trained, Status)
}
ANSWERS: dict[str, type[Message]] = {
    m.__name__: m
    for m in (
        Welcome,
        WeightsAddress,
        Work,
        Stored,
        Ack,
        Revoked,
        Rewound,
        Part,
        Finished,
        State,
        Refused,
        NotRegistered,
    )
}


def pack(number: int, message: Message) -> Frame:
    """One message as one frame."""
    fields = {"kind": type(message).__name__, "id": number, **message.model_dump()}
    if not isinstance(message, Part):
        return bytes(msgpack.packb(fields))
    size = sum(len(sample.sample) for sample in message.samples)  # megabytes: made in place, not grown and copied
    packer = msgpack.Packer(autoreset=False, buf_size=size + ROOM_A_SAMPLE * (len(message.samples) + 1))
    packer.pack(fields)
    return memoryview(packer.getbuffer())


def unpack(data: Frame, kinds: dict[str, type[Message]]) -> tuple[int, Message]:
    """Undo `pack`. Raises ValueError, in one line, for what is not a message of `kinds`."""
    fields = open_map(data)
    kind, number = fields.pop("kind", None), fields.pop("id", None)
    if not isinstance(kind, str) or kind not in kinds or not isinstance(number, int):
        raise ValueError(f"not a message of this wire: kind {str(kind)[:40]!r}, id {str(number)[:40]!r}")
    try:
        return number, kinds[kind].model_validate(fields)
    except ValidationError as error:
        raise ValueError(f"{kind}.{in_words(error)}") from None


def in_words(error: ValidationError) -> str:
    """The first thing that is wrong, in one line: where, and what."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))[:80]
    return f"{where}: {first['msg'][:200]}".replace("\n", " ")


def number_of(data: Frame) -> int:
    """The `id` of what may be a broken message, so that its refusal finds the asker; 0 where it cannot be told."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data[:200])
    try:
        unpacker.read_map_header()
        _, _, key, number = (unpacker.unpack() for _ in range(4))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return 0
    return number if key == "id" and isinstance(number, int) else 0


def open_map(data: Frame) -> dict[str, Any]:
    """The fields of a message or sample, not yet validated. Raises ValueError, in one line."""
    try:
        fields = msgpack.unpackb(data, **LIMITS)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:  # TypeError: a list as a key
        raise ValueError(f"not MessagePack: {error or type(error).__name__}") from None
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise ValueError("not a map of fields")
    return fields
