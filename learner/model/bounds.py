"""Notes the bounds of rows for layers: some of transformers' blocks do not hand them on, and layers that keep a state
take none.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from learner.model.microbatch import CopiedPrompts, SharedPrompts

BOUNDS = ("cu_seq_lens_q", "max_length_q")
"""Arguments without which a row is one document."""
NOTED = "_row_bounds"
RowBounds = tuple[Tensor, int, SharedPrompts | CopiedPrompts | None, str | None]
"""`cu_seqlens`, `max_seqlen`, `shared` of a `Microbatch`; the context group."""


class Bounds:
    """The bounds of the row that a block computes; None before its first row."""

    def __init__(self) -> None:
        self.row: RowBounds | None = None

    def note(self, block: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.row = _given(kwargs)
        if self.row is None:
            raise ValueError(
                f"{type(block).__name__} is not given {' and '.join(BOUNDS)}, the bounds of a row's documents"
            )


def follow(blocks: Iterable[nn.Module]) -> None:
    """Have each block note bounds for its layers."""
    for block in blocks:
        noted = Bounds()
        block.register_forward_pre_hook(noted.note, with_kwargs=True)
        for layer in block.modules():
            layer.__dict__[NOTED] = noted


def of_row(layer: nn.Module, given: Mapping[str, Any]) -> RowBounds:
    """The bounds `given` to a layer, else those that its block noted. Raises ValueError if there are none."""
    return _given(given) or _noted(layer)


def _given(kwargs: Mapping[str, Any]) -> RowBounds | None:
    if not all(name in kwargs for name in BOUNDS):
        return None
    return kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("shared_prompts"), kwargs.get("context_group")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled block would be compiled anew for each row
def _noted(layer: nn.Module) -> RowBounds:
    noted: Bounds | None = layer.__dict__.get(NOTED)
    if noted is None or noted.row is None:
        raise ValueError(_missing(layer))
    return noted.row


def _missing(module: nn.Module) -> str:
    return f"{type(module).__name__} is not given {' and '.join(BOUNDS)}, the bounds of a row's documents"
