"""Variable-length attention over packed documents, registered with transformers under our own names.

A microbatch is one row of tokens with the documents one after another; `cu_seq_lens_q` (where each document starts, and
the end) and `max_length_q` reach these functions as keyword arguments of the model's forward. transformers builds no
mask for names it has no mask function for, so no [tokens, tokens] mask ever exists. Used by `policy.py`; waits for
nothing.
"""

import importlib
import inspect
import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from configs.load import ConfigError

log = logging.getLogger(__name__)
PREFIX = "headrace_"
"""transformers takes a name that contains `flash` for one of its own kernels, and looks for a package of that name."""
AUTO = ("flash4", "flash", "varlen", "sdpa")
"""What `auto` tries, fastest first."""
PACKAGES = {
    "flash": ("flash-attn", "flash_attn.flash_attn_interface"),
    "flash4": ("flash-attn-4[cu13]", "flash_attn.cute"),
}
"""The package to install, and the module it provides."""
Attention = Callable[..., tuple[Tensor, None]]
"""As transformers calls it: tensors [1, heads, tokens, head_dim], the rest by keyword."""
GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""torch 2.11 accepts grouped heads without this argument, and does not know it."""


def registered(name: str) -> str:
    """The attention's name in transformers' registry. Example: `registered("flash4") == "headrace_fa4"`"""
    return PREFIX + name.replace("flash", "fa")


def choose(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The attention for `learner.attention`: `wanted`, or for `auto` the first that works here. Raises ConfigError.

    A `device` without an index is one that this process must not touch yet: its generation is not checked and no
    kernel is loaded.
    """
    if wanted == "auto":
        return next(name for name in AUTO if _unusable(name, device, dtype) is None)
    reason = _unusable(wanted, device, dtype)
    if reason is not None:
        raise ConfigError([f"learner.attention: {wanted} {reason}; use auto, or sdpa, which works everywhere"])
    return wanted


def _unusable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why attention `name` does not work here; None if it does."""
    if name == "sdpa":
        return None
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, and the learner is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs model.dtype bfloat16, and it is {str(dtype).removeprefix('torch.')}"
    if name in PACKAGES and not installed(name):
        return f"is not installed (pip install {PACKAGES[name][0]})"
    if name not in PACKAGES or device.index is None:
        return None
    if name == "flash4" and torch.cuda.get_device_capability(device) < (9, 0):
        return "needs a Hopper GPU or a later one"
    return _import_failure(PACKAGES[name][1])


@cache
def _import_failure(module: str) -> str | None:
    """Why an installed kernel does not load; None if it does. Logged, because `auto` skips it silently otherwise."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        problem = f"is installed and does not load ({type(error).__name__}: {error})"
        log.warning("learner.attention: %s %s", module, problem)
        return problem
    return None


def installed(name: str) -> bool:
    """Whether the kernel's package is installed. Both packages provide `flash_attn`, and either may be there alone."""
    return find_spec("flash_attn") is not None and find_spec(PACKAGES[name][1]) is not None


class Row(NamedTuple):
    """What a kernel knows of a row of documents and of the model besides query, key and value."""

    cu_seqlens: Tensor
    longest: int
    scale: float | None
    window: int | None

    def bounds(self, none: tuple[Any, Any]) -> tuple[Any, Any]:
        """The model's sliding window as (left, right) for the kernels; `none` if it has none."""
        return none if self.window is None else (self.window - 1, 0)


Kernel = Callable[[Tensor, Tensor, Tensor, Row], Tensor]
"""Causal attention of query, key and value [tokens, heads, head_dim]; key and value may have fewer heads."""


def adapt(kernel: Kernel) -> Attention:
    """`kernel` as an attention for transformers."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        scale, window = kwargs.get("scaling"), kwargs.get("sliding_window")
        return kernel(q, k, v, Row(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], scale, window))[None], None

    return attend


def flash(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """flash-attn's variable-length kernel."""
    from flash_attn import flash_attn_varlen_func  # an optional dependency, absent on CPU machines

    places = (row.cu_seqlens, row.cu_seqlens, row.longest, row.longest)
    window = row.bounds(none=(-1, -1))
    out: Tensor = flash_attn_varlen_func(q, k, v, *places, softmax_scale=row.scale, causal=True, window_size=window)
    return out


def flash4(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """FlashAttention 4, for Hopper and later."""
    from flash_attn.cute import flash_attn_varlen_func

    out: Tensor
    out, _ = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=row.cu_seqlens, cu_seqlens_k=row.cu_seqlens, max_seqlen_q=row.longest,
        max_seqlen_k=row.longest, softmax_scale=row.scale, causal=True, window_size=row.bounds(none=(None, None)),
    )  # fmt: skip
    return out


def varlen(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """torch's own variable-length kernel."""
    places = (row.cu_seqlens, row.cu_seqlens, row.longest, row.longest)
    out = varlen_attn(q, k, v, *places, scale=row.scale, window_size=row.bounds(none=(-1, 0)), **GQA)
    assert isinstance(out, Tensor)
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """torch's causal SDPA on [documents, longest], padded on the right inside attention only; works on any device.

    Needs no mask: in causal attention a real token never sees the padding to its right.
    """
    cu_seqlens, longest, scale, window = row
    if window is not None and longest > window:
        raise ValueError(f"learner.attention: sdpa knows no sliding window, the model has one of {window}; use varlen")
    position = torch.arange(longest, device=q.device)
    lengths = cu_seqlens.diff()
    real = position < lengths[:, None]
    index = cu_seqlens[:-1, None] + position.minimum(lengths[:, None] - 1)  # [documents, longest]
    q, k, v = (x[index].transpose(1, 2) for x in (q, k, v))  # [documents, heads, longest, head_dim]
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)[real]


ATTENTIONS = {name: adapt(kernel) for name, kernel in (("flash", flash), ("varlen", varlen), ("sdpa", sdpa))}
ATTENTIONS["flash4"] = torch.compiler.disable(adapt(flash4))  # it compiles itself

for _name, _attention in ATTENTIONS.items():
    AttentionInterface.register(registered(_name), _attention)
