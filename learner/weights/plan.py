"""The plan of the weights wire: which tensor lies at which offset of which bucket. Pure: both ends compute the same.

Tensors keep their order (vLLM loads layer by layer) and are never split: a tensor larger than a bucket gets a bucket of
its own. Each starts at a multiple of `ALIGN` bytes, so that it can be viewed in place. Two plans with the same `digest`
are equal.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

ALIGN = 256
"""Bytes: a multiple of every dtype's size, of vector loads and of the checksum's words."""


class Spec(NamedTuple):
    """A tensor of the policy. Example: `Spec("model.norm.weight", (64,), torch.bfloat16)`"""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Slot(NamedTuple):
    """Where a tensor lies: `size` bytes at `offset` of bucket `bucket`."""

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
        """Lay `specs` out in buckets of at most `bucket_bytes`. Raises ValueError if there is no tensor or a name comes
        twice."""
        slots: list[Slot] = []
        sizes: list[int] = []
        seen: set[str] = set()
        for name, shape, dtype in specs:
            if name in seen:
                raise ValueError(f"the policy has two weights of the name {name}")
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
        """16 hex digits over all slots."""
        rows = "".join(f"{s.name} {s.shape} {s.dtype} {bucket} {offset}\n" for s, bucket, offset, _ in self.slots)
        return hashlib.sha256(rows.encode()).hexdigest()[:16]

    @property
    def total_bytes(self) -> int:
        """Size of one copy of the weights."""
        return sum(self.sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`, the form in which a dtype is sent."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Undo `dtype_name`. Raises ValueError for an unknown dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
