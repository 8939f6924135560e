"""An adapter as the folder that peft and vLLM load."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.schema import ModelConfig
from configs.variables import apply_umask
from learner.weights.plan import LORA_A

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write(weights: Mapping[str, Tensor], model: ModelConfig, folder: Path) -> None:
    """Write `weights`, named as on the wire and not scaled."""
    lora = model.lora
    assert lora is not None
    folder.mkdir(parents=True)
    save_file({f"{PREFIX}{name}": x for name, x in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    layers = [name.removesuffix(LORA_A) for name in weights if name.endswith(LORA_A)]
    if not any(".language_model." in layer for layer in layers):  # else a tower's layers end alike
        layers = sorted({layer.rpartition(".")[2] for layer in layers})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": layers,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    apply_umask(folder)


def read(folder: Path) -> dict[str, Tensor]:
    """The tensors that `write` was given."""
    return {name.removeprefix(PREFIX): x for name, x in load_file(folder / WEIGHTS).items()}
