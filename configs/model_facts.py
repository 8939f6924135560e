"""Facts of a model read from its folder without loading it: parameters, attention heads, longest context, disk space.

Used by `explain.py` and `checks.py` for the arithmetic. A model given by its hub name has no folder here, so nothing is
known of it. Reads `config.json` and the headers of the safetensors files, never a tensor.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

TOWER = ".visual."
"""In the names of the weights that read images, in every release of the models that are known."""
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
    return ModelFacts(parameters or None, config.get("num_attention_heads"), positions, tower or None)


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
