"""The plan of the weights wire: which tensor lies where in which bucket. Both ends compute it. Tensors are never split
and keep their order, since vLLM loads layer by layer. Frozen ones come first: only a server that has none of this
learner's weights gets them."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

ALIGN = 256
"""A multiple of dtype sizes, vector loads and the checksum's words."""
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
"""Suffixes of the two tensors of a layer's adapter."""


class Spec(NamedTuple):
    """A tensor of the policy. Example: `Spec("model.norm.weight", (64,), torch.bfloat16)`"""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Slot(NamedTuple):
    """Where a tensor lies: `size` bytes at `offset` of `bucket`."""

    spec: Spec
    bucket: int
    offset: int
    size: int


@dataclass(frozen=True)
class Plan:
    """All slots in order, and the bytes of each bucket. The first `frozen` buckets are never trained. Each of `ranks`
    sends its own rows of every tensor that is not in `replicated` (`rows.py`)."""

    slots: tuple[Slot, ...]
    sizes: tuple[int, ...]
    frozen: int = 0
    ranks: int = 1
    replicated: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        specs: Iterable[Spec],
        bucket_bytes: int,
        frozen: Collection[str] = (),
        ranks: int = 1,
        replicated: Collection[str] = (),
    ) -> "Plan":
        """Lay `specs` out in buckets of at most `bucket_bytes`. Raises ValueError."""
        slots: list[Slot] = []
        sizes: list[int] = []
        seen: set[str] = set()
        num_frozen = 0
        for name, shape, dtype in sorted(specs, key=lambda spec: spec[0] not in frozen):
            if name in seen:
                raise ValueError(f"the policy has two weights of the name {name}")
            seen.add(name)
            spec = Spec(name, tuple(shape), dtype)
            size = prod(spec.shape) * dtype.itemsize
            padded = -(-size // ALIGN) * ALIGN
            only_frozen = len(sizes) == num_frozen and name not in frozen
            if not sizes or only_frozen or sizes[-1] + padded > bucket_bytes:
                sizes.append(0)
            slots.append(Slot(spec, len(sizes) - 1, sizes[-1], size))
            sizes[-1] += padded
            num_frozen = len(sizes) if name in frozen else num_frozen
        if unknown := set(frozen) - seen:
            raise ValueError(f"the policy has no weight {min(unknown)}, which is to be frozen")
        if unknown := set(replicated) - seen:
            raise ValueError(f"the policy has no weight {min(unknown)}, which every rank is to hold")
        if not sum(sizes[num_frozen:]):
            raise ValueError("a policy without weights to train")
        return cls(tuple(slots), tuple(sizes), num_frozen, ranks, frozenset(replicated))

    @cached_property
    def trained(self) -> "Plan":
        if not self.frozen:
            return self
        slots = (slot._replace(bucket=slot.bucket - self.frozen) for slot in self.slots if slot.bucket >= self.frozen)
        return Plan(tuple(slots), self.sizes[self.frozen :], 0, self.ranks, self.replicated - self.frozen_names)

    @cached_property
    def frozen_names(self) -> frozenset[str]:
        return frozenset(slot.spec.name for slot in self.slots if slot.bucket < self.frozen)

    def first(self, digest: str) -> int:
        """The first bucket of the plan with `digest`. Raises ValueError."""
        if digest not in (self.digest, self.trained.digest):
            raise ValueError(f"the plan {digest} of the weights is neither {self.digest} nor {self.trained.digest}")
        return 0 if digest == self.digest else self.frozen

    @cached_property
    def digest(self) -> str:
        rows = "".join(f"{s.name} {s.shape} {s.dtype} {bucket} {offset}\n" for s, bucket, offset, _ in self.slots)
        rows += f"{self.ranks} ranks, {sorted(self.replicated)} on each\n" if self.ranks > 1 else ""
        return hashlib.sha256(rows.encode()).hexdigest()[:16]

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`"""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Undo `dtype_name`. Raises ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
