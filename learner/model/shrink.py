"""Makes a small copy of a model's config: few, narrow layers, short windows and few experts.

It keeps classes, types and order of layers, ratios and sizes of heads.
"""

import copy
import re
from collections.abc import Hashable, Iterator, Set
from math import isqrt
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from configs.architecture import MUTUAL
from learner.model import idle_parts, loading
from learner.model.towers import tower_parts

GAIN = 3.0
"""A softcap of 50 affects such activations."""
TOWER_GAIN = 1.0
"""The text model enlarges a trained tower's differences of rounding."""
WINDOW = 8
VOCABULARY = 64
PLACEHOLDER, AROUND = 1, (2, 3)
"""Tokens of an image, and around one. No random text has the first."""
LARGEST = 200_000_000
SHORTER = re.compile("window|chunk|local|index_topk$")
"""Lengths that only affect longer documents."""
NARROWER = re.compile(r"(intermediate_size|ffn_hidden_size|ffn?_dim|dim_ff|feed_forward_size|dff)(_mlp)?$")
"""Widths between two matrices of a block."""
NARROW, NARROW_EXPERT = 64, 32
NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")
"""Names of parts of lists, such as experts."""
DEPTH = re.compile(r"^(num_hidden_layers|depth|num_layers|(encoder|decoder)_layers|encoder_depth)$")
HEADS = ("num_attention_heads", "num_heads", "attention_heads", "num_key_value_heads")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts")
MOST_EXPERTS, MOST_CHOSEN = 8, 2
INDICES = re.compile(r"_layer_indices$|_layer_ids$|_idxs$|^mlp_only_layers$")
DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")
"""Keys with the number of first blocks that have no experts."""
LESS = {"q_lora_rank": 48, "n_group": 2, "topk_group": 1, "mamba_n_groups": 1, "mamba_num_heads": 4, "n_groups": 2}
SAME = ("block_dim", "conv_dim", "conv_dim_out")
"""LFM2's files name the model's width several times, and vLLM reads those names."""
UNMOVED = ("A_log", "dt_bias", "D")
"""Vectors that a state space model cannot have at random."""
UNUSABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def small(config: PreTrainedConfig, trusted: bool = False) -> PreTrainedConfig:
    """Shrink a copy of `config` that has a block of each kind."""
    kinds = kinds_of_blocks(config, trusted)
    first = {kinds.index(kind) for kind in kinds}
    # some rules, such as an attention in each eighth block, count from the first block on
    for kept in (set[int](), first, set(range(1 + max(first, default=0)))):
        chosen = _shrunk(config, trusted, kept)
        if set(kinds) <= set(kinds_of_blocks(chosen, trusted)):
            break
    return chosen


def kinds_of_blocks(config: PreTrainedConfig, trusted: bool = False) -> list[Hashable]:
    """Return what each block consists of: names, classes and switches of its parts. Empty without a list of blocks, and
    for a config that transformers cannot build."""
    try:
        with torch.device("meta"):
            made = loading.auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trusted)
    except (StrictDataclassError, ImportError, *UNUSABLE):
        return []
    return [_kind_of(block) for block in loading.blocks(made)] if loading.has_blocks(made) else []


def _kind_of(block: nn.Module) -> Hashable:
    def switches(part: nn.Module) -> Iterator[Hashable]:
        for name, value in vars(part).items():
            if "window" in name:
                yield name, value is None
            elif isinstance(value, bool | str | None):
                yield name, value

    parts = ((name, part) for name, part in block.named_modules() if not NUMBERED.search(name))
    return tuple((name, type(part), tuple(switches(part))) for name, part in parts)


