"""Lets the compiler know all sizes of a block but the numbers of its tokens and documents.

A size that it does not know becomes a division of 64-bit numbers for each element. On an H200 the five kernels that
rotate queries and keys (RoPE) took 108 of the 1,654 ms of a step of the 1.5B shape so; to move their bytes takes 10.

- dynamo treats the integers of a module under FSDP, such as `head_dim`, as sizes that change, and those of other
  modules as constants. So compiled blocks lose dynamo's mark of FSDP, which FSDP itself does not read.
- transformers rotates [1, heads, tokens, head_dim], and its compiled code divides by the number of tokens. With tokens
  before heads it does not. The results have the same bits.

Without `forget_views` it compiles a block again whenever an input is a view of a tensor of another shape. This takes
7 s at 3 billion parameters.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from learner.model.kernels import operators

MOST_GRAPHS = 64
"""Beyond torch's own limit, 8, a block would run uncompiled."""
Rotation = Callable[..., Any]
ORDER = "unsqueeze_dim"
ROTATED = ("q", "k", "x")
"""Arguments of such a function that have heads: [batch, heads, tokens, head_dim]."""
WIDTH = 16
"""Numbers of a head in the comparison."""


def prepare(model: nn.Module) -> None:
    """Before blocks of `model` are compiled."""
    rotate_tokens_first(model)
    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    if (schemas := operators.schemas()) not in (tag := torch.compiler.config.cache_key_tag):
        torch.compiler.config.cache_key_tag = f"{tag} {schemas}"


def keep_integers(block: nn.Module) -> None:
    """After FSDP has marked the modules of `block`: their integers are constants for the compiler."""
    for module in block.modules():
        module._is_fsdp_managed_module = False  # type: ignore[assignment]


def forget_views(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook before a compiled block. It runs after FSDP's hook, which makes views of the block's inputs.

    For each view dynamo also checks the size and strides of its base. Bases differ between rows with and without
    images, and between the first block and the next.
    """
    return tree_map_only(Tensor, lambda given: _NoView.apply(given) if given._is_view() else given, (args, kwargs))  # type: ignore[no-untyped-call]


class _NoView(torch.autograd.Function):
    """Returns its input, in the same memory, as a tensor that is no view for autograd."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def rotate_tokens_first(model: nn.Module) -> None:
    """Replace the rotations in the modules of transformers that the classes of `model` come from."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        for key, function in list(vars(module).items()):
            if key.startswith("apply_") and "rotary_pos_emb" in key and callable(function) and fits(function):
                setattr(module, key, tokens_first(function))


def tokens_first(rotate: Rotation) -> Rotation:
    """Call `rotate` with tokens and heads swapped, unless it is asked for another order than its default. The compiler
    reads this function."""
    names = list(inspect.signature(rotate).parameters)
    places, order = [at for at, name in enumerate(names) if name in ROTATED], names.index(ORDER)

    @wraps(rotate)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        if len(args) > order or ORDER in kwargs:
            return rotate(*args, **kwargs)
        swapped = [swap(x) if at in places else x for at, x in enumerate(args)]
        named = {name: swap(x) if name in ROTATED else x for name, x in kwargs.items()}
        found = rotate(*swapped, **named, unsqueeze_dim=2)
        return swap(found) if isinstance(found, Tensor) else tuple(swap(each) for each in found)

    rotated.headrace_tokens_first = True  # type: ignore[attr-defined]
    return rotated


def swap(heads: Tensor | None) -> Tensor | None:
    return None if heads is None else heads.transpose(1, 2)


def fits(rotate: Rotation) -> bool:
    """Whether `rotate` has an argument for the order, is not replaced yet, and gives the same bits either way."""
    order = inspect.signature(rotate).parameters.get(ORDER)
    if order is None or order.default != 1 or hasattr(rotate, "headrace_tokens_first"):
        return False
    return any(is_same(rotate, example(rotate, width)) for width in (WIDTH, WIDTH // 2))


def is_same(rotate: Rotation, given: dict[str, Any]) -> bool:
    """Whether it takes these arguments, and gives the same bits in both orders."""
    try:
        theirs, ours = rotate(**given), tokens_first(rotate)(**given)
    except (TypeError, RuntimeError, ValueError):  # it wants other arguments
        return False
    return all(map(torch.equal, *((found,) if isinstance(found, Tensor) else found for found in (theirs, ours))))


def example(rotate: Rotation, width: int) -> dict[str, Any]:
    """Random arguments of `rotate`, as a block gives them, with `width` angles of a token."""
    names, source = inspect.signature(rotate).parameters, torch.Generator().manual_seed(0)
    sections = {"mrope_section": [width // 8, width // 8, width // 4]} if "mrope_section" in names else {}
    angles = torch.randn(*((3,) if sections else ()), 2, 5, width, generator=source)
    heads = {"q": 4, "k": 2, "x": 4}
    rotated = {
        name: torch.randn(2, 5, heads[name], WIDTH, generator=source).transpose(1, 2)
        for name in ROTATED
        if name in names
    }
    return {"cos": angles.cos(), "sin": angles.sin()} | rotated | sections
