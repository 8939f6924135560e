"""The policy as a Hugging Face folder that `vllm serve` loads: the initial model's files with new weights.

`collect` is a collective on the training thread (all ranks gather, rank 0 keeps); `write` runs on rank 0 in the
checkpoint's thread and waits for the disk only.
"""

import json
import shutil
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from configs.schema import ModelConfig
from learner.model.policy import Policy

SHARD_BYTES = 5 << 30
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")
Weights = dict[str, Tensor]


def collect(policy: Policy) -> Weights:
    """Whole weights in host memory on rank 0; nothing on the others."""
    keep = dist.get_rank() == 0
    return {name: tensor.cpu().clone() for name, tensor in policy.full_weights() if keep}


def write(weights: Weights, model: ModelConfig, folder: Path) -> None:
    """Write `weights` and everything of the initial model that is not weights into `folder`."""
    folder.mkdir(parents=True)
    source = Path(model.path)
    if source.is_dir():
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith(WEIGHTS):
                shutil.copy2(path, folder / path.name)
    else:  # a name on a hub, which transformers has in its cache
        AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": model.dtype}, indent=2) + "\n")
    _write_shards(weights, folder)


def _write_shards(weights: Weights, folder: Path) -> None:
    """One model.safetensors, or several with their index where it would be larger than SHARD_BYTES."""
    shards: list[Weights] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
