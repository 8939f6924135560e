"""A sample, and what the ledger needs of one.

Validating each sample would take most of the buffer's time at full load. So `sample_stats` compares it with the layout
that `Sample.pack` writes for its number of tokens, and validates only what does not match.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, count, pairwise
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgpack
import numpy as np
from pydantic import Discriminator, Field, FiniteFloat, Tag, ValidationError, model_validator

from buffer.ledger.types import SampleStats
from buffer.wire.message import LIMITS, TEXT, Array, Count, Message, in_words, open_map
from buffer.wire.values import (
    ANY,
    LEAST_BITS,
    MOST_REWARD,
    SIGNED,
    UNSIGNED,
    Bounds,
    Columns,
    WrongValue,
    judge,
    judge_rewards,
    judge_teacher,
    judge_top,
)


class SampleImage(Message):
    start: Count
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    data: bytes = b""
    """The file of an image that the task made. Images without data are the row's, counted anew in each segment."""


class TopTeacher(Message):
    """A teacher's k most probable tokens in place of each sampled one."""

    name: str = ""
    ids: Array
    """int32 [sampled tokens, k], all different in one place."""
    logprobs: Array
    """float32 [sampled tokens, k], at temperature 1."""

    @model_validator(mode="after")
    def _alike(self) -> "TopTeacher":
        shape = self.ids.shape
        if len(shape) != 2 or not 1 <= shape[1] <= MOST_TOP or self.ids.dtype != "int32":
            needed = f"must be int32 [sampled tokens, 1 to {MOST_TOP}]"
            raise ValueError(f"ids {needed}; is {self.ids.dtype}{shape}")
        if self.logprobs.dtype != LOGPROB or self.logprobs.shape != shape:
            raise ValueError(f"logprobs must be {LOGPROB}{shape}; is {self.logprobs.dtype}{self.logprobs.shape}")
        return self