def _shrunk(config: PreTrainedConfig, trusted: bool, kept: Set[int]) -> PreTrainedConfig:
    """All widths stay where transformers cannot run a narrow model. `kept`: further blocks of the copy."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    own = _keep_each_kind(text, kept)
    for name, value in vars(text).items():
        if isinstance(value, int) and SHORTER.search(name) and value > WINDOW:
            setattr(text, name, WINDOW)
        elif type(value) is int and name in DENSE_FIRST:
            setattr(text, name, min(1, value))
        elif isinstance(value, int) and (name.endswith("vocab_size") or name == "vocab_size_per_layer_input"):
            setattr(text, name, min(VOCABULARY, value))
    for part in {id(each): each for each in (short, text)}.values():
        if isinstance(getattr(part, "pad_token_id", None), int):
            part.pad_token_id = 0
    narrow = copy.deepcopy(short)
    _narrow(narrow.get_text_config())
    _set_single_layers(narrow.get_text_config(), own)
    _set_single_layers(text, own, shrunk=False)
    if not idle_parts.nests_text(config):
        return narrow if _runs(narrow, trusted) else short
    if idle_parts.sees(narrow):
        for each in (narrow, short):
            each.image_token_id = PLACEHOLDER
            for name, token in zip(idle_parts.AROUND_KEYS[config.model_type in MUTUAL], AROUND, strict=True):
                setattr(each, name, token)
        if config.model_type in MUTUAL:
            _narrow_pooled_tower(narrow)
            _shrink_images(short)
        else:
            _narrow_tower(narrow.vision_config, narrow.get_text_config().hidden_size)
        return narrow if _runs(narrow, trusted) else short
    smaller = (_with_idle(each, narrowed) for each in (narrow, short) for narrowed in (True, False))
    return next((each for each in smaller if each is not None and _runs(each, trusted)), short)


def _keep_each_kind(text: Any, more: Set[int]) -> dict[int, dict[str, Any]]:
    """Keep the first two layers, one of each kind that the config lists, and `more`. Returns the values that single
    layers have in place of the config's own."""
    layers, shared = getattr(text, "num_hidden_layers", None), getattr(text, "num_kv_shared_layers", None) or 0
    if not isinstance(layers, int):
        return {}
    own: dict[int, dict[str, Any]] = getattr(vars(text).get("_heterogeneity_spec"), "per_layer_overrides", {})
    lists = {name: x for name, x in vars(text).items() if isinstance(x, list | tuple) and len(x) == layers}
    kinds = [
        (*(str(x[layer]) for x in lists.values()), repr(own.get(layer)), layer >= layers - shared)
        for layer in range(layers)
    ]
    kept = sorted({*range(min(2, layers)), *(kinds.index(kind) for kind in kinds), *more})
    if own:
        text.per_layer_config = None
    for name, values in lists.items():
        setattr(text, name, [values[layer] for layer in kept])
    for name, value in list(vars(text).items()):
        if name not in lists and INDICES.search(name) and isinstance(value, list | tuple):
            setattr(text, name, [at for at, layer in enumerate(kept) if layer in value])
    if text.num_hidden_layers != len(kept):  # some configs derive it from a list
        text.num_hidden_layers = len(kept)
    if shared:
        text.num_kv_shared_layers = sum(layer >= layers - shared for layer in kept)
    return {at: own[layer] for at, layer in enumerate(kept) if layer in own}


def _narrow(text: Any) -> None:
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int) and isinstance(getattr(text, "hidden_size", None), int):
        groups = getattr(text, "num_key_value_heads", None) or heads
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        pairs, each = min(groups, 2), min(heads // groups, 2)
        for name, value in (("num_attention_heads", pairs * each), ("num_key_value_heads", pairs)):
            if hasattr(text, name):
                setattr(text, name, value)
        text.hidden_size = pairs * each * size
    for name, value in list(vars(text).items()):
        if type(value) is not int:
            continue
        if NARROWER.search(name):
            setattr(text, name, min(value, NARROW_EXPERT if "moe" in name or "expert" in name else NARROW))
        elif name in (*EXPERTS, *CHOSEN):
            setattr(text, name, min(value, MOST_CHOSEN if name in CHOSEN else MOST_EXPERTS))
        elif name in LESS:
            setattr(text, name, min(value, LESS[name]))
    for name in SAME:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, text.hidden_size)
    _narrow_state(text)


def _set_single_layers(text: Any, own: dict[int, dict[str, Any]], shrunk: bool = True) -> None:
    if own:
        heads = {name: getattr(text, name) for name in ("num_attention_heads", "num_key_value_heads") if shrunk}
        text.per_layer_config = {
            at: {name: heads.get(name, value) for name, value in each.items()} for at, each in own.items()
        }


