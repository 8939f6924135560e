"""Copies between pinned host memory and the GPU, which the CPU does not wait for: rows that are computed next, sums of
a step, and inputs of recomputed blocks (`learner.activation_checkpointing: offload`).

A stream copies a block's input while the block computes, and fetches it while the block after it is recomputed.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

INPUTS_HELD = 3
"""A GPU holds the recomputed block's input, the one fetched, and one on its way to the host."""
ALIGNED = 512
"""torch's allocator begins a tensor at a multiple of so many bytes."""


class Mapped(Protocol):
    """Holds tensors."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to each tensor, in the same order at each call."""


Holder = TypeVar("Holder", bound=Mapped)


def sent(holder: Holder, device: torch.device) -> Holder:
    """Copy all tensors of `holder` from the CPU to `device`."""
    if device.type != "cuda":
        return holder.mapped(lambda x: x.to(device))
    tensors: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    holder.mapped(note)
    there = iter(in_one_copy(tensors, device))
    return holder.mapped(lambda _: next(there))


def in_one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of the CPU to `device` through one buffer. The GPU's buffer lives as long as one of them.

    A copy of each tensor would take up to 2 ms of the CPU. From memory that is not pinned, it would wait for all that
    the GPU has queued. NumPy copies on this thread; torch would start threads for a few hundred kilobytes.
    """
    ends = [*accumulate(-(-x.nbytes // ALIGNED) * ALIGNED for x in tensors)]
    begins = [0, *ends[:-1]]
    host = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=device.type == "cuda")
    bytes_of = host.numpy()
    for x, begin in zip(tensors, begins, strict=False):
        flat = x.contiguous().as_strided((x.numel(),), (1,))  # of one element or none, a stride may be any number
        bytes_of[begin : begin + x.nbytes] = flat.view(torch.uint8).numpy()
    there = host.to(device, non_blocking=True)
    spans = zip(tensors, begins, strict=False)
    return [there[begin : begin + x.nbytes].view(x.dtype).view(x.shape) for x, begin in spans]


class Fetched:
    """A tensor on its way to host memory. `wait` returns it there, and waits only for what was queued before it."""

    def __init__(self, x: Tensor) -> None:
        self._host, self._copied = x, None
        if x.is_cuda:
            self._host = torch.empty_like(x, device="cpu", pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._copied = torch.cuda.current_stream(x.device).record_event()

    def wait(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


@dataclass
class HostCopy:
    """A block's input in pinned memory."""

    host: Tensor
    device: torch.device
    before: "weakref.ref[HostCopy] | None"
    """The backward pass needs it next."""
    back: Tensor | None = None


class HostCopies:
    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[HostCopy] | None = None

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Works as torch's `checkpoint`."""
        with saved_tensors_hooks(self._store, self._fetch):  # of the inputs alone: within, checkpoint has hooks
            return checkpoint(function, *args, use_reentrant=False)

    def _store(self, given: Tensor) -> Tensor | HostCopy:
        if not given.is_cuda:
            return given
        stream = self._own_stream(given.device)
        stream.wait_stream(torch.cuda.current_stream(given.device))
        with torch.cuda.stream(stream):
            host = torch.empty_like(given, device="cpu", pin_memory=True)
            host.copy_(given, non_blocking=True)
        given.record_stream(stream)
        kept = HostCopy(host, given.device, self._last)
        self._last = weakref.ref(kept)
        return kept

    def _fetch(self, kept: Tensor | HostCopy) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._begin(kept)
        assert kept.back is not None
        current = torch.cuda.current_stream(kept.device)
        current.wait_stream(self._own_stream(kept.device))
        found, kept.back = kept.back, None
        found.record_stream(current)
        if kept.before and (before := kept.before()):
            self._begin(before)
        return found

    def _begin(self, kept: HostCopy) -> None:
        if kept.back is None:
            with torch.cuda.stream(self._own_stream(kept.device)):
                kept.back = kept.host.to(kept.device, non_blocking=True)

    def _own_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream
