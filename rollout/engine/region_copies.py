"""Loads policies from the parts of weights that vLLM's loaders take for one worker.

`find` runs `model.load_weights` on tensors without values and notes the copied regions; the worker stages these
(`learner/weights/slices.py`), and `load` copies them on the current stream.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from learner.weights.plan import Spec
from learner.weights.slices import Region, Regions
from rollout.engine.recorded_copies import Pairs, Recorder, grouped, merged, storage

log = logging.getLogger(__name__)
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


@dataclass
class Loading:
    """How regions get into parameters at `addresses`."""

    addresses: list[int]
    targets: dict[Region, list[torch.Tensor]]
    fills: list[Callable[[], object]]
    """Further writes of the loaders, made once."""
    groups: dict[tuple[int, int], list[Pairs]] = field(default_factory=dict)


class RegionCopies:
    """Loads into `model`, which must load in place."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._loading: Loading | None = None
        self._again: Callable[[], Regions] = Regions

    def find(self, specs: Sequence[Spec], load: LoadWeights) -> Regions:
        """Return the regions that `load` copies; change no parameter."""
        self._again = lambda: self.find(specs, load)
        try:  # untouched pages of host memory, from which vLLM reads files too
            sources = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, shape, dtype in specs}
        except RuntimeError as error:
            return Regions(problem=f"no address space for tensors of this size: {error}")
        parameters = list(self._model.parameters())
        recorder = Recorder(sources.values(), parameters, dry=True)
        try:
            with torch.no_grad(), recorder:
                load(iter(sources.items()))
        except ValueError as error:  # a load of whole tensors raises it too
            return Regions(problem=str(error))
        problem = recorder.problem(parameters) or self._unequal(recorder)
        if problem:
            return Regions(problem=problem)
        names = {storage(source): name for name, source in sources.items()}
        targets: dict[Region, list[torch.Tensor]] = {}
        for target, source in merged(recorder.copies):
            region = Region(names[storage(source)], int(source.storage_offset()), tuple(source.shape), source.stride())
            targets.setdefault(region, []).append(target)
        self._loading = Loading([each.data_ptr() for each in parameters], targets, recorder.fills)
        return Regions(tuple(targets))

    def forget_staged(self) -> None:
        if self._loading:
            self._loading.groups.clear()

    @torch.no_grad()
    def load(self, staged: Sequence[tuple[Region, torch.Tensor]]) -> None:
        """Load all regions, or the trained ones. Raises ValueError if the loaders now take others."""
        loading = self._current({region for region, _ in staged})
        key = storage(staged[0][1]), len(staged)
        if key not in loading.groups:
            pairs = [(target, part) for region, part in staged for target in loading.targets[region]]
            loading.groups[key] = grouped(pairs)
        while loading.fills:
            loading.fills.pop()()
        for targets, sources in loading.groups[key]:
            torch._foreach_copy_(targets, sources)

    def _current(self, staged: set[Region]) -> Loading:
        assert self._loading is not None
        if self._loading.addresses != [each.data_ptr() for each in self._model.parameters()]:
            log.warning("weights: vLLM has moved parameters; the regions that it loads are looked for again")
            found = self._again()
            if found.problem or not staged <= set(found.found):
                raise ValueError(f"vLLM loads other parts of the weights than before: {found.problem or 'they moved'}")
        return self._loading

    def _unequal(self, recorder: Recorder) -> str:
        unequal = any(target.shape != source.shape for target, source in recorder.copies)
        return "some weights are copied into parameters of another shape" if unequal else ""
