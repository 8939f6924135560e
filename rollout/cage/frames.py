"""Messages between the server, a warden and a worker: MessagePack with a length before it, over a local socket."""

from typing import Any

import msgpack

MAX_BYTES = 32 * 2**20
"""Largest message. A trajectory of 500,000 tokens takes about 12 MiB."""


class BadFrame(Exception):
    """The other side sent bytes that are no message: users' code wrote to the socket, or its memory is corrupt."""


def encode(message: Any) -> bytes:
    """Bytes of a message of plain values; numpy's arrays and scalars count as plain.

    Raises TypeError, ValueError or OverflowError for other values, and what users' own classes raise.
    """
    body: bytes = msgpack.packb(message, default=_plain)
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body) / 2**20:.1f} MiB are more than the {MAX_BYTES // 2**20} MiB of a message")
    return len(body).to_bytes(4, "big") + body


def _plain(value: Any) -> Any:
    if isinstance(value, int):
        raise OverflowError("an integer of more than 64 bits")
    if not hasattr(value, "tolist"):
        raise TypeError(f"a value of type {type(value).__name__} cannot travel; numbers, texts, lists and dicts can")
    return value.tolist()


class FrameReader:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete with this data. Raises BadFrame."""
        self._bytes += data
        messages: list[Any] = []
        while len(self._bytes) >= 4:
            size = int.from_bytes(self._bytes[:4], "big")
            if size > MAX_BYTES:
                raise BadFrame(f"a message of {size} bytes")
            if len(self._bytes) < 4 + size:
                break
            try:
                messages.append(msgpack.unpackb(self._bytes[4 : 4 + size], strict_map_key=False))
            except (ValueError, TypeError, OverflowError) as error:
                raise BadFrame(f"{type(error).__name__}: {error}") from error
            del self._bytes[: 4 + size]
        return messages
