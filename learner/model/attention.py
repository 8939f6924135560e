"""Variable-length attention over packed documents, registered with transformers under names for which it builds no
[tokens, tokens] mask.

The bounds of documents are arguments of the model's forward pass, or come from the block around a layer (`bounds.py`).
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig

from configs.architecture import MUTUAL
from configs.load import ConfigError
from learner.model import bounds, context
from learner.model.bounds import BOUNDS
from learner.model.idle_parts import sees
from learner.model.kernels import joined, tried
from learner.model.microbatch import CopiedPrompts, SharedPrompts
from learner.model.towers import ImageBlocks

log = logging.getLogger(__name__)
PREFIX = "headrace_"
"""transformers takes a name with `flash` for its own kernels, and looks for that package."""
NAMES = {"sdpa": "torch", "varlen": "varlen", "flash": "fa", "flash4": "fa4"}
"""A model with attention sinks refuses names that contain `sdpa`."""
TOWER = "_flash"
AUTO = ("flash4", "flash", "varlen", "sdpa")
PACKAGES = {
    "flash": ("flash-attn", "flash_attn.flash_attn_interface"),
    "flash4": ("flash-attn-4[cu13]", "flash_attn.cute"),
}
MOST_GATHERED = 0.5
"""Heads of a row's keys, with copies, over heads of queries: at 0.46 gathering was faster than a second call."""
LARGEST_HEAD = 256
OTHER_HEADS = ("linear_", "mamba_", "index")
"""Beginnings of keys: `linear_key_head_dim`, `mamba_head_dim`, `index_head_dim`."""
TREE_LAYERS = {"full_attention", "sliding_attention"}
ARGUMENTS = (
    "routing",  # of a block with experts
    *(*BOUNDS, "shared_prompts", "context_group", "image_blocks"),
    *("is_causal", "scaling", "sliding_window", "softcap", "s_aux", "dropout"),
    *("cu_seq_lens_k", "max_length_k"),  # in a vision tower
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"),
)
Attention = Callable[..., tuple[Tensor, None]]
"""Tensors are [1, heads, tokens, head_dim]."""


def registered(name: str) -> str:
    return PREFIX + NAMES[name]


def of_tower(name: str) -> str:
    """transformers calls an attention without `flash` in its name image by image, and waits for the GPU."""
    return registered("sdpa" if name == "sdpa" else "varlen") + TOWER  # no other kernel has been tried with 80 a head


def choose(wanted: str, device: torch.device, dtype: torch.dtype, config: PreTrainedConfig | None = None) -> str:
    """Take `wanted`, or for `auto` the first that works here and, with `config`, for this model. Raises ConfigError.

    A `device` without an index must not be touched yet: no kernel is loaded. One with an index tries the kernel, too.
    """

    def reason(name: str) -> str | None:
        problem = _unusable(name, device, dtype) or (_lacks(name, config) if config else None)
        return problem or (_fault(name, device, dtype, config) if config and device.index is not None else None)

    if wanted == "auto":
        return next(name for name in AUTO if reason(name) is None)
    if problem := reason(wanted):
        raise ConfigError([f"learner.attention: {wanted} {problem}; use auto, or sdpa, which works everywhere"])
    return wanted


def _lacks(name: str, config: PreTrainedConfig) -> str | None:
    text = config.get_text_config()
    if name == "sdpa":
        return None
    if cap := getattr(text, "attn_logit_softcapping", None):
        return f"does not compute the model's softcap of {cap:g}"
    widths = head_widths(text)
    if max(widths, default=0) > LARGEST_HEAD:
        return f"takes heads of {LARGEST_HEAD} numbers at most, and the model's have {max(widths)}"
    if name == "flash4" and (wrong := [width for width in widths if not has_gradients(width)]):
        return f"computes wrong gradients for heads of {wrong[0]} numbers"
    return None


def _fault(name: str, device: torch.device, dtype: torch.dtype, config: PreTrainedConfig) -> str | None:
    """Logged, because `auto` would skip it silently."""
    text = config.get_text_config()
    if name == "sdpa":
        return None
    shared = queries_of_a_key(text)
    windows = {None, *([min(tried.WINDOW, window)] if (window := getattr(text, "sliding_window", None)) else [])}
    for width, window in product(sorted(set(head_widths(text))), windows):
        if problem := tried.fault(name, device, dtype, tried.Heads(2 * shared, 2, width, window)):
            log.warning("learner.attention: %s %s", name, problem)
            return problem
    return None


def queries_of_a_key(text: PreTrainedConfig) -> int:
    """Heads of queries that share a head of keys; 1 with latent attention, and where a config has none or several."""
    heads = getattr(text, "num_attention_heads", None)
    keys = getattr(text, "num_key_value_heads", None) or heads
    if getattr(text, "qk_nope_head_dim", None) or not (isinstance(heads, int) and isinstance(keys, int)):
        return 1
    return heads // keys


