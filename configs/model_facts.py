"""Facts of a model read from its folder without loading it. Nothing is known of a model given by its hub name."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from configs.architecture import (
    LAYER_KEYS,
    MUTUAL,
    is_proven,
    malformed,
    reads_images,
    text_config,
    trains_text_alone,
    unserved,
    unsupported,
    usable_positions,
)
from configs.model_folder import header_of, weight_files
from configs.model_sizes import oversized
from configs.schema import ModelConfig

TOWER = re.compile(r"\.(visual|vision_tower|multi_modal_projector)\.")
"""Names of weights that read images."""
TEXT_PARTS = re.compile(
    r"(^|\.)(language_model|text_model|text_decoder|lm_head)\.|^(model\.)?(layers|embed_tokens|norm)\."
)
"""Names of the text model's weights in multimodal models."""
UNREAD = "mtp."
"""transformers leaves out these weights of Qwen3.5, which predict further tokens."""
LINEAR = re.compile(r"\.layers\.\d+\.(?!.*\.experts\.|mlp\.gate\.)(?:.*\.)?(\w+)\.weight$")
"""A block's weight, without routers and experts, and the last word of its layer's name."""
BYTES = {"bfloat16": 2, "float32": 4}
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""transformers writes Qwen3-MoE's under the third key."""
SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one folder, None where unknown."""

    parameters: int | None = None
    heads: int | None = None
    positions: int | None = None
    tower: int | None = None
    """Parameters of the vision tower."""
    linear: Mapping[str, int] = field(default_factory=dict)
    """Rows plus columns of the text blocks' linear layers, by the last word of their names."""
    kind: str | None = None
    experts: int = 0
    route_bytes: int = 0
    """The experts chosen for one token (`Sample.routes`)."""
    kv_heads: int | None = None
    kv_numbers: int | None = None
    """Keys and values of one token; None if not every layer attends to the whole sequence."""
    unsupported: tuple[str, ...] = ()
    """Why the learner would not train it exactly."""
    unserved: tuple[str, ...] = ()
    """Why vLLM would not compute what transformers does."""
    head_size: int | None = None
    vocabulary: int | None = None
    routed: tuple[int, int] | None = None
    """Layers with experts, and the experts of a token in each."""
    image_token: int | None = None
    """None for a model whose images are not trained."""
    idle: int = 0
    """Parameters beside the text model, if that alone is trained."""
    proven: bool = False
    delta_rule: bool = False
    text_alone: bool = False
    mutual: bool = False
    """Tokens of an image see each other, later ones too."""

    @property
    def queries_and_keys(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values; 0 where they are not known."""
        return self.heads or 0, self.kv_heads or self.heads or 0

    def adapter_parameters(self, model: ModelConfig) -> int | None:
        assert model.lora is not None
        wanted = self.linear if model.lora.targets == "all" else model.lora.targets
        return model.lora.rank * sum(self.linear.get(name, 0) for name in wanted) or None

    def saved_parameters(self, model: ModelConfig) -> int | None:
        return self.adapter_parameters(model) if model.lora else self.parameters

    def sent_bytes(self, model: ModelConfig) -> int:
        """Bytes of the servers' copies on all ranks together: two of trained weights, one of frozen weights. With an
        adapter only the adapter is sent."""
        frozen = self.idle + ((self.tower or 0) if "vision" in model.freeze else 0)
        saved = self.saved_parameters(model) or 0
        return BYTES[model.dtype] * (2 * saved - frozen * (not model.lora))

    def state_bytes(self, model: ModelConfig) -> int:
        """Weight, gradient and two moments in float32 of what is trained; the rest is in `model.dtype`, or in float32
        without an adapter."""
        frozen = (self.parameters or 0) * BYTES[model.dtype] if model.lora else -12 * self.idle
        return 16 * (self.saved_parameters(model) or 0) + frozen

    def optimizer_bytes(self, model: ModelConfig) -> int:
        """Weight and two moments in float32, in host memory."""
        return 12 * ((self.saved_parameters(model) or 0) - self.idle)


def model_facts(path: str, text_alone: bool = False) -> ModelFacts:
    folder = Path(path)
    try:
        files = (folder / "config.json", *weight_files(folder))
        if not all(file.is_file() for file in files):  # a pipe would not end
            return ModelFacts()
        stats = [(file, file.stat()) for file in files]
        return _read(text_alone, tuple((file, stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats))
    except (OSError, ValueError, RecursionError):
        return ModelFacts()


@lru_cache(maxsize=16)
def _read(text_alone: bool, files: tuple[tuple[Path, int, int, int], ...]) -> ModelFacts:
    """`files`: config.json and the weights, each with what changes when it is written. A mixture has 19,000 tensors,
    and an estimate asks a hundred times. Raises OSError, ValueError, RecursionError."""
    file, *weights = (file for file, *_ in files)
    config = json.loads(file.read_text(encoding="utf-8"))
    every = [one for file in weights for one in header_of(file).shapes.items()]
    if not isinstance(config, dict):
        return ModelFacts()
    kind, refused, text = config.get("model_type"), tuple(unsupported(config, served=False)), text_config(config)
    if any(malformed(text)) or any(oversized(config)):
        return ModelFacts(kind=kind, unsupported=refused)
    shapes = [(name, shape) for name, shape in every if not name.startswith(UNREAD)]
    seeing, alone = reads_images(config, text_alone), trains_text_alone(config, text_alone)
    tower = sum(prod(shape) for name, shape in shapes if seeing and TOWER.search(f".{name}"))
    idle = sum(prod(shape) for name, shape in shapes if alone and not TEXT_PARTS.search(name))
    linear: Counter[str] = Counter()
    for name, shape in shapes:
        if alone and not TEXT_PARTS.search(name):
            continue
        if len(shape) == 2 and (found := LINEAR.search(f".{name}")) and not TOWER.search(f".{name}"):
            linear[found[1]] += sum(shape)
    parameters = sum(prod(shape) for _, shape in shapes)
    experts = num_experts(text)
    routed = (len(expert_layers(text)), text.get("num_experts_per_tok") or 0) if experts else (0, 0)
    return ModelFacts(
        parameters or None,
        text.get("num_attention_heads"),
        usable_positions(text),
        tower or None,
        linear,
        text.get("model_type") or kind,
        experts,
        prod(routed) * (1 if experts <= 256 else 2),
        *_kept_of_a_token(text),
        refused,
        tuple(unserved(config)),
        _head_size(text),
        text.get("vocab_size"),
        routed if all(routed) else None,
        config.get("image_token_id", config.get("image_token_index"))
        if seeing and config.get("vision_config")
        else None,
        idle,
        is_proven(config),
        text.get("linear_num_value_heads") is not None,
        alone,
        seeing and kind in MUTUAL,
    )


def facts_of(model: ModelConfig) -> ModelFacts:
    """The model as it is trained, with images or on text alone."""
    return model_facts(model.path, model.text_alone)


def _kept_of_a_token(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    kv_heads = config.get("num_key_value_heads") or heads
    others = {kind for key in LAYER_KEYS for kind in config.get(key) or ()} - {"full_attention"}
    others |= {key for key in config if key.startswith(("attn_layer_", "mamba_"))}  # not every layer attends
    if not (heads and layers and kv_heads) or others or "kv_lora_rank" in config:
        return None, None
    size = _head_size(config) or 0
    return kv_heads, 2 * layers * kv_heads * size or None


def _head_size(config: Mapping[str, Any]) -> int | None:
    heads, size = config.get("num_attention_heads"), config.get("head_dim")
    return size or (config.get("hidden_size", 0) // heads if heads else 0) or None


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer that has some, by a text config; 0 for a dense model."""
    if _has_dense_layers_alone(config):
        return 0
    counts = (config.get(key) for key in EXPERTS)
    return next((number for number in counts if isinstance(number, int) and number > 1), 0)


def _has_dense_layers_alone(config: Mapping[str, Any]) -> bool:
    """Configs of dense models of a family of mixtures count experts too: doge, gemma4, nemotron_h, Qwen, DeepSeek."""
    blocks, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    mlps, layers = config.get("mlp_layer_types"), config.get("num_hidden_layers")
    leading = [config.get(key) for key in ("first_k_dense_replace", "num_dense_layers") if not mlps]  # else unread
    return (
        any(config.get(switch) is False for switch in ("is_moe", "enable_moe_block"))
        or (config.get("model_type") == "nemotron_h" and bool(blocks) and "moe" not in (blocks or ()))
        or (isinstance(pattern, str) and "E" not in pattern)
        or (isinstance(mlps, list) and bool(mlps) and all(kind == "dense" for kind in mlps))
        or (isinstance(layers, int) and any(isinstance(number, int) and number >= layers for number in leading))
        or (isinstance(layers, int) and not expert_layers(config))
    )


def expert_layers(config: Mapping[str, Any]) -> list[int]:
    """Indices of the layers with experts, of a text config in Qwen's words."""
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    layers = range(config.get("num_hidden_layers") or 0)
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def checkpoint_bytes(parameters: int, model: ModelConfig, exported: bool) -> int:
    """Weight and two moments in float32, and the export in `model.dtype`; each checkpoint of an adapter has one, in
    float32."""
    export = 4 if model.lora else exported * BYTES[model.dtype]
    return parameters * (12 + export)
