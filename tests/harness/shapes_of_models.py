"""Folders with the config.json of models by their sizes, without weights and tokenizer: for estimates."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.memory.combinations import MODELS
from benchmarks.weights.seeing import ARCHITECTURES, SEEING, config_of, processor_files

LARGER_TEXT = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def text_folder(folder: Path, name: str, **changes: Any) -> Path:
    """The folder of a model of `benchmarks/memory/combinations.py`, such as `7B`."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = MODELS[name] | {"max_position_embeddings": 65536, "dtype": "bfloat16"} | changes
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def seeing_folder(folder: Path, larger: bool = False) -> Path:
    """The folder of Qwen2.5-VL-3B, or of 7B."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, given = SEEING["Qwen2.5-VL-3B"]["model_type"], deepcopy(config_of("Qwen2.5-VL-3B", 2))
    if larger:
        given["text_config"] |= LARGER_TEXT
        given["vision_config"] |= {"out_hidden_size": LARGER_TEXT["hidden_size"]}
        given["tie_word_embeddings"] = False
    config = AutoConfig.for_model(kind, **given)
    config.architectures = [ARCHITECTURES[kind]]
    config.save_pretrained(folder)
    for name, content in processor_files("Qwen2.5-VL-3B").items():
        (folder / name).write_text(json.dumps(content))
    return folder
