"""Random weights of a mixture of experts, in files such as published ones: each expert by itself, a file a layer.

Written by several processes at a time, each on a GPU in turn if there are some, because one process takes minutes for
the 61 GB of Qwen3-30B-A3B. Used by `models.py`; waits for the disk.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.weights.shapes import text_config

PROCESSES = 12
SPREAD = 0.02
"""Standard deviation of the weights, where the shape has no `initializer_range` of its own."""
Shapes = dict[str, tuple[int, ...]]


def layer_shapes(shape: dict[str, Any], layer: int) -> Shapes:
    """Names and shapes of the tensors of a layer."""
    hidden, width = shape["hidden_size"], shape["moe_intermediate_size"]
    head, heads, kv = shape["head_dim"], shape["num_attention_heads"], shape["num_key_value_heads"]
    found: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    found |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    for name, number in (("q", heads), ("k", kv), ("v", kv)):
        found[f"self_attn.{name}_proj.weight"] = (number * head, hidden)
    found |= {"self_attn.o_proj.weight": (hidden, heads * head), "mlp.gate.weight": (shape["num_experts"], hidden)}
    for expert in range(shape["num_experts"]):
        found |= {f"mlp.experts.{expert}.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
        found[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, width)
    return {f"model.layers.{layer}.{name}": size for name, size in found.items()}


def files_of(name: str) -> Iterator[tuple[str, Shapes]]:
    """The files of the shape `name`: first what is in no layer."""
    shape = text_config(name)
    words = (shape["vocab_size"], shape["hidden_size"])
    ends: Shapes = {"model.embed_tokens.weight": words, "lm_head.weight": words}
    parts = [ends | {"model.norm.weight": words[1:]}]
    parts += [layer_shapes(shape, layer) for layer in range(shape["num_hidden_layers"])]
    for number, part in enumerate(parts):
        yield f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors", part


def write_mixture(name: str, folder: Path) -> None:
    """Write the weights of the shape `name` into `folder`."""
    files, gpus = list(files_of(name)), torch.cuda.device_count()
    spread = text_config(name).get("initializer_range", SPREAD)
    processes = min(PROCESSES, len(files)) if gpus else 1
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        given = [(folder / file, part, number, gpus, spread) for number, (file, part) in enumerate(files)]
        sizes = list(pool.map(_write, given))
    index = {key: file for file, part in files for key in part}
    content = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def _write(given: tuple[Path, Shapes, int, int, float]) -> int:
    """Write one file; returns the bytes of its tensors."""
    file, part, number, gpus, spread = given
    device = torch.device("cuda", number % gpus) if gpus else torch.device("cpu")
    draw = torch.Generator(device).manual_seed(number)
    made: dict[str, torch.Tensor] = {}
    for name, size in part.items():
        values = torch.ones(size, device=device, dtype=torch.bfloat16)
        if len(size) > 1:
            values.normal_(0.0, spread, generator=draw)
        made[name] = values.cpu()
    save_file(made, file, metadata={"format": "pt"})
    return sum(values.nbytes for values in made.values())
