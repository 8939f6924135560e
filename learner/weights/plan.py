"""The plan of the weights wire: where each tensor lies in which bucket. Pure; computed alike by sender and receivers.

Tensors keep their order (vLLM loads layer by layer) and are never cut: one that is larger than a bucket gets a bucket
of its own. Each starts at a multiple of `ALIGN` bytes, so that it can be viewed in place. `digest` tells whether two
ends agree.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

ALIGN = 256
"""Bytes. Views of any dtype, vector loads and the words of the checksum all start well at such an offset."""


class Spec(NamedTuple):
    """A tensor as the policy names it. Example: `Spec("model.norm.weight", (64,), torch.bfloat16)`"""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Slot(NamedTuple):
    """A tensor's place: `size` bytes from `offset` in bucket `bucket`."""

    spec: Spec
    bucket: int
    offset: int
    size: int


@dataclass(frozen=True)
class Plan:
    """All slots in order, and the size of each bucket in bytes."""

    slots: tuple[Slot, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, specs: Iterable[Spec], bucket_bytes: int) -> "Plan":
        """Cut `specs` into buckets of at most `bucket_bytes`. Raises ValueError for no tensor, or one name twice."""
        slots: list[Slot] = []
        sizes: list[int] = []
        seen: set[str] = set()
        for name, shape, dtype in specs:
            if name in seen:
                raise ValueError(f"{name} is twice among the weights")
            seen.add(name)
            spec = Spec(name, tuple(shape), dtype)
            size = prod(spec.shape) * dtype.itemsize
            padded = -(-size // ALIGN) * ALIGN
            if not sizes or sizes[-1] + padded > bucket_bytes:
                sizes.append(0)
            slots.append(Slot(spec, len(sizes) - 1, sizes[-1], size))
            sizes[-1] += padded
        if not sum(sizes):
            raise ValueError("a policy without weights")
        return cls(tuple(slots), tuple(sizes))

    @cached_property
    def digest(self) -> str:
        """16 hex digits; two plans with the same are the same."""
        rows = "".join(f"{s.name} {s.shape} {s.dtype} {bucket} {offset}\n" for s, bucket, offset, _ in self.slots)
        return hashlib.sha256(rows.encode()).hexdigest()[:16]

    @property
    def total_bytes(self) -> int:
        """What one copy of the weights takes on a device."""
        return sum(self.sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`, as a dtype travels."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Undo `dtype_name`; raises ValueError for what is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
