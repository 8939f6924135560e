"""From a packed sample to what the ledger needs of it: each sample is opened once in the buffer, here, when it arrives.

`Sample` of `buffer/wire/protocol.py` says what a sample is, and in words what is wrong with one. To validate each through it
would take most of the buffer's time at full load; but all that `Sample.pack` writes for so many tokens differs only in
the numbers, so a sample is compared with what it must look like, and only what does not match goes through `Sample`.
Pure; used by `buffer/wire/handlers.py`.
"""

from functools import lru_cache
from math import isfinite
from typing import Any

import msgpack
import numpy as np
from pydantic import ValidationError

from buffer.ledger.types import SampleStats
from buffer.wire.protocol import LIMITS, Sample, in_words

SCALARS = [name for name in Sample.model_fields if name not in Sample.DTYPES]
"""What follows the arrays."""
BYTES_A_TOKEN = sum(np.dtype(dtype).itemsize for dtype in Sample.DTYPES.values())


def sample_stats(data: bytes) -> SampleStats:
    """Raises ValueError, in one line, for what is not a sample, or has a sampled token of no policy version."""
    return _parse_fast(data) or _parse_checked(data)


def _parse_fast(data: bytes) -> SampleStats | None:
    """The same for what `Sample.pack` wrote. None says nothing."""
    number = _number(data)
    frame, places, end = _layout(number)
    for position, fixed in frame:
        if not data.startswith(fixed, position):
            return None
    flags = data[places["sampled"] : places["sampled"] + number]
    versions = np.frombuffer(data, "<i4", number, places["versions"])
    try:
        rest = msgpack.unpackb(HEAD_OF_SCALARS + data[end:], **LIMITS)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return None
    if not _sound(rest) or (versions >= 0).tobytes() != flags or 1 not in flags:
        return None
    oldest = int(np.minimum.reduce(versions.view("<u4")))  # of those that are not -1
    return SampleStats(number, flags.count(1), rest["reward"], rest["finish"] == "length", oldest)


def _parse_checked(data: bytes) -> SampleStats:
    try:
        sample = Sample.unpack(data)
    except ValidationError as error:
        raise ValueError(f"Put.samples: {in_words(error)}") from None
    sampled = sample.sampled.numpy().astype(bool)
    oldest = int(sample.versions.numpy()[sampled].min())
    if oldest < 0:
        raise ValueError("a sampled token without the policy version that sampled it")
    return SampleStats(sampled.size, int(sampled.sum()), sample.reward, sample.finish == "length", oldest)


def _sound(rest: dict[str, Any]) -> bool:
    """Whether these are a sample's scalars, type for type."""
    metrics, reward = rest.get("metrics"), rest.get("reward")
    return (
        list(rest) == SCALARS
        and type(reward) is float
        and isfinite(reward)
        and rest["finish"] in ("stop", "length")
        and type(rest["answer"]) is str
        and type(metrics) is dict
        and all(type(name) is str and type(value) is float for name, value in metrics.items())
    )


def _number(data: bytes) -> int:
    """How many tokens it says it has; 0 where that cannot be told, or cannot be."""
    if len(data) < AT + 5:
        return 0
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(data[AT], 0)
    number = int.from_bytes(data[AT + 1 : AT + 1 + size]) if size else data[AT]
    return number if number * BYTES_A_TOKEN < len(data) else 0


def _array(name: str, number: int) -> bytes:
    """What precedes the bytes of an array."""
    dtype = Sample.DTYPES[name]
    size = number * np.dtype(dtype).itemsize
    field = msgpack.packb({name: {"dtype": dtype, "shape": [number], "data": bytes(size)}})
    return bytes(field[1 : len(field) - size])


@lru_cache(4096)
def _layout(number: int) -> tuple[list[tuple[int, bytes]], dict[str, int], int]:
    """Of a sample of `number` tokens: what stands where between the arrays, where each begins, where the last ends."""
    frame, places, position = list[tuple[int, bytes]](), dict[str, int](), 1
    frame.append((0, msgpack.Packer().pack_map_header(len(Sample.model_fields))))
    for name, dtype in Sample.DTYPES.items():
        before = _array(name, number)
        frame.append((position, before))
        places[name] = position + len(before)
        position = places[name] + number * np.dtype(dtype).itemsize
    return frame, places, position


HEAD_OF_SCALARS = msgpack.Packer().pack_map_header(len(SCALARS))
AT = 1 + len(msgpack.packb({"tokens": {"dtype": Sample.DTYPES["tokens"], "shape": None}})[1:-1]) + 1
"""Position of the number of tokens: behind the header of the map and that of `shape`."""
