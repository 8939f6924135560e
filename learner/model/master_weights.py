"""Master weights in host memory, beside parameters in `model.dtype` on the GPU (`learner.cpu_offload: optimizer`).

Weights and the optimizer's two moments have one `host_memory` each, cut into portions, which `offloaded_adam.py` brings
to the GPU in turn.
"""

import logging
import mmap
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

log = logging.getLogger(__name__)
PORTION = 1 << 26
"""256 MiB in fp32, 5 ms over PCIe."""
ALIGNED = 64
"""Parameters begin at multiples, for vectorised copies and kernels."""
LOGGED = 1 << 28
KINDS = 3
SLOTS = 3
"""One portion arrives, one is updated, one leaves."""


def device_bytes(numbers: int, portion: int) -> int:
    """GPU memory of an optimizer's step over so many numbers of this rank."""
    return 4 * KINDS * SLOTS * min(numbers, portion)


class HeldSpan(NamedTuple):
    """Some of this rank's rows of a parameter, and their place in a portion."""

    parameter: int
    start: int
    size: int
    offset: int


def spans_of(sizes: Sequence[int], portion: int = PORTION) -> list[list[HeldSpan]]:
    """Lay parameters one behind the other, aligned, and cut that into portions.

    Example: `spans_of([5, 70], 128) == [[HeldSpan(0, 0, 5, 0), HeldSpan(1, 0, 64, 64)], [HeldSpan(1, 64, 6, 0)]]`
    """
    begins = _begins(sizes)
    found: list[list[HeldSpan]] = [[] for _ in range(-(-begins[-1] // portion))]
    for number, (size, begin) in enumerate(zip(sizes, begins, strict=False)):
        start = 0
        while start < size:
            index, offset = divmod(begin + start, portion)
            taken = min(size - start, portion - offset)
            found[index].append(HeldSpan(number, start, taken, offset))
            start += taken
    return found


def _begins(sizes: Sequence[int]) -> list[int]:
    return list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))


def host_memory(numbers: int, device: torch.device) -> Tensor:
    """`[numbers] float32` zeros, locked so that copies do not wait. Raises RuntimeError if locking fails.

    CUDA refuses copies across two locked pieces, so one call locks all. torch's own pinned memory takes up to twice as
    much.
    """
    if device.type != "cuda" or not numbers:
        return torch.zeros(numbers)
    began = time.monotonic()
    pages = mmap.mmap(-1, 4 * numbers, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.float32).zero_()  # touches the pages
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if memory.nbytes >= LOGGED:
        log.info("%.1f GiB of host memory locked in %.1f s", memory.nbytes / 2**30, time.monotonic() - began)
    return memory


def unlock(memory: Tensor, device: torch.device) -> None:
    """Unlock early: locked addresses cannot be locked again."""
    if device.type == "cuda" and memory.numel():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the trained parameters of `model`, on meta."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


class MasterWeights:
    """This rank's rows of all trained parameters."""

    def __init__(self, model: nn.Module, device: torch.device, portion: int = PORTION) -> None:
        self._model, self.device, self.portion = model, device, portion
        sizes = [rows_of(parameter).numel() for parameter in self.parameters]
        self.spans, self._begins = spans_of(sizes, portion), _begins(sizes)
        self.values = self.memory()
        named = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
        self._views = dict(zip(named, self.views(self.values), strict=True))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def memory(self) -> Tensor:
        return host_memory(self._begins[-1], self.device)

    def views(self, memory: Tensor) -> list[Tensor]:
        rows = [rows_of(parameter) for parameter in self.parameters]
        return [
            memory[begin : begin + own.numel()].view(own.shape) for begin, own in zip(self._begins, rows, strict=False)
        ]

    def as_sharded(self, memory: Tensor) -> list[Tensor]:
        """As a checkpoint holds them."""
        return [_like(parameter, rows) for parameter, rows in zip(self.parameters, self.views(memory), strict=True)]

    @torch.no_grad()
    def keep(self, name: str, rows: Tensor) -> None:
        self._views[name].copy_(rows)

    @torch.no_grad()
    def to_device(self) -> None:
        for parameter, rows in zip(self.parameters, self.views(self.values), strict=True):
            rows_of(parameter).copy_(rows)

    def in_place_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """The model's `state`, with master weights for the rounded ones."""
        masters = dict(zip(map(id, self.parameters), self.as_sharded(self.values), strict=True))
        every = dict(self._model.named_parameters(remove_duplicate=False))  # a tied head is in a state twice
        return {name: masters.get(id(every.get(name)), value) for name, value in state.items()}


def rows_of(parameter: Tensor) -> Tensor:
    """This rank's rows of a parameter or gradient: a view."""
    found = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return found.detach()


def _like(parameter: nn.Parameter, rows: Tensor) -> Tensor:
    """`DTensor.from_local` would bring them to the GPU."""
    if not isinstance(parameter, DTensor):
        return rows
    size = TensorMeta(parameter.shape, parameter.stride(), rows.dtype)
    return DTensor(rows, DTensorSpec(parameter.device_mesh, parameter.placements, size), requires_grad=False)


def keep_wide_gradients(root: FSDPModule, parameters: Iterable[nn.Parameter]) -> None:
    """Have gradients of narrower `parameters` add up in fp32.

    FSDP2 gives gradients their parameters' dtype, noted when it is initialised.
    """
    root._get_fsdp_state()._lazy_init()
    for module in root.modules():  # type: ignore[attr-defined]
        for group in _groups_of(module) if isinstance(module, FSDPModule) else ():
            if group._orig_dtype is not None:
                group._orig_dtype = torch.float32
    for parameter in parameters:
        parameter.grad_dtype = torch.float32


def _groups_of(module: FSDPModule) -> list[Any]:
    """Until torch 2.12 a module had at most one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] * bool(state._fsdp_param_group) if groups is None else list(groups)