class Sample(Message):
    """One completion of a problem, prompt included. The first four arrays are [tokens] long.

    Example: prompt of 2 tokens, answer of 2, sampled under versions 6 and 7: `tokens` int32 [5, 9, 12, 2], `sampled`
    uint8 [0, 0, 1, 1], `behaviour_logprobs` float32 [0, 0, -0.7, -0.1], `versions` int32 [-1, -1, 6, 7], `reward` 1.0,
    `finish` "stop".
    """

    tokens: Array
    """int32: prompts, answers and what the environment said; segment by segment."""
    sampled: Array
    """uint8: 1 where the policy sampled the token."""
    behaviour_logprobs: Array
    """float32: under the sampling temperature; 0 for given tokens."""
    versions: Array
    """int32: the policy version; -1 for given tokens."""
    reward: FiniteFloat
    finish: Literal["stop", "length"]
    answer: str = ""
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    images: list[SampleImage] = Field(default_factory=list)
    starts: list[Count] = Field(default_factory=lambda: [0])
    """Where each segment begins. Its tokens saw only those before them in the segment."""
    turn_rewards: list[FiniteFloat] = Field(default_factory=list)
    """A reward for each turn, whose sum is `reward`; or none."""
    routes: Array | None = None
    """[tokens, layers, k], uint8 or uint16: the server's experts in each layer with experts; zeros for a token that it
    did not compute."""
    teacher: Annotated[
        Annotated[str, Tag("name")] | Annotated[TopTeacher, Tag("top")],
        Discriminator(lambda given: "top" if isinstance(given, dict | TopTeacher) else "name"),
    ] = ""
    """By the `data_source` of its rows; "" is the teacher of all other rows, or none."""
    teacher_logprobs: Array | None = None
    """float32 [tokens]: of each sampled token at temperature 1; 0 elsewhere."""

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
        flags = self.sampled.numpy()
        if flags.max(initial=0) > 1:
            raise ValueError(f"sampled is {flags.max()} at token {flags.argmax()}; it is 1, or 0 for a token given")
        sampled = flags != 0
        if not sampled.any():
            raise ValueError("a sample without a sampled token")
        before = -1
        for place, image in enumerate(self.images):
            if not before < image.start < sampled.size or sampled[image.start]:
                rule = f"images stand in order, among the {sampled.size} tokens, where a token was given"
                raise ValueError(f"image {place} at token {image.start}: {rule}")
            before = image.start
        if self.routes is not None and (wrong := wrong_routes(self.routes, sampled.size)):
            raise ValueError(wrong)
        if (self.teacher or self.teacher_logprobs is not None) and (wrong := self._wrong_teacher()):
            raise ValueError(wrong)
        usual = self.starts == [0] and not sampled[0] and not self.turn_rewards
        if not usual and (wrong := wrong_segments(self.starts, sampled) or self._wrong_rewards(sampled)):
            raise ValueError(wrong)
        return self

    def _wrong_rewards(self, sampled: np.ndarray) -> str:
        rewards, total = self.turn_rewards, self.reward
        if rewards and len(rewards) != (number := num_turns(sampled)):
            return f"{len(rewards)} turn_rewards for {number} turns; one for each run of sampled tokens, or none"
        if rewards and abs(sum(rewards) - total) > MOST_OFF * max(1.0, abs(total)):
            return f"turn_rewards sum to {sum(rewards):g}, and reward is {total:g}; it is their sum"
        return ""

    def _wrong_teacher(self) -> str:
        array, shape = self.teacher_logprobs, self.tokens.shape
        if array is None:
            return f"teacher is {self.teacher!r:.60}, but there are no teacher_logprobs" if self.teacher else ""
        top, number = self.teacher_top, int(np.count_nonzero(self.sampled.numpy()))
        if top is not None and top.ids.shape[0] != number:
            return f"teacher.ids are of {top.ids.shape[0]} tokens, and {number} were sampled"
        if array.dtype != LOGPROB or array.shape != shape:
            return f"teacher_logprobs must be {LOGPROB}{shape}, one-dimensional; is {array.dtype}{array.shape}"
        return ""

    @property
    def teacher_name(self) -> str:
        return self.teacher if isinstance(self.teacher, str) else self.teacher.name

    @property
    def teacher_top(self) -> TopTeacher | None:
        return None if isinstance(self.teacher, str) else self.teacher

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(pairwise([*self.starts, self.tokens.shape[0]]))

    @property
    def row_images(self) -> list[int | None]:
        """Index in the row; None for an image that the task made."""
        found = list[int | None]()
        for start, stop in self.bounds:
            number = count()
            inside = [image for image in self.images if start <= image.start < stop]
            found += [None if image.data else next(number) for image in inside]
        return found

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def columns(self) -> list[bytes]:
        """The arrays of DTYPES."""
        return [getattr(self, name).data for name in self.DTYPES]

    def pack(self) -> bytes:
        return bytes(msgpack.packb(self.model_dump(), **TEXT))

    @classmethod
    def unpack(cls, data: bytes) -> "Sample":
        """Raises ValueError."""
        return cls.model_validate(open_map(data))


class PlainSample(NamedTuple):
    """The trained fields of a `Sample` of one segment, without images, rewards of turns, routes or a teacher."""

    columns: Sequence[bytes]
    """The arrays of `Sample.DTYPES`."""
    reward: float
    starts: Sequence[int] = (0,)
    turn_rewards: Sequence[float] = ()
    routes: None = None
    teacher_logprobs: None = None

    @property
    def num_tokens(self) -> int:
        return len(self.columns[FLAGS])

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return [(0, self.num_tokens)]


AnySample = Sample | PlainSample


def unpack_all(samples: Sequence[bytes]) -> list[AnySample]:
    """Unpack samples; several times as fast as `Sample.unpack`, because plain ones are compared with their layout and
    not validated. Raises ValueError."""
    return [_plain(data) or Sample.unpack(data) for data in samples]


def wrong_segments(starts: list[int], sampled: np.ndarray) -> str:
    """Why no segments begin at `starts`, or ""; `sampled`: [tokens] bool."""
    if not starts or starts[0] != 0 or any(last >= start for last, start in pairwise([*starts, sampled.size])):
        return f"starts {starts!r:.60}: they begin with 0 and rise within the {sampled.size} tokens"
    if (own := sampled[np.array(starts)]).any():
        where = f"segment {own.argmax()} at token {starts[own.argmax()]}"
        return f"{where} begins with a sampled token; at least one was given before it, which predicts it"
    if not (some := np.logical_or.reduceat(sampled, starts)).all():
        return f"segment {some.argmin()} at token {starts[some.argmin()]} has no sampled token; leave it out"
    return ""


