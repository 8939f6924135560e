"""The keys of the run file on which the buffer's answers depend."""

from dataclasses import dataclass
from typing import Literal

from buffer.wire.values import ANY, Bounds


@dataclass(frozen=True)
class Limits:
    run: str
    fingerprint: str
    samples: int
    max_bytes: int
    max_message: int
    keep: Literal["checkpoints", "all"]
    bounds: Bounds = ANY