def head_widths(text: PreTrainedConfig) -> list[int]:
    """Numbers of a head, of each kind that the config has. A narrower value is filled up with zeros."""
    if parts := getattr(text, "qk_nope_head_dim", None):
        return [max(parts + text.qk_rope_head_dim, text.v_head_dim)]
    own = getattr(vars(text).get("_heterogeneity_spec"), "per_layer_overrides", {}).values()
    values = [item for part in (vars(text), *own) for item in part.items()]
    sizes = [size for key, size in values if is_width(key) and isinstance(size, int)]
    heads = getattr(text, "num_attention_heads", 0)
    return sizes or ([text.hidden_size // heads] if heads else [])


def is_width(key: str) -> bool:
    """Whether `key` of a config is about heads of attention. Delta rules, state spaces and indexers have others, which
    no kernel of attention computes."""
    return key.endswith("head_dim") and not key.startswith(OTHER_HEADS)


def has_gradients(width: int) -> bool:
    """Whether flash4 computes the gradients of heads of `width` numbers. 4.0.0b36 on an H200, against float32: those of
    16, 40, 48, 72, 80 and 112 were off by their norm; 24, 32, 56, 64, 96, 128, 160, 192, 224 and 256 by .4 %."""
    return -(-width // 16) % 2 == 0


def _unusable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
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
    """Logged, because `auto` would skip it silently."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        problem = f"is installed and does not load ({type(error).__name__}: {error})"
        log.warning("learner.attention: %s %s", module, problem)
        return problem
    return None


def installed(name: str) -> bool:
    """Both packages provide `flash_attn`, and either may be alone."""
    return find_spec("flash_attn") is not None and find_spec(PACKAGES[name][1]) is not None


def most_copied(config: PreTrainedConfig) -> float:
    """Keys that a row may copy for short prompts, per token; negative: none."""
    text = config.get_text_config()
    heads: int = text.num_attention_heads
    return MOST_GATHERED * heads / (getattr(text, "num_key_value_heads", None) or heads) - 1


def why_unshared(config: PreTrainedConfig, name: str, device: torch.device, kept: Sequence[str] = ()) -> str | None:
    """Why attention `name` cannot share prompts of this model; None if it can."""
    text = config.get_text_config()
    if config.model_type in MUTUAL and sees(config):
        return "the tokens of an image see each other, and only causal attention can share a prompt"
    if kept:
        return f"the model has layers that keep a state ({', '.join(kept)}), and only full attention can share a prompt"
    if other := sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"}):
        return f"the model has layers of {', '.join(other)}, and only full attention can share a prompt"
    if window := getattr(text, "sliding_window", None):
        return f"the model has a sliding window of {window}, and only full attention can share a prompt"
    if name == "sdpa" and device.type != "cpu":
        return f"attention sdpa can share a prompt on CPU only, and the learner is on {device.type}"
    return None


def why_no_trees(config: PreTrainedConfig, name: str, device: torch.device, kept: Sequence[str] = ()) -> str | None:
    """Why attention `name` cannot share longer prefixes; None if it can. Sliding windows do not matter: all keys of a
    text are copied.
    """
    text = config.get_text_config()
    if kept:
        return f"the model has layers that keep a state ({', '.join(kept)})"
    if other := sorted(set(getattr(text, "layer_types", None) or ()) - TREE_LAYERS):
        return f"the model has layers of {', '.join(other)}"
    if name == "sdpa" and device.type != "cpu":
        return f"attention sdpa computes trees on CPU only, and the learner is on {device.type}"
    return None


def key_room(config: PreTrainedConfig, layers: int) -> float:
    """Memory of a copied key in attention's backward pass over that of a token.

    A copy takes key and value, their gradients, one of these in float32 and, with flash-attn, gradients for each head
    of queries. A token takes inputs of `layers` blocks and, in one block, three halves of the products with its width,
    without an MLP's, to be safe.
    """
    text: Any = config.get_text_config()
    own = getattr(text, "is_heterogeneous", False)
    every = [text.per_layer_config[i] for i in range(text.num_hidden_layers)] if own else [text]
    return max(_key_room(each, text.hidden_size, layers) for each in every)


def _key_room(config: Any, width: int, layers: int) -> float:
    heads: int = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        queries = keys = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    else:
        size: int = getattr(config, "head_dim", None) or width // heads
        queries, keys = heads * size, (getattr(config, "num_key_value_heads", None) or heads) * size
    token = layers * width + 3 * (queries + keys + width)
    room: float = (6 * keys + (2 * queries if queries > keys else 0)) / token
    return room


def adapt(name: str) -> Attention:
    """The kernel `name` for transformers: one call where no prompt is shared."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        _check_arguments(module, kwargs)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        starts, longest, shared, group = bounds.of_row(module, kwargs)
        sinks, heads = kwargs.get("s_aux"), q.shape[1]
        if group is not None:
            q, k, v = context.gathered(q, k, v, group)
            sinks = None if sinks is None else context.own_heads(sinks, group)
        out = _computed(name, module, (q, k, v, sinks), (starts, longest, shared), kwargs)
        if (blocks := kwargs.get("image_blocks")) is not None:
            out = _seen_both_ways(name, out, (q, k, v), blocks, kwargs)
        return (out if group is None else context.scattered(out, heads, group))[None], None

    return attend


def _computed(
    name: str,
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    places: tuple[Tensor, int, SharedPrompts | CopiedPrompts | None],
    kwargs: Mapping[str, Any],
) -> Tensor:
    (q, k, v, sinks), (starts, longest, shared) = inputs, places
    causal, window = kwargs.get("is_causal") is not False, kwargs.get("sliding_window")
    if window is not None and isinstance(shared, SharedPrompts):
        raise ValueError(f"learner.share_prompts: the model has a sliding window of {window}; set it to false")
    scale, softcap = kwargs.get("scaling") or q.shape[-1] ** -0.5, kwargs.get("softcap")
    if softcap is not None and name != "sdpa" and not q.is_meta:
        raise ValueError(f"{type(module).__name__} has a softcap, which learner.attention sdpa alone computes")
    if name == "sdpa" and shared is None and softcap is None and sinks is None:
        return sdpa(q, k, v, starts, longest, causal, scale, window)
    kernel = "plain" if name == "sdpa" and (softcap or window or not q.is_cpu) else name
    options = causal, scale, window, kernel
    width, widest = v.shape[-1], max(v.shape[-1], q.shape[-1])
    if name == "flash4" and not has_gradients(widest):
        raise ValueError(f"{type(module).__name__} has heads of {widest} numbers; set learner.attention to varlen")
    if width == q.shape[-1]:
        return joined.attention(q, k, v, starts, longest, shared, options, softcap, sinks)
    q, k, v = (_widened(x, widest) for x in (q, k, v))
    return joined.attention(q, k, v, starts, longest, shared, options, softcap, sinks)[..., :width]


def _seen_both_ways(
    name: str, out: Tensor, inputs: tuple[Tensor, Tensor, Tensor], blocks: ImageBlocks, kwargs: Mapping[str, Any]
) -> Tensor:
    """Tokens of images also see their whole image, within the sliding window."""
    q, k, v = inputs
    window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")
    kernel = "plain" if name == "sdpa" and (window or softcap or not q.is_cpu) else name
    options = False, kwargs.get("scaling") or q.shape[-1] ** -0.5, window, kernel
    seen = CopiedPrompts(blocks.keys, blocks.key_starts, blocks.longest_keys)
    places = q.index_select(0, blocks.places), k, v, blocks.starts, blocks.longest, seen
    own = joined.attention(*places, options, softcap, kwargs.get("s_aux"))
    return out.index_copy(0, blocks.places, own)


def _widened(x: Tensor, width: int) -> Tensor:
    """Zeros change no score; kernels take one size."""
    return pad(x, (0, width - x.shape[-1]))


def _check_arguments(module: nn.Module, given: Mapping[str, Any]) -> None:
    for name, argument in given.items():
        if argument is not None and name not in ARGUMENTS:
            raise ValueError(f"{type(module).__name__} has an attention with {name}, which the learner ignores")
    if given.get("dropout"):
        raise ValueError(f"{type(module).__name__} has dropout in its attention, which is random")


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool, scale: float, window: int | None
) -> Tensor:
    """torch's SDPA on [documents, longest], padded on the right: causally, no real token sees the padding."""
    position = torch.arange(longest, device=q.device)
    lengths = cu_seqlens.diff()
    real = position < lengths[:, None]
    index = cu_seqlens[:-1, None] + position.minimum(lengths[:, None] - 1)
    q, k, v = (x[index].transpose(1, 2) for x in (q, k, v))
    mask = None if causal else real[:, None, None]
    if causal and window is not None and longest > window:
        distance = position[:, None] - position
        mask, causal = (distance >= 0) & (distance < window), False
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # decided as a graph is made, not in it
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, **grouped)
    return out.transpose(1, 2)[real]


ATTENTIONS = {name: adapt(name) for name in NAMES}

for _name, _attention in ATTENTIONS.items():
    AttentionInterface.register(registered(_name), _attention)
    AttentionInterface.register(registered(_name) + TOWER, _attention)
