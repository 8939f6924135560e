"""Keeps in pinned host memory what the GPU has no room for: rows that are not computed yet, and inputs of recomputed
blocks (`learner.activation_checkpointing: offload`).

A stream copies a block's input while the block computes, and fetches it while the block after it is recomputed.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

INPUTS_HELD = 3
"""A GPU holds the recomputed block's input, the one fetched, and one on its way to the host."""


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy `x` to `device`. From memory that is not pinned, a copy would wait for all that the GPU has queued."""
    pinned = x.pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x
    return pinned.to(device, non_blocking=True)


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