def wrong_routes(routes: Array, tokens: int) -> str:
    """Why `routes` are none of so many tokens, or ""."""
    shape = routes.shape
    if routes.dtype not in ROUTE_DTYPES or len(shape) != 3 or shape[0] != tokens or 0 in shape:
        needed = f"must be {' or '.join(ROUTE_DTYPES)} [{tokens} tokens, layers, k]"
        return f"routes {needed}; is {routes.dtype}{shape}"
    return ""


def num_turns(sampled: np.ndarray) -> int:
    """Every segment begins with a given token, so no turn crosses segments."""
    flags = np.asarray(sampled, bool)
    return int(flags[:1].sum() + np.count_nonzero(flags[1:] & ~flags[:-1]))


JUDGED_AT_ONCE = 32
"""Samples. Fewer would take more calls of NumPy, and more would take memory for their joined columns."""
ROUTE_DTYPES = ("uint8", "uint16")
MOST_TOP = 64
LOGPROB, TAUGHT = "float32", "teacher_logprobs"
TEACHER = "teacher"
VARIED = ["reward", "finish", "answer", "metrics", TEACHER]
NOTHING_SPECIAL = msgpack.packb({"images": [], "starts": [0], "turn_rewards": [], "routes": None, TEACHER: ""})[1:-1]
NO_NAME = msgpack.packb("")
NO_TEACHER = msgpack.packb({TAUGHT: None})[1:]
MOST_OFF = 1e-6
"""Error of the sum of `turn_rewards`: relative, or absolute below 1."""
SIZES = {name: np.dtype(dtype).itemsize for name, dtype in Sample.DTYPES.items()}
FLAGS = list(SIZES).index("sampled")
BYTES_PER_TOKEN = sum(SIZES.values())
Opened = tuple[bytes, int, dict[str, int], dict[str, Any]]
"""A packed sample, its number of tokens, where each array begins, and the fields between the arrays."""


def sample_stats(data: bytes, bounds: Bounds = ANY) -> SampleStats:
    """The figures of a packed sample. Raises WrongValue, in one line."""
    found = _parse_fast([data], bounds)
    return found[0] if found else _parse_checked(data, bounds)


def judge_all(samples: Sequence[bytes], bounds: Bounds) -> Iterator[SampleStats | WrongValue]:
    """The figures of each packed sample, or what is wrong with it."""
    for start in range(0, len(samples), JUDGED_AT_ONCE):
        some = samples[start : start + JUDGED_AT_ONCE]
        if together := _parse_fast(some, bounds):
            yield from together
        else:
            yield from (_figures_or_fault(data, bounds) for data in some)


def _figures_or_fault(data: bytes, bounds: Bounds) -> SampleStats | WrongValue:
    try:
        return sample_stats(data, bounds)
    except WrongValue as fault:
        return fault


def stats_of(item: int, samples: Sequence[bytes], bounds: Bounds) -> list[SampleStats]:
    """Raises WrongValue that names the item and the sample."""
    if found := _parse_fast(samples, bounds):
        return found
    found = []
    for index, data in enumerate(samples):
        try:
            found.append(sample_stats(data, bounds))
        except WrongValue as error:
            raise error.within(f"item {item}, sample {index}") from None
    return found


