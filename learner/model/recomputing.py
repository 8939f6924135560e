"""Chooses activations that the backward pass computes again (`learner.activation_checkpointing`)."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from learner.model import loading
from learner.model.host_copies import HostCopies

aten = torch.ops.aten
SAVED_OPS = [
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default),
    *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default),
    *(aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_cudnn_attention.default),
    torch.ops.headrace.attend.default,
]
"""Recomputing these is expensive."""


def recompute(model: PreTrainedModel, way: str | int, compiled: bool = False) -> None:
    """Have blocks recompute by `way`, a value of `learner.activation_checkpointing`. Compiled blocks are selective by
    themselves: the compiler recomputes what is cheap. A number: the first so many blocks recompute, because the
    backward pass comes to them last, when the activations of all others are gone; the others and a tower keep theirs.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if way == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED_OPS)
    if way in ("auto", "block", "offload") or isinstance(way, int) or ("context_fn" in options and not compiled):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.disable_input_require_grads()  # or a frozen tower would be differentiated down to its patches
    if way == "offload":
        copies = HostCopies()
        for block in loading.blocks(model):
            block._gradient_checkpointing_func = copies.checkpoint  # type: ignore[assignment]
    chosen = {id(block) for block in loading.blocks(model)[:way]} if isinstance(way, int) else None
    for block in loading.all_blocks(model):
        frozen = not any(parameter.requires_grad for parameter in block.parameters())  # it keeps nothing
        if frozen or (chosen is not None and id(block) not in chosen):
            block.gradient_checkpointing = False  # type: ignore[assignment]
