"""A staging copy of the rows and columns that one worker loads. Buckets arrive whole, since a broadcast has the same
bytes for all workers. Each is checksummed, and its regions are copied out, before later buckets overwrite it."""

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from learner.weights.buckets import ROW, Buckets, bucket_sums, checksums_of, row_weights
from learner.weights.plan import ALIGN, Plan, Slot

Sums = tuple[torch.Tensor, torch.Tensor]
Copies = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


class Region(NamedTuple):
    """A view of the tensor `name`, in elements. Half of the columns of an 8 x 4 matrix:
    `Region("w", 2, (8, 2), (4, 1))`."""

    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Regions(NamedTuple):
    """What one worker loads. `problem`: why that is not known."""

    found: tuple[Region, ...] = ()
    problem: str = ""


def staged_bytes(plan: Plan, regions: Iterable[Region]) -> int:
    """Bytes of the staged regions."""
    sizes = {slot.spec.name: slot.spec.dtype.itemsize for slot in plan.slots}
    return sum(_padded(prod(region.shape) * sizes[region.name]) for region in regions)


def arrival_bytes(plan: Plan, scratch: int) -> int:
    """Bytes of the buffers for buckets and shares."""
    return _turns(scratch) * max(plan.sizes) + 2 * scratch


class SlicedCopy:
    """The `regions` of the weights of `plan`."""

    def __init__(self, plan: Plan, device: torch.device, regions: Collection[Region], scratch: int = 0) -> None:
        self.weights = Buckets(plan, device, rotating=True, scratch=scratch, turns=_turns(scratch))
        self.regions = tuple(regions)
        self._slots = {slot.spec.name: slot for slot in plan.slots}
        sizes = [prod(each.shape) * self._slots[each.name].spec.dtype.itemsize for each in self.regions]
        begins = [0, *accumulate(map(_padded, sizes))]
        self._memory = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
        self._parts = [
            self._memory[begin : begin + size].view(self._slots[each.name].spec.dtype).view(each.shape)
            for each, begin, size in zip(self.regions, begins, sizes, strict=False)
        ]
        self._copies = [self._copies_of(bucket) for bucket in range(len(plan.sizes))]
        self._row_weights = row_weights(max(plan.sizes) // ROW + 1, device)

    def keep(self, bucket: int) -> Sums:
        for parts, sources in self._copies[bucket]:
            torch._foreach_copy_(parts, sources)
        return bucket_sums(self.weights.buckets[bucket], self._row_weights)

    def checksums(self, sums: Iterable[Sums]) -> list[int]:
        rows, columns = zip(*sums, strict=True)
        return checksums_of(torch.stack(rows), torch.stack(columns))

    def staged(self, first: int = 0) -> Iterator[tuple[Region, torch.Tensor]]:
        for region, part in zip(self.regions, self._parts, strict=True):
            if self._slots[region.name].bucket >= first:
                yield region, part

    def _copies_of(self, bucket: int) -> Copies:
        """On a GPU torch fuses a list that is dense and of one dtype."""
        groups: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for region, part in zip(self.regions, self._parts, strict=True):
            slot = self._slots[region.name]
            if slot.bucket == bucket and part.numel():
                source = self._source(slot, region)
                dense = source.is_contiguous()
                parts, sources = groups.setdefault((part.dtype, dense), ([], []))
                parts.append(part.view(-1) if dense else part)
                sources.append(source.view(-1) if dense else source)
        return list(groups.values())

    def _source(self, slot: Slot, region: Region) -> torch.Tensor:
        flat = self.weights.buckets[slot.bucket][slot.offset : slot.offset + slot.size].view(slot.spec.dtype)
        return flat.as_strided(region.shape, region.strides, flat.storage_offset() + region.offset)


def _turns(scratch: int) -> int:
    """One buffer is enough where shares arrive in buffers of their own."""
    return 1 if scratch else 2


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
