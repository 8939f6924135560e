"""The policy as a Hugging Face folder that `vllm serve` loads: the initial model's files with new weights."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.hub import cached_file

from configs.architecture import PROVEN
from configs.schema import ModelConfig
from configs.variables import apply_umask
from learner.mesh import replica
from learner.model.policy import Policy

SHARD_BYTES = 5 << 30
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


def collect(policy: Policy) -> dict[str, Tensor]:
    """Gather the whole weights, or the adapter's, by name in host memory on rank 0; empty on other ranks. A
    collective."""
    if replica(policy.mesh) > 0:
        return {}
    keep = dist.get_rank() == 0
    whole = policy.adapter() if policy.lora else policy.full_weights()
    proven = policy.model.config.model_type in PROVEN
    named = (held for name, x in whole if keep for held in (in_files(name, x) if proven else [(name, x)]))
    return {name: tensor.cpu().clone() for name, tensor in named}


def in_files(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A weight as in PROVEN models' files: experts one by one."""
    layer, _, kind = name.rpartition(".experts.")
    if kind not in FUSED or not layer:
        yield name, weight
        return
    for number, expert in enumerate(weight):
        for part, matrix in zip(FUSED[kind], expert.chunk(len(FUSED[kind])), strict=True):
            yield f"{layer}.experts.{number}.{part}.weight", matrix


def write(weights: dict[str, Tensor], model: ModelConfig, folder: Path) -> None:
    """Write `weights` beside the initial model's other files."""
    folder.mkdir(parents=True)
    source = Path(model.path)
    if source.is_dir():
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith(WEIGHT_FILES):
                shutil.copyfile(path, folder / path.name)  # without its mode, which may be read-only
    else:  # a name on the hub
        known = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        known.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).save_pretrained(folder)
        for name in PROCESSOR_FILES if hasattr(known, "vision_config") else ():
            if file := cached_file(model.path, name, _raise_exceptions_for_missing_entries=False):
                shutil.copyfile(file, folder / name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (config, *(config[name] for name in ("text_config", "vision_config") if config.get(name))):
        part.pop("torch_dtype", None)
        part["dtype"] = model.dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_torch_state_dict(weights, folder, max_shard_size=SHARD_BYTES)
    apply_umask(folder)
