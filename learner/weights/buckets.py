"""One copy of a policy's weights in buckets on one device. Held by the sender (to serve it) and by each worker (to
stage it).

Waits for nothing; `checksums` waits for the device once.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch

from learner.weights.plan import Plan, Slot

WORDS = 4096
"""Words of 8 bytes in a row of the checksum."""
ROW = 8 * WORDS
FACTOR = 0x9E3779B97F4A7C1


class Buckets:
    """The buckets of `plan` on `device`, each a flat uint8 tensor, zero at first.

    `rotating`: there is room for two only, and each bucket takes the place of the one before the last. Otherwise they
    lie one after another, each from a row of the checksum on, so that a few operations sum them all.
    """

    def __init__(self, plan: Plan, device: torch.device, rotating: bool = False) -> None:
        self.plan, self.device, self.rotating = plan, device, rotating
        rows = [max(1, -(-size // ROW)) for size in plan.sizes]
        places = [max(rows)] * min(2, len(rows)) if rotating else rows
        begins = [0, *accumulate(places)]
        self._room = torch.zeros(begins[-1] * ROW, dtype=torch.uint8, device=device)
        starts = [begins[index % len(places)] * ROW for index in range(len(rows))]
        self.buckets = [self._room[start : start + size] for start, size in zip(starts, plan.sizes, strict=True)]
        if not rotating:
            self._ends = torch.tensor(begins[1:], device=device) - 1
            self._weights = torch.cat([_weights(count, device) for count in rows])

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor under its name, in its shape and dtype, in order: views, no copies."""
        for slot in self.plan.slots:
            yield slot.spec.name, self.view(slot)

    def views_of(self, bucket: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of one bucket."""
        for slot in self.plan.slots:
            if slot.bucket == bucket:
                yield slot.spec.name, self.view(slot)

    def view(self, slot: Slot) -> torch.Tensor:
        """The tensor at `slot`, in place."""
        flat = self.buckets[slot.bucket][slot.offset : slot.offset + slot.size]
        return flat.view(slot.spec.dtype).view(slot.spec.shape)

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy `weights` in. Takes all of them even if one is wrong (the others gather along), then raises
        ValueError."""
        problem, slots = "", iter(self.plan.slots)
        for name, tensor in weights:
            slot = next(slots, None)
            got = (name, tuple(tensor.shape), tensor.dtype)
            if slot is None or got != tuple(slot.spec):
                planned = tuple(slot.spec) if slot else "no more tensors"
                problem = problem or f"weights: got {got}, the plan has {planned}"
            else:
                self.view(slot).copy_(tensor, non_blocking=True)
        missing = next(slots, None)
        if not problem and missing is not None:
            problem = f"weights: {missing.spec.name} did not come"
        if problem:
            raise ValueError(problem)

    def checksums(self) -> list[int]:
        """One number a bucket, the same for the same bytes on any device: what `checksum` says of each.

        All at once, because each operation is a turn of this thread at Python's lock, which training or generation
        holds. Raises ValueError where the buckets are not all there at once.
        """
        if self.rotating:
            raise ValueError("a snapshot with room for two buckets can be summed one by one only")
        rows = self._room.view(torch.int64).view(-1, WORDS).sum(1)
        sums = (rows * self._weights).cumsum(0)[self._ends]
        return [int(value) for value in sums.diff(prepend=sums.new_zeros(1)).tolist()]


def checksum(bucket: torch.Tensor) -> torch.Tensor:
    """`[bytes] uint8 -> [] int64`: sums of rows of words, weighted by row, in integers that wrap around.

    One pass over the memory and exact in any order of summation; a wrong bit, or rows exchanged or missing, change it.
    """
    words = bucket.view(torch.int64)
    whole = len(words) // WORDS * WORDS
    rows = torch.cat([words[:whole].view(-1, WORDS).sum(1), words[whole:].sum(0, keepdim=True)])
    return (rows * _weights(len(rows), bucket.device)).sum()


def _weights(rows: int, device: torch.device) -> torch.Tensor:
    """Of each row, all odd, so that no bit falls out."""
    return torch.arange(1, 2 * rows, 2, dtype=torch.int64, device=device) * FACTOR