def _parse_fast(samples: Sequence[bytes], bounds: Bounds = ANY) -> list[SampleStats] | None:
    """None: not the usual layout. Columns of all samples are judged at once: calling NumPy takes longer than its work
    on one."""
    opened = [found for data in samples if (found := _opened(data, bounds))]
    if bounds.replayed or len(opened) < len(samples) or not opened:
        return None
    column = {
        name: b"".join([data[places[name] : places[name] + size * number] for data, number, places, _ in opened])
        for name, size in SIZES.items()
    }
    flags, versions = column["sampled"], np.frombuffer(column["versions"], SIGNED)
    if (versions >= 0).tobytes() != flags or np.minimum.reduce(versions) != -1 or not _fits(column, opened, bounds):
        return None
    starts = np.array([0, *accumulate([number for _, number, _, _ in opened[:-1]])])
    trainable = np.add.reduceat(np.frombuffer(flags, np.uint8), starts, dtype=np.int64).tolist()
    oldest = np.minimum.reduceat(versions.view(UNSIGNED), starts).tolist()  # of those that are not -1
    newest, figures = np.maximum.reduceat(versions, starts).tolist(), list[SampleStats]()
    for one, sampled, first, last in zip(opened, trainable, oldest, newest, strict=True):
        data, number, places, rest = one
        prompt = data.find(1, at := places["sampled"], at + number) - at
        if prompt <= 0:  # it begins with a sampled token, or has none
            return None
        truncated, metrics = rest["finish"] == "length", rest["metrics"]
        figures.append(SampleStats(number, sampled, rest["reward"], truncated, first, metrics, prompt, 0, last))
    return figures


def _fits(column: Mapping[str, bytes], opened: Sequence[Opened], bounds: Bounds) -> bool:
    """False also for a log-probability within ROUNDING above 0, and for -0."""
    sampled, tokens = np.frombuffer(column["sampled"], np.bool_), np.frombuffer(column["tokens"], UNSIGNED)
    largest, own = np.maximum.reduce, bounds.placeholder
    if largest(tokens) >= bounds.vocabulary or (own is not None and np.count_nonzero((tokens == own) > sampled)):
        return False
    logprobs = [column["behaviour_logprobs"]]
    if any([TAUGHT in places for _, _, places, _ in opened]):
        taught = [(data, number, places.get(TAUGHT)) for data, number, places, _ in opened]
        logprobs.append(b"".join([data[at:] if at else bytes(4 * number) for data, number, at in taught]))
    for data in logprobs:
        # without a sign, a NaN with the sign is the largest of all; with one, every log-probability is 0 or less
        bits = np.frombuffer(data, UNSIGNED)
        if largest(bits) > LEAST_BITS or largest(bits.view(SIGNED)) > 0 or np.count_nonzero((bits != 0) > sampled):
            return False
    return True


def _opened(data: bytes, bounds: Bounds) -> Opened | None:
    """None also where the teacher is none of the run's, or is missing."""
    if (found := _places(data)) is None:
        return None
    number, places, end, last = found
    after = data.rfind(NOTHING_SPECIAL, end, last)
    name = data[after + len(NOTHING_SPECIAL) : last]
    if after < 0:
        return None
    try:
        rest = msgpack.unpackb(HEAD_OF_SCALARS + data[end:after], **LIMITS)
        rest[TEACHER] = "" if name == NO_NAME else msgpack.unpackb(name, **LIMITS)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return None
    if list(rest) != VARIED:
        return None
    reward, finish, answer, metrics, teacher = rest.values()
    is_sound = (
        type(reward) is float
        and abs(reward) <= MOST_REWARD  # NaN is not
        and finish in ("stop", "length")
        and type(answer) is type(teacher) is str
        and type(metrics) is dict
        and (not metrics or _are_finite(metrics))
    )
    if TAUGHT in places:
        is_sound = is_sound and not bounds.top_k and bounds.has_teacher(teacher)  # most probable tokens lack
    else:
        is_sound = is_sound and not teacher and "" not in (bounds.teachers or ())
    return (data, number, places, rest) if is_sound else None


def _plain(data: bytes) -> PlainSample | None:
    """None: the sample has more, or is wrong."""
    if (opened := _opened(data, ANY)) is None or TAUGHT in opened[2]:
        return None
    _, number, places, rest = opened
    columns = [data[places[name] : places[name] + size * number] for name, size in SIZES.items()]
    flags = columns[FLAGS]
    is_sound = not flags[0] and 1 in flags and not flags.translate(None, b"\0\1")
    return PlainSample(columns, rest["reward"]) if is_sound else None


def _are_finite(metrics: dict[Any, Any]) -> bool:
    return all([type(name) is str and type(value) is float and isfinite(value) for name, value in metrics.items()])


