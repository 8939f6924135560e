"""The initial model: built on the meta device, then filled with weights sharded over the ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from configs.architecture import MUTUAL, PROVEN
from configs.load import ConfigError
from configs.model_sizes import oversized
from configs.schema import ModelConfig
from learner.model import bounds, state
from learner.model.experts.mixture import IMPLEMENTATION, has_experts
from learner.model.idle_parts import TEXT_ALONE, nests_text, sees
from learner.model.master_weights import MasterWeights, rows_of
from learner.model.towers import tower_parts
from learner.model.untrained import keep_vectors, make_buffers

Initial = Callable[[str, torch.Size], Tensor]
"""(name, shape) -> the parameter at version 0."""
ADAPTER = ("lora_A", "lora_B")
VALUE_HEAD = "value_head"
"""No file has it."""

WRONG_VALUES = (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError)
"""transformers raises these for wrong or contradicting values."""


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """Read the model's config. Raises ConfigError."""
    try:
        wrong = list(oversized(PreTrainedConfig.get_config_dict(model.path)[0]))
        config = None if wrong else AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (ValueError, OSError) as error:
        if "trust_remote_code" in str(error) and not model.trust_remote_code:
            remedy = "read that code and set model.trust_remote_code: true, or take another model"
            raise ConfigError([f"model.path: {model.path}: it needs Python code of its own; {remedy}"]) from None
        raise ConfigError([f"model.path: {model.path}: {str(error).splitlines()[0]}"]) from None
    except WRONG_VALUES as error:
        problem = f"model.path: {model.path}: config.json has a value that transformers refuses"
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError([f"{problem} ({why}); correct it"]) from None
    if wrong:
        raise ConfigError([f"model.path: {model.path}: {line}" for line in wrong])
    assert isinstance(config, PreTrainedConfig)
    if model.text_alone:
        setattr(config, TEXT_ALONE, True)
    return config


def build_on_meta(model: ModelConfig, attention: str) -> PreTrainedModel:
    """The model without storage, in fp32 and training mode."""
    return build(read_config(model), attention, torch.device("meta"), model.trust_remote_code)


def build(config: PreTrainedConfig, attention: str, device: torch.device, trusted: bool) -> PreTrainedModel:
    """Build a model in fp32 and training mode, without dropout. Changes `config`."""
    switch_off_dropout(config)
    if has_experts(config):
        config.get_text_config()._experts_implementation = IMPLEMENTATION
    with device:
        empty = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation=_attentions(config, attention), trust_remote_code=trusted
        )
    assert isinstance(empty, PreTrainedModel)
    empty.train()
    keep_vectors(empty)
    if config.model_type not in PROVEN and has_blocks(empty):
        bounds.follow(blocks(empty))
        state.separate(blocks(empty))
        if config.model_type in MUTUAL and (seeing := tower_parts(empty)):
            bounds.follow(seeing.blocks)
    return empty


