"""Messages between server, warden and worker: MessagePack on a socket."""

from numbers import Number
from typing import Any

import msgpack

MAX_BYTES = 32 * 2**20
"""A trajectory of 500,000 tokens takes about 12 MiB."""
BAD_BYTES = (ValueError, TypeError, OverflowError, msgpack.UnpackException)
"""Raised for bytes that are no message: users' code may write to the socket."""


def encode(message: Any) -> bytes:
    """Encode plain values, including numpy's, decimals and fractions.

    Raises TypeError, ValueError or OverflowError, and what users' classes raise.
    """
    body: bytes = msgpack.packb(message, default=plain)
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body) / 2**20:.1f} MiB are more than the {MAX_BYTES // 2**20} MiB of a message")
    return body


def plain(value: Any) -> Any:
    if isinstance(value, int):
        raise OverflowError("an integer of more than 64 bits")
    if isinstance(value, Number) and not isinstance(value, complex) and not hasattr(value, "tolist"):
        return float(value)  # type: ignore[arg-type]
    if not hasattr(value, "tolist"):
        raise TypeError(f"a value of type {type(value).__name__} cannot travel; numbers, texts, lists and dicts can")
    return value.tolist()


def unpacker(unicode_errors: str = "strict") -> msgpack.Unpacker:
    return msgpack.Unpacker(strict_map_key=False, max_buffer_size=2 * MAX_BYTES, unicode_errors=unicode_errors)