def _places(data: bytes) -> tuple[int, dict[str, int], int, int] | None:
    """The number of tokens; where each array begins; where the arrays end, and the teacher's fields begin."""
    if len(data) < NUM_TOKENS_AT + 5:
        return None
    size = SIZE_OF_NUMBER.get(data[NUM_TOKENS_AT], 0)
    number = int.from_bytes(data[NUM_TOKENS_AT + 1 : NUM_TOKENS_AT + 1 + size]) if size else data[NUM_TOKENS_AT]
    if not 0 < number * BYTES_PER_TOKEN < len(data):
        return None
    headers, places, end, taught = _layout(number)
    for at, fixed in headers:
        if not data.startswith(fixed, at):
            return None
    if data.endswith(NO_TEACHER):
        return number, places, end, len(data) - len(NO_TEACHER)
    at = len(data) - 4 * number
    last = at - len(taught)
    return (number, places | {TAUGHT: at}, end, last) if last > 0 and data.startswith(taught, last) else None


def _parse_checked(data: bytes, bounds: Bounds = ANY) -> SampleStats:
    try:
        sample = Sample.unpack(data)
    except ValidationError as error:
        raise _in_words(error) from None
    except ValueError as error:
        raise WrongValue("", str(error)) from None
    sampled = sample.sampled.numpy().astype(bool)
    tokens, logprobs, versions = (
        array.numpy() for array in (sample.tokens, sample.behaviour_logprobs, sample.versions)
    )
    routes = None if sample.routes is None else sample.routes.numpy()
    columns = Columns(tokens, sampled, logprobs, versions)
    judge_rewards([sample.reward, *sample.turn_rewards])
    judge(columns, bounds, [image.start for image in sample.images], sample.starts, routes)
    judge_teacher(sample.teacher_logprobs, sample.teacher_name, sampled, bounds)
    if sample.teacher_logprobs is not None:
        top = sample.teacher_top
        judge_top(None if top is None else (top.ids.numpy(), top.logprobs.numpy()), bounds)
    oldest, newest = int(versions[sampled].min()), int(versions.max())
    trainable = int(sampled.sum())  # none of them is a segment's first token, which nothing predicts
    truncated, prompt = sample.finish == "length", int(sampled.argmax())
    images = 1 + max((number for number in sample.row_images if number is not None), default=-1)
    known = oldest, sample.metrics, prompt, images, newest
    return SampleStats(sampled.size, trainable, sample.reward, truncated, *known)


def _in_words(error: ValidationError) -> WrongValue:
    name, _, rule = in_words(error).partition(": ")
    given = error.errors(include_url=False)[0]["input"]
    value = f"{given!r:.40}; " if isinstance(given, int | float) else ""
    return WrongValue(name, value + rule.removeprefix("Value error, "))


@lru_cache(4096)
def _layout(number: int) -> tuple[list[tuple[int, bytes]], dict[str, int], int, bytes]:
    """The constant bytes before each array, and where they stand; where each array begins; where the last one ends; and
    the bytes before `teacher_logprobs`."""
    places, position, headers = dict[str, int](), 0, list[tuple[int, bytes]]()
    before = msgpack.Packer().pack_map_header(len(Sample.model_fields))
    for name, dtype in [*Sample.DTYPES.items(), (TAUGHT, LOGPROB)]:
        size = number * np.dtype(dtype).itemsize
        field = msgpack.packb({name: {"dtype": dtype, "shape": [number], "data": bytes(size)}})
        before += field[1 : len(field) - size]
        if name != TAUGHT:
            headers.append((position, before))
            places[name] = position + len(before)
            position, before = places[name] + size, b""
    return headers, places, position, before


HEAD_OF_SCALARS = msgpack.Packer().pack_map_header(len(VARIED) - 1)
SIZE_OF_NUMBER = {0xCC: 1, 0xCD: 2, 0xCE: 4}
NUM_TOKENS_AT = 1 + len(msgpack.packb({"tokens": {"dtype": Sample.DTYPES["tokens"], "shape": None}})[1:-1]) + 1