def switch_off_dropout(config: PreTrainedConfig) -> None:
    """Set rates of dropout and jitter to 0: log-probabilities would be random."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            switch_off_dropout(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)


def _attentions(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """`attention` is causal; a tower gets its own in `vision.py`."""
    if not nests_text(config):
        return attention
    text, other = config.get_text_config(), "sdpa" if sees(config) else "eager"
    return {"": other} | {key: attention if getattr(config, key) is text else other for key in config.sub_configs}


def auto_class(config: Any) -> Any:
    """transformers' class that builds all parts of a model."""
    if getattr(config, "vision_config", None) is not None:
        return AutoModelForImageTextToText
    multimodal = (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def persistent_buffers(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Buffers in the model's files, by name; most models have none."""
    return [
        (f"{name}.{key}".removeprefix("."), buffer)
        for name, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    ]


def has_blocks(model: PreTrainedModel) -> bool:
    """Whether the decoder lists its blocks as `layers`."""
    return isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList)  # type: ignore[no-untyped-call]


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    if not has_blocks(model):
        raise ValueError(
            f"model.path: {type(model).__name__} has no decoder.layers; take a model that lists its blocks there"
        )
    return list(model.get_decoder().layers)  # type: ignore[no-untyped-call]


def all_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that are sharded separately: blocks of the model and of a tower."""
    seeing = tower_parts(model)
    return [*(seeing.blocks if seeing else ()), *blocks(model)]


def distribute_weights(
    empty: PreTrainedModel,
    model: ModelConfig,
    device: torch.device,
    offload: bool,
    initial: Initial,
    masters: MasterWeights | None = None,
) -> None:
    """Fill `empty`, sharded and on meta, with weights that rank 0 reads, tensor by tensor; a collective.

    `initial` gives an adapter's weights; a critic's head is zeros. `masters` keep trained weights before they are
    rounded.
    """
    source = _read(model, empty) if dist.get_rank() == 0 else {}
    first_name = {id(parameter): name for name, parameter in empty.named_parameters()}
    filled: dict[str, nn.Parameter] = {}
    for name, parameter in empty.named_parameters(remove_duplicate=False):
        first = first_name[id(parameter)]  # tied weights stay one parameter
        if first not in filled:
            assert isinstance(parameter, DTensor)
            given = initial(first, parameter.shape) if first.endswith(ADAPTER) else source.get(first)
            given = torch.zeros(parameter.shape) if first.endswith(VALUE_HEAD) else given
            wide = torch.float32 if masters and parameter.requires_grad else parameter.dtype
            like: dict[str, Any] = {"dtype": wide, "device": device}
            full = torch.empty(parameter.shape, **like) if given is None else given.to(device).to(wide)
            shard: torch.Tensor = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            if masters and parameter.requires_grad:
                masters.keep(first, rows_of(shard))
                shard = shard.to(parameter.dtype)
            filled[first] = nn.Parameter(shard.cpu() if offload else shard, requires_grad=parameter.requires_grad)
        filled[name] = filled[first]
    empty.load_state_dict(filled, strict=False, assign=True)
    for name, buffer in list(empty.named_buffers()):
        full = source[name].to(device, buffer.dtype) if source else torch.empty_like(buffer, device=device)
        dist.broadcast(full, src=0)
        owner, _, leaf = name.rpartition(".")
        module = empty.get_submodule(owner)
        module.register_buffer(leaf, full, persistent=leaf not in module._non_persistent_buffers_set)


def read_whole(model: ModelConfig, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Raises ConfigError for weights that the model's files lack or have in another shape, which transformers would
    make up, for tensors that no layer has, such as scales of quantised weights, which it would leave out, and for a
    head of its own where config.json ties it, which it would not tie."""
    config, trusted = read_config(model), model.trust_remote_code
    how: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    read, found = auto_class(config).from_pretrained(model.path, dtype=dtype, trust_remote_code=trusted, **how)
    assert isinstance(read, PreTrainedModel)
    if wrong := [*_unfit_weights(found), *_left_out(read, found), *_untied(read)]:
        again = "correct config.json or download the model again"
        raise ConfigError([f"model.path: {model.path}: {line}; {again}" for line in wrong])
    return read


def _unfit_weights(found: dict[str, Any]) -> Iterator[str]:
    if missing := sorted(found["missing_keys"]):
        yield f"its files lack {len(missing)} weights of the model in config.json, such as {missing[0]}"
    for name, there, wanted in sorted(found["mismatched_keys"], key=lambda each: str(each[0]))[:1]:
        yield f"its files have {name} of shape {list(there)}, and config.json describes {list(wanted)}"


def _left_out(read: PreTrainedModel, found: dict[str, Any]) -> Iterator[str]:
    layers = {name for name, module in read.named_modules() if name and _may_lack(module)}
    computed = {name for name, _ in read.named_buffers()}
    keys = {str(key) for key in found["unexpected_keys"]} - computed
    if others := sorted(key for key in keys if key.rpartition(".")[0] in layers):
        yield f"its files have {len(others)} tensors of layers that have none such in config.json, such as {others[0]}"


def _untied(read: PreTrainedModel) -> Iterator[str]:
    for name, tied in read.get_expanded_tied_weights_keys(all_submodels=True).items():
        if read.get_parameter(name) is not read.get_parameter(tied):
            yield f"its files have {name}, which differs from {tied}, and config.json ties the two"


def _may_lack(module: nn.Module) -> bool:
    """Whether the module may lack a tensor that the files have. Modules with buffers alone, such as rotary embeddings,
    are computed from the config."""
    if next(module.children(), None) is not None:
        return False
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is None


def _read(model: ModelConfig, empty: PreTrainedModel) -> dict[str, Tensor]:
    with _in_float32(type(empty), [name for name, _ in persistent_buffers(empty)]):
        read = read_whole(model)
    return {name: x.detach() for name, x in [*read.named_parameters(), *read.named_buffers()]}


def read_base(model: ModelConfig) -> PreTrainedModel:
    """Read a model as the learner holds the base of an adapter: frozen parameters in `model.dtype`, and persistent
    buffers with all their bits. Raises as `read_whole`."""
    empty, dtype = build_on_meta(model, "eager"), getattr(torch, model.dtype)
    names = [name for name, _ in persistent_buffers(empty)]
    with _in_float32(type(empty), names):
        read = read_whole(model, dtype)
    held = dict(read.named_parameters())
    make_buffers(read, [name for name in names if name in held])
    for parameter in read.requires_grad_(False).parameters():
        parameter.data = parameter.data.to(dtype)
    return read


@contextmanager
def _in_float32(kind: type[PreTrainedModel], names: Sequence[str]) -> Iterator[None]:
    """transformers rounds what it reads of bfloat16 models, but for names in this list."""
    before = kind._keep_in_fp32_modules_strict
    kind._keep_in_fp32_modules_strict = [*(before or ()), *names]
    try:
        yield
    finally:
        kind._keep_in_fp32_modules_strict = before


def init_random(
    empty: PreTrainedModel, device: torch.device, shards: int, masters: MasterWeights | None = None
) -> None:
    """Each rank makes its own shard, equal in all replicas; for benchmarks."""
    empty.to_empty(device=device)
    for part in empty.modules():  # a tower has a class of its own
        if isinstance(part, PreTrainedModel):
            for module in part.modules():  # angles of RoPE, scales of embeddings
                if next(module.buffers(recurse=False), None) is not None:
                    part._init_weights(module)
    spread = getattr(empty.config.get_text_config(), "initializer_range", 0.02)
    generator = torch.Generator(device).manual_seed(dist.get_rank() % shards)
    with torch.no_grad():
        for name, parameter in empty.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.dim() > 1:
                local.normal_(0.0, spread, generator=generator)
            else:
                local.fill_(name.endswith("weight"))
            if masters and parameter.requires_grad:
                masters.keep(name, local)
