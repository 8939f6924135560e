"""Loads policies from a staging copy by the copies that vLLM's first load made (docs/design/engine.md). If these copies
are the whole load, later policies repeat them on the current stream."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, takewhile
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)
Copy = tuple[torch.Tensor, torch.Tensor]
"""Target in a parameter, and its source."""
Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and their sources."""
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)
"""Zeros of a vocabulary's padding or an adapter's slot, which stay once written."""


@dataclass(frozen=True)
class Recording:
    """Copies from one staging copy into parameters at `addresses`."""

    source: torch.Tensor
    """Keeps the staging copy in memory, so that nothing else comes to lie at its address."""
    addresses: list[int]
    groups: list[Pairs]
    problem: str


class RecordedCopies:
    """Loads into `model`, which must load in place. `padded`: it is zeroed, then filled in part."""

    def __init__(self, model: Any, padded: bool = False) -> None:
        self._model, self._padded = model, padded
        self.recording: Recording | None = None

    def forget(self) -> None:
        self.recording = None

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, torch.Tensor]], held: Collection[str] = ()) -> object:
        """Load views of one staging copy, which fill all parameters but those named `held`.

        Return what `load_weights` returned, or None if it was not needed. Records again if anything has moved.
        """
        first = next(weights)
        weights = chain([first], weights)
        parameters = [parameter for name, parameter in self._model.named_parameters() if name not in held]
        addresses = [parameter.data_ptr() for parameter in parameters]
        known = self.recording
        if known is None or storage(known.source) != storage(first[1]) or known.addresses != addresses:
            recorder = Recorder([first[1]], parameters)
            with recorder:
                loaded = self._model.load_weights(weights)
            problem = recorder.problem(parameters, self._padded)
            self.recording = Recording(first[1], addresses, grouped(recorder.copies), problem)
            if problem:
                log.warning("weights: vLLM's loaders load every policy, which takes longer: %s", problem)
            return loaded
        if known.problem:
            return self._model.load_weights(weights)
        for targets, sources in known.groups:
            torch._foreach_copy_(targets, sources)
        return None


class Recorder(TorchDispatchMode):
    """Records operations on `staged` and `parameters`. `dry`: writes nothing."""

    def __init__(self, staged: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor], dry: bool = False) -> None:
        super().__init__()
        self._staged, self._parameters = set(map(storage, staged)), set(map(storage, parameters))
        self._dry = dry
        self.copies: list[Copy] = []
        self.fills: list[Callable[[], object]] = []
        self._filled: list[torch.Tensor] = []
        self._odd: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        touched = {storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if func._schema.is_mutable and touched & self._parameters:
            if func in FILLS:
                self._filled.append(args[0].detach())
                self.fills.append(partial(func, *args, **(kwargs or {})))
            elif func is torch.ops.aten.copy_.default and self._is_load(*args[:2]):
                self.copies.append((args[0].detach(), args[1].detach()))
            else:
                self._odd.append(str(func))
            if self._dry:
                return args[0]
        elif touched & (self._staged | self._parameters) and not func.is_view:
            self._odd.append(str(func))
        return func(*args, **(kwargs or {}))

    def problem(self, parameters: Iterable[torch.Tensor], padded: bool = False) -> str:
        """Return why the copies are not the whole load: another operation, or, unless `padded`, a byte not written
        once."""
        if self._odd:
            return f"load_weights also runs {self._odd[0]}"
        if padded:
            return ""
        written = [*(target for target, _ in self.copies), *self._filled]
        if not all(tensor.is_contiguous() for tensor in (*written, *parameters)):
            return "some weights are not contiguous"
        if joined(map(span, written)) != joined(set(map(span, parameters))):
            return "some weights are not written, or written twice"
        return ""

    def _is_load(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        return storage(target) in self._parameters and storage(source) in self._staged


def merged(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Join copies of one shape that follow each other at one distance, as those of a layer's experts do: one copy of
    [experts, ...] in place of one for each. No byte may be written twice, because the order changes."""
    alike: dict[tuple[Any, ...], list[Copy]] = {}
    for copy in copies:
        alike.setdefault(tuple((storage(x), x.dtype, x.shape, x.stride()) for x in copy), []).append(copy)
    for run in alike.values():
        run.sort(key=lambda copy: copy[0].storage_offset())
        while run:
            length, steps = regular(run)
            yield run[0] if length == 1 else joined_copy(run[0], length, steps)
            del run[:length]


def regular(run: Sequence[Copy]) -> tuple[int, tuple[int, int]]:
    """How many copies at the beginning of `run` follow at one distance, and this distance in target and source."""
    offsets = [(int(target.storage_offset()), int(source.storage_offset())) for target, source in run]
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(offsets)]
    if not steps or min(steps[0]) <= 0:
        return 1, (0, 0)
    return 1 + sum(1 for _ in takewhile(steps[0].__eq__, steps)), steps[0]


def joined_copy(first: Copy, length: int, steps: tuple[int, int]) -> Copy:
    target, source = (
        x.as_strided((length, *x.shape), (step, *x.stride())) for x, step in zip(first, steps, strict=True)
    )
    return target, source


def grouped(copies: Iterable[Copy]) -> list[Pairs]:
    """`_foreach_copy_` fuses only lists with one pair of dtypes and equal, dense strides."""
    groups: dict[tuple[Any, ...], Pairs] = {}
    for target, source in merged(copies):
        dense = target.is_contiguous() and source.is_contiguous()
        if dense:
            target, source = target.view(-1), source.view(-1)
        targets, sources = groups.setdefault((target.dtype, source.dtype, dense), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbours; overlapping spans stay: `(2, 4), (0, 2) -> (0, 4)`"""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start == found[-1][1]:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found