def _narrow_state(text: Any) -> None:
    keys, values = (getattr(text, f"linear_num_{which}_heads", None) for which in ("key", "value"))
    if isinstance(keys, int) and isinstance(values, int):
        text.linear_num_key_heads, text.linear_num_value_heads = 2, 2 * (values // keys)
    if isinstance(getattr(text, "linear_num_heads", None), int):
        text.linear_num_heads = 2
    if isinstance(given := getattr(text, "linear_attn_config", None), dict) and "num_heads" in given:
        text.linear_attn_config = given | {"num_heads": 2}
    size, expand = getattr(text, "mamba_d_head", None), getattr(text, "mamba_expand", None)
    if isinstance(size, int) and isinstance(expand, int):
        if isinstance(getattr(text, "mamba_d_ssm", None), int):
            text.mamba_d_ssm = expand * text.hidden_size
        width = expand * text.hidden_size
        if width % size:
            text.mamba_d_head = size = width // 4
        text.mamba_n_heads = width // size


def _narrow_tower(tower: PreTrainedConfig, width: int) -> None:
    tower.hidden_size, tower.num_heads = 2 * (tower.hidden_size // tower.num_heads), 2
    tower.depth, tower.intermediate_size, tower.out_hidden_size = 2, NARROW, width
    for name, block in (("fullatt_block_indexes", 1), ("deepstack_visual_indexes", 0)):
        if hasattr(tower, name):
            setattr(tower, name, [block])


def _narrow_pooled_tower(config: Any) -> None:
    tower = config.vision_config
    heads = tower.num_attention_heads
    tower.hidden_size, tower.num_attention_heads = 2 * (tower.hidden_size // heads), 2
    tower.num_hidden_layers, tower.intermediate_size = 2, NARROW
    _shrink_images(config)


def _shrink_images(config: Any) -> None:
    """Images get 2 x 2 tokens of as many patches as before: no window is shorter."""
    tower = config.vision_config
    merge = max(1, tower.image_size // tower.patch_size // isqrt(config.mm_tokens_per_image))
    config.mm_tokens_per_image, tower.image_size = 4, 2 * merge * tower.patch_size


def _with_idle(config: PreTrainedConfig, narrowed: bool) -> PreTrainedConfig | None:
    shrunk = copy.deepcopy(config)
    text = shrunk.get_text_config()
    for key in shrunk.sub_configs:
        if (part := getattr(shrunk, key)) is not None and part is not text:
            _shrink_idle(part, narrowed)
    try:  # some configs derive a part's sizes from another's when they are read
        return type(shrunk).from_dict(shrunk.to_dict())
    except (StrictDataclassError, *UNUSABLE):
        return None


def _shrink_idle(part: Any, narrowed: bool) -> None:
    heads = next((x for key in HEADS if isinstance(x := getattr(part, key, None), int)), 0)
    depths = {value for name, value in vars(part).items() if type(value) is int and DEPTH.search(name)}
    for name, value in list(vars(part).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink_idle(value, narrowed)
        elif isinstance(value, list | tuple) and len(value) in depths:
            setattr(part, name, value[:1])
        elif type(value) is int and DEPTH.search(name):
            setattr(part, name, min(value, 1))
        elif narrowed and type(value) is int and NARROWER.search(name):
            setattr(part, name, min(value, NARROW))
        elif narrowed and heads and type(value) is int and name in HEADS:
            setattr(part, name, 2)
        elif narrowed and heads and type(value) is int and name in ("hidden_size", "embed_dim", "d_model"):
            setattr(part, name, 2 * (value // heads))


def size_of(config: PreTrainedConfig, trusted: bool) -> int:
    with torch.device("meta"):
        made = loading.auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trusted)
    return int(made.num_parameters())


def _runs(config: PreTrainedConfig, trusted: bool) -> bool:
    try:
        if size_of(config, trusted) > LARGEST:
            return False
        made = loading.auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=trusted)
        with torch.no_grad():
            made.eval()(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False)
    except UNUSABLE:
        return False
    return True


def stir(model: PreTrainedModel) -> None:
    """Set random weights that make activations large; move norms, biases, sinks and buffers."""
    draw, parts = torch.Generator().manual_seed(1), tower_parts(model)
    seeing = {id(parameter) for parameter in parts.parameters} if parts is not None else set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() > 1:
                seen = id(parameter) in seeing
                gain, inputs = (TOWER_GAIN, parameter[0].numel()) if seen else (GAIN, parameter.shape[-1])
                parameter.copy_(noise * gain / inputs**0.5)
            elif name.rpartition(".")[2] not in UNMOVED:
                parameter.add_(0.3 * noise)
        kept = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in kept and buffer.is_floating_point():
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=draw))
