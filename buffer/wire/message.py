"""What messages are made of: base model, bounds of fields, tensors, packing.

A message is one ZeroMQ frame of MessagePack: a map with `kind` (the name of the model), `id` (repeated in the answer)
and the fields of the model. Each field is bounded. Texts for people are cut, not refused: a long explanation must not
end the process that gives it.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import msgpack
import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from buffer.data.servable import MOST_ENTRIES, MOST_KEYS

T = TypeVar("T")
NAME, TEXT_LENGTH, REPORT = 200, 4000, 100_000
MOST_RANKS = 2**16
"""The cut of a batch takes memory for each."""
MOST_WORKERS = 4096
MOST_NAMED = 2**14
MOST_HELD = 2**16
"""Leases of a server, samples of a group."""
MOST_STATS = 256
"""Every answer to `Status` repeats them for each server."""
MOST_RESULTS = 2**18
LIMITS: dict[str, Any] = {
    "strict_map_key": False,
    "max_array_len": MOST_ENTRIES,
    "max_map_len": MOST_KEYS,
    "max_ext_len": 16,
}
Frame = bytes | memoryview
TEXT: dict[str, Any] = {"unicode_errors": "backslashreplace"}
"""Users' code and policies may write half a surrogate pair."""
MORE_BYTES = 2**18
"""Room in a packed message beside an eighth more than its byte strings have."""
FRAME_BYTES = 2**16
"""Mean size of byte strings that travel as frames: smaller ones are copied sooner."""


Dtype = Literal["uint8", "uint16", "int32", "int64", "float32", "float64"]
NAMES: dict[Any, Dtype] = {np.dtype(name): name for name in get_args(Dtype)}
"""NumPy makes a dtype's name anew each time, which takes as long as all else."""
LITTLE_ENDIAN = {name: dtype.newbyteorder("<") for dtype, name in NAMES.items()}


def written(text: Any) -> Any:
    return text.encode("utf-8", "backslashreplace").decode() if isinstance(text, str) else text


def cut(text: Any, most: int = TEXT_LENGTH) -> Any:
    """`text` as `written`, at most `most` characters; anything else as it is."""
    return f"{text[: most - 3]}..." if isinstance(text := written(text), str) and len(text) > most else text


Count = Annotated[int, Field(ge=0, lt=2**62)]
VersionOrNone = Annotated[int, Field(ge=-1, lt=2**62)]
"""-1: none."""
Checksum = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Measured = FiniteFloat
Flag = Annotated[str, Field(max_length=32)]
Name = Annotated[str, Field(max_length=NAME)]
LongName = Annotated[str, Field(max_length=TEXT_LENGTH)]
Text = Annotated[str, BeforeValidator(cut), Field(max_length=TEXT_LENGTH)]
Report = Annotated[str, BeforeValidator(lambda text: cut(text, REPORT)), Field(max_length=REPORT)]
"""For people, several lines."""
Label = Annotated[str, BeforeValidator(written), Field(max_length=2**20)]
Row = Annotated[dict[str, Any], Field(max_length=MOST_KEYS)]
Few = Annotated[list[T], Field(max_length=MOST_NAMED)]
Held = Annotated[list[T], Field(max_length=MOST_HELD)]
Known = Annotated[list[T], Field(max_length=MOST_RESULTS)]
Many = Annotated[list[T], Field(max_length=MOST_ENTRIES)]
Stats = Annotated[dict[Name, Measured], Field(max_length=MOST_STATS)]
Figures = Annotated[dict[Label, Measured], Field(max_length=MOST_NAMED)]
ByName = Annotated[dict[Name, T], Field(max_length=MOST_NAMED)]
ByLabel = Annotated[dict[Label, T], Field(max_length=MOST_KEYS)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    FRAMED: ClassVar[str] = ""
    """Name of the list of byte strings that may travel as frames; such a message has megabytes."""


class Array(Message):
    """A tensor: little-endian bytes with dtype and shape."""

    dtype: Dtype
    shape: Annotated[list[Count], Field(max_length=8)]
    data: bytes

    @model_validator(mode="after")
    def _size(self) -> "Array":
        size = math.prod(self.shape) * LITTLE_ENDIAN[self.dtype].itemsize
        if size != len(self.data):
            raise ValueError(f"{self.dtype}{self.shape} takes {size} bytes, not {len(self.data)}")
        return self

    @classmethod
    def of(cls, array: np.ndarray) -> "Array":
        array = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        name: Any = NAMES.get(array.dtype) or array.dtype.name
        return cls(dtype=name, shape=list(array.shape), data=array.tobytes())

    def numpy(self) -> np.ndarray:
        return np.frombuffer(self.data, LITTLE_ENDIAN[self.dtype]).reshape(self.shape)


def pack(number: int, message: Message) -> Frame:
    fields = {"kind": type(message).__name__, "id": number, **message.model_dump()}
    if not message.FRAMED:
        return bytes(msgpack.packb(fields, **TEXT))
    size = sum(map(len, fields[message.FRAMED]))  # packed in place: a buffer that grows is copied each time
    packer = msgpack.Packer(autoreset=False, buf_size=size + size // 8 + MORE_BYTES, **TEXT)
    packer.pack(fields)
    return memoryview(packer.getbuffer())


def pack_frames(number: int, message: Message) -> list[Frame]:
    """Large byte strings get frames of their own, which are not copied."""
    name = message.FRAMED
    large: list[bytes] = getattr(message, name) if name else []
    if not large or sum(map(len, large)) < FRAME_BYTES * len(large):
        return [pack(number, message)]
    return [pack(number, message.model_copy(update={name: []})), *large]


def unpack(data: Frame, kinds: dict[str, type[Message]], large: Sequence[bytes] = ()) -> tuple[int, Message]:
    """Undo `pack` or `pack_frames`. Raises ValueError, in one line."""
    fields = open_map(data)
    if large:
        kind = kinds.get(str(fields.get("kind")))
        if kind is None or fields.get(kind.FRAMED) != []:
            raise ValueError(f"{len(large)} frames after a message that is whole")
        fields[kind.FRAMED] = list(large)
    number = fields.pop("id", None)
    if not isinstance(number, int):
        raise ValueError(f"not a message of this wire: id {str(number)[:40]!r}")
    return number, validate(fields, kinds)


def validate(fields: dict[str, Any], kinds: dict[str, type[Message]]) -> Message:
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"not a message of this wire: kind {str(kind)[:40]!r}")
    try:
        return kinds[kind].model_validate(fields)
    except ValidationError as error:
        raise ValueError(f"{kind}.{in_words(error)}") from None


def number_of(data: Frame) -> int:
    """The `id` even of a broken message, so that its refusal reaches the client."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data[:200])
    try:
        unpacker.read_map_header()
        _, _, key, number = (unpacker.unpack() for _ in range(4))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return 0
    return number if key == "id" and isinstance(number, int) else 0


def open_map(data: Frame) -> dict[str, Any]:
    """Fields that are not validated. Raises ValueError, in one line."""
    try:
        fields = msgpack.unpackb(data, **LIMITS)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:  # TypeError: a list as a key
        raise ValueError(f"not MessagePack: {error or type(error).__name__}") from None
    if not isinstance(fields, dict) or not all([isinstance(key, str) for key in fields]):
        raise ValueError("not a map of fields")
    return fields


def in_words(error: ValidationError) -> str:
    """Where and what the first fault is, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))[:80]
    return f"{where}: {first['msg'][:200]}".replace("\n", " ")
