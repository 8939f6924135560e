"""Facts of a model read from its folder without loading it: parameters, attention heads, longest context, disk space.

Used by `explain.py` and `checks.py` for the arithmetic. A model given by its hub name has no folder here, so nothing is
known of it. Reads `config.json` and the headers of the safetensors files, never a tensor.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

TOWER = ".visual."
"""In the names of the weights that read images, in every release of the models that are known."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of a config that count the experts of a layer: transformers writes Qwen3-MoE's under the last one."""
SPARE_BYTES = 64 << 20
"""Disk space to leave free besides what checkpoints take."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model folder, None where unknown.

    Example: `ModelFacts(1_543_714_304, 12, 32_768)` for Qwen2.5-1.5B.
    """

    parameters: int | None = None
    heads: int | None = None
    positions: int | None = None
    tower: int | None = None
    """Of the parameters those that read images; None for a text model."""
    kind: str | None = None
    """`model_type`, as `qwen3_moe`."""
    experts: int = 0
    """Experts of a layer that has some; 0 for a dense model, and where nothing is known."""
    route_bytes: int = 0
    """What the experts chosen for one token take in a sample (`Sample.routes`)."""


def model_facts(path: str) -> ModelFacts:
    """Facts of the model in folder `path`; all None for a hub name or a folder that cannot be read."""
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sizes = [size for file in sorted(folder.glob("*.safetensors")) for size in _parameters(file)]
    except (OSError, ValueError):
        return ModelFacts()
    tower = sum(number for name, number in sizes if TOWER in f".{name}")
    config = config.get("text_config", config)
    # with scaled rotary embeddings the usable context is not max_position_embeddings
    positions = None if config.get("rope_scaling") else config.get("max_position_embeddings")
    parameters = sum(number for _, number in sizes)
    experts = num_experts(config)
    routes = len(expert_layers(config)) * config.get("num_experts_per_tok", 0) if experts else 0
    return ModelFacts(
        parameters or None,
        config.get("num_attention_heads"),
        positions,
        tower or None,
        config.get("model_type"),
        experts,
        routes * (1 if experts <= 256 else 2),
    )


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer, of a text config; 0 for a dense model."""
    return next((int(config[key]) for key in EXPERTS if config.get(key)), 0)


def expert_layers(config: Mapping[str, Any]) -> list[int]:
    """Indices of the layers with experts, of a text config in the words of Qwen's."""
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    layers = range(config.get("num_hidden_layers") or 0)
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def checkpoint_bytes(parameters: int, dtype: str, exported: bool) -> int:
    """Disk that one checkpoint takes: weight and two moments in float32, and the export in `dtype` if it has one."""
    return parameters * (12 + exported * {"bfloat16": 2, "float32": 4}[dtype])


def _parameters(file: Path) -> list[tuple[str, int]]:
    """Name and number of elements of each tensor in a safetensors file: 8 bytes of length, then a JSON header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > 100_000_000:  # the format's own bound: not a safetensors file
            raise ValueError(f"{file}: no safetensors header")
        header = json.loads(stream.read(length))
    return [(name, prod(tensor["shape"])) for name, tensor in header.items() if name != "__metadata__"]
