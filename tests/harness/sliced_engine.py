"""An engine whose workers load as vLLM's do with tensor parallelism: each takes rows of some weights, columns of
others, and stages what it takes. Its copies are found and made by the code that vLLM's workers run."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from learner.weights.plan import Spec
from learner.weights.receiver.staging import Staging
from learner.weights.slices import Region, Regions
from rollout.engine.region_copies import RegionCopies
from tests.harness.weights_server import FROZEN_VERSION, SPECS, DyingEngine, StagingEngine, weight


class ParallelModel(torch.nn.Module):
    """Worker `worker` of `workers`. Rows: of the embedding, padded to an equal number, of `big`, and of two layers that
    share a parameter. Columns: of the layers behind them. All else whole."""

    def __init__(self, specs: Sequence[Spec], worker: int, workers: int) -> None:
        super().__init__()
        self.worker, self.workers, self.specs = worker, workers, {spec.name: spec for spec in specs}
        self.values = {name: torch.zeros(self._shape(spec), dtype=spec.dtype) for name, spec in self.specs.items()}
        self.joined = dict[str, torch.Tensor]()
        for first, second in self.pairs():
            rows = len(self.values[first])
            both = torch.zeros(rows + len(self.values[second]), *self.values[first].shape[1:], dtype=torch.bfloat16)
            self.values[first], self.values[second] = both[:rows], both[rows:]
            self.joined[first] = both
        for name, value in self.values.items():
            if not any(name in pair for pair in self.pairs()):
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(value, requires_grad=False))
        for name, value in self.joined.items():
            self.register_parameter(f"{name}_and".replace(".", "_"), torch.nn.Parameter(value, requires_grad=False))

    def pairs(self) -> list[tuple[str, str]]:
        return [("layer.0", "layer.1")] if {"layer.0", "layer.1"} <= set(self.specs) else []

    def _kind(self, name: str) -> str:
        if name in ("layer.2", "layer.4"):
            return "columns"
        return "rows" if name in ("embed", "big", "layer.0", "layer.1", "frozen") else "whole"

    def _shape(self, spec: Spec) -> tuple[int, ...]:
        rows, *others = spec.shape
        kind = self._kind(spec.name)
        if kind == "columns":
            return rows, others[0] // self.workers
        return (-(-rows // 64) * 64 // self.workers if kind == "rows" else rows), *others

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this worker takes of `tensor`, the weight `name`."""
        size, kind = self._shape(self.specs[name]), self._kind(name)
        if kind == "whole":
            return tensor
        if kind == "columns":
            return tensor.narrow(1, self.worker * size[1], size[1])
        return tensor[self.worker * size[0] : (self.worker + 1) * size[0]]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            part, target = self.part(name, tensor), self.values[name]
            target[: len(part)].copy_(part)
            if len(part) < len(target):
                target[len(part) :].fill_(0)
            loaded.add(name)
        return loaded

    def holds(self, version: int, frozen: Collection[str] = ()) -> bool:
        """Whether all parameters have the values that `load_weights` of the whole weights would give them."""
        wanted = ParallelModel(list(self.specs.values()), self.worker, self.workers)
        wanted.load_weights(
            (name, weight(spec, FROZEN_VERSION if name in frozen else version)) for name, spec in self.specs.items()
        )
        return all(torch.equal(a, b) for a, b in zip(self.parameters(), wanted.parameters(), strict=True))


def dirty(model: ParallelModel) -> None:
    """Values that no load may leave, as vLLM's dummy weights."""
    for parameter in model.parameters():
        parameter.data.fill_(7.0)


class SlicedWorkers:
    """The part of a fake engine that stages slices: mixed in before it."""

    workers = 2
    specs: list[Spec]
    device: torch.device

    def slice_up(self: Any, workers: int, specs: Sequence[Spec], staging: type[Staging] = Staging) -> None:
        self.specs, self.workers = list(specs), workers
        self.models = [ParallelModel(specs, worker, workers) for worker in range(workers)]
        self.copies = [RegionCopies(model) for model in self.models]
        for model in self.models:
            dirty(model)
        self.staging = [
            staging(self.device, worker, self.loader(worker), self.finder(worker)) for worker in range(workers)
        ]
        self.weights = [{} for _ in range(workers)]

    def finder(self: Any, worker: int) -> Any:
        def find(specs: Sequence[Spec], frozen: Collection[str]) -> Regions:
            return self.copies[worker].find(specs, self.models[worker].load_weights)

        return find

    def rl_prepare(self: Any, worker: int, welcome: bytes, staging: str) -> tuple[str, str, str]:
        self.copies[worker].forget_staged()
        return self.staging[worker].prepare(welcome, staging)

    def rl_load(self: Any, worker: int, version: int) -> None:
        if self.staging[worker].mode != "slices":
            self.loader(worker)(self.staging[worker].weights(version))
            return
        staged: list[tuple[Region, torch.Tensor]] = self.staging[worker].slices(version)
        self.loads.append([region.name for region, _ in staged])
        self.copies[worker].load(staged)

    def loader(self: Any, worker: int) -> Any:
        def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            self.loads.append([])
            self.models[worker].load_weights(weights)

        return load

    def holds(self: Any, version: int) -> bool:
        return all(model.holds(version, self.staging[0].frozen) for model in self.models)


class SlicedEngine(SlicedWorkers, StagingEngine):
    """`workers` workers that stage only what they load."""

    def __init__(self, workers: int = 2, specs: Sequence[Spec] = SPECS) -> None:
        StagingEngine.__init__(self, workers)
        self.slice_up(workers, specs)


class DyingSlicedEngine(SlicedWorkers, DyingEngine):
    """A `DyingEngine` of two workers that stage slices."""

    def __init__(self, mode: str, device: str = "cpu") -> None:
        DyingEngine.__init__(self, mode, device)
        self.slice_up(2, SPECS, type(self.staging[0]))
