"""Layers with a state whose kernels know the bounds of documents: a packed row is one call.

A delta rule needs a kernel with `cu_seqlens`, as flash-linear-attention has for GPUs; a short convolution gets zeros
between documents (`convolve`). `state.py` computes all other layers document by document. No CPU runs these kernels, so
`check` compares the first row on a GPU with transformers' torch functions.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from configs.load import ConfigError

CONVOLUTION = "causal_conv1d_fn"
RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
LAYERS = ("GatedDeltaNet", "DeltaAttention", "ShortConv")
"""Ends of the class names of layers that consist of such functions."""
SCANS = re.compile(r"chunk|_scan$")
"""transformers' functions over whole documents that are slow in torch."""
TRIED_BOUNDS = (0, 1, 70, 192)
"""Shorter and longer than a kernel's chunk of 64 tokens."""
TOLERANCES = {"output": 0.02, "gradient": 0.05}
"""Largest differences, relative to the norm. In bfloat16 rounding gives .004, a document that sees its neighbour .035
or more (`benchmarks/lab/delta_rules.py`).
"""
REMEDY = "uninstall flash-linear-attention: document by document, transformers' torch functions need none"
Function = Callable[..., Any]


def namespace(layer: nn.Module) -> dict[str, Any]:
    """The module where transformers looks up the layer's functions at each call."""
    return vars(sys.modules[type(layer).__module__])


def chosen(code: Mapping[str, Any]) -> dict[str, tuple[Function, Function]]:
    """transformers' torch functions by name, each with what is run in its place."""
    wrapped = {name: _enclosed(function) for name, function in code.items() if isinstance(function, FunctionType)}
    return {name: (inner["torch_function"], inner["implementation"]) for name, inner in wrapped.items() if inner}


@cache  # each layer of each pass asks again
def _enclosed(function: FunctionType) -> dict[str, Any]:
    """Variables of transformers' `use_kernel_func_from_hub_with_fallback` around its wrapper; else empty."""
    if "torch_function" not in function.__code__.co_freevars:
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


@cache
def _knows_bounds(rule: Function) -> bool:
    return "cu_seqlens" in inspect.signature(rule).parameters


def slow_because(layers: Iterable[nn.Module]) -> str | None:
    """Why `layers` take slow torch functions; None where kernels run."""
    missing = {}
    for layer in layers:
        for name, (torch_function, run) in chosen(namespace(layer)).items():
            if run is torch_function and SCANS.search(name):
                missing[type(layer).__name__] = _enclosed(namespace(layer)[name])["package"]
    lines = [f"{package} {_import_error(package)}" for package in sorted({*missing.values()})]
    return f"{', '.join(sorted(missing))}: {'; '.join(lines)}" if missing else None


def _import_error(package: str) -> str:
    try:
        importlib.import_module(package)
    except Exception as error:  # a package for GPUs may raise anything while it is imported
        return f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    return "has no such kernel"


@contextmanager
def replaced(layer: nn.Module, functions: Mapping[str, Function]) -> Iterator[None]:
    """Within it `layer` calls `functions` in place of those of the same names."""
    code = namespace(layer)
    before = {name: code[name] for name in functions}
    code.update(functions)
    try:
        yield
    finally:
        code.update(before)


def in_torch(layer: nn.Module) -> dict[str, Function]:
    """transformers' torch functions for `replaced`, whatever kernels are installed."""
    return {name: torch_function for name, (torch_function, _) in chosen(namespace(layer)).items()}


def takes_bounds(layer: nn.Module) -> bool:
    """Whether `within` serves this layer with the installed kernels."""
    code = namespace(layer)
    if not type(layer).__name__.endswith(LAYERS) or CONVOLUTION not in code:
        return False
    found = chosen(code)
    rules = [found[name][1] for name in RULES if name in code and name in found]
    return all(map(_knows_bounds, rules)) and (bool(rules) or type(layer).__name__.endswith("ShortConv"))


def within(layer: nn.Module, starts: Tensor) -> dict[str, Function]:
    """Functions for `replaced` that see documents alone. `starts`: [documents + 1] int32, 0 to the row's length."""
    code = namespace(layer)
    convolution, rules = code[CONVOLUTION], {name: code[name] for name in RULES if name in code}

    def bounded(rule: Function) -> Function:
        return lambda *args, **kwargs: rule(*args, **(kwargs | {"cu_seqlens": starts}))

    def convolved(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return convolve(convolution, x, weight, starts, *args, **kwargs)

    return {CONVOLUTION: convolved} | {name: bounded(rule) for name, rule in rules.items()}


def convolve(convolution: Function, x: Tensor, weight: Tensor, starts: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Convolve each document alone, with as many zeros in between as the convolution reaches back: [1, channels,
    tokens] to the same shape.
    """
    tokens, back = x.shape[-1], weight.shape[-1] - 1
    position = torch.arange(tokens, device=x.device)
    place = position + back * torch.searchsorted(starts[1:].contiguous(), position, right=True)
    spread = x.new_zeros(*x.shape[:-1], tokens + back * (len(starts) - 2)).index_copy(-1, place, x)
    output: Tensor = convolution(spread, weight, *args, **kwargs)
    return output.index_select(-1, place)


def check(layer: nn.Module, forward: Function, hidden: Tensor) -> None:
    """Compare kernels with torch functions on single documents, by output and its gradient by the input.

    `hidden`: [1, tokens, width], a real row. Raises ConfigError if they differ by more than TOLERANCES, or cannot run
    on this GPU.
    """
    tried = hidden[:, : TRIED_BOUNDS[-1]].detach()
    edges = [edge for edge in TRIED_BOUNDS if edge < tried.shape[1]] + [tried.shape[1]]
    starts = torch.tensor(edges, dtype=torch.int32, device=hidden.device)
    kernels = f"the installed kernels for {type(layer).__name__}"
    try:
        with replaced(layer, within(layer, starts)):
            ours = _with_gradient(lambda row: _output(forward(row)), tried)
    except (RuntimeError, ImportError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError([f"model.path: {kernels} fail: {' '.join(str(error).split())}; or {REMEDY}"]) from error

    def alone(row: Tensor) -> Tensor:
        return torch.cat([_output(forward(row[:, first:end])) for first, end in pairwise(edges)], 1)

    with replaced(layer, in_torch(layer)):
        wanted = _with_gradient(alone, tried)
    for (what, tolerance), a, b in zip(TOLERANCES.items(), ours, wanted, strict=True):
        difference = float((a - b).norm() / b.norm())
        if not difference <= tolerance:
            problem = f"the {what} of {kernels} differs by {difference:.3f} of its norm from each document alone"
            raise ConfigError([f"model.path: {problem}; update flash-linear-attention, or {REMEDY}"])


def _output(given: Any) -> Tensor:
    output: Tensor = given[0] if isinstance(given, tuple) else given
    return output


def _with_gradient(function: Callable[[Tensor], Tensor], row: Tensor) -> tuple[Tensor, Tensor]:
    """The output in float32, and the gradient by `row` of its weighted sum.

    Recomputed blocks must not see the tensors that are kept here.
    """
    with torch.enable_grad(), saved_tensors_hooks(_same, _same):
        row = row.clone().requires_grad_()
        output = function(row).float()
        weights = torch.linspace(-1, 1, output.numel(), device=row.device).view_as(output)
        (gradient,) = torch.autograd.grad((output * weights).sum(), row)
    return output.detach(), gradient.float()


def _same(tensor: Tensor) -> Tensor:
    return tensor
