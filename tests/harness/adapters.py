"""What tests of adapters share: a tiny model with one, adapters that change something, peft's model of the same, and
what a learner saves of one."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch.distributed.tensor import DTensor, distribute_tensor

from configs.checkpoint_files import folder_of
from configs.schema import LoraConfig, ModelConfig
from learner.checkpoint import Checkpoints
from learner.model.policy import Policy
from learner.saved.merge import merge
from learner.train.optimizer import Optimizer
from learner.weights.plan import LORA_A
from tests.harness.world import LEARNER, alone, plain, policy_of, tiny_model

LORA = LoraConfig(rank=4, alpha=8.0)


def adapted_model(folder: Path, tied: bool = False, lora: LoraConfig = LORA, **options: Any) -> ModelConfig:
    """The tiny model of `world`, to be trained with `lora`."""
    return tiny_model(folder, tied, **options).model_copy(update={"lora": lora})


def stir(policy: Policy, size: float = 0.2) -> None:
    """Give every B, which is zero at version 0, random values: the same for any number of ranks."""
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name.endswith("lora_B"):
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                whole = torch.randn(parameter.shape, generator=draw) * size
                assert isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def peft_model(model: ModelConfig, adapter: dict[str, torch.Tensor]) -> Any:
    """peft's model with the same base and `adapter`, whose names are the wire's."""
    assert model.lora is not None
    targets = sorted({name.removesuffix(LORA_A).rpartition(".")[2] for name in adapter if name.endswith(LORA_A)})
    config = PeftConfig(r=model.lora.rank, lora_alpha=model.lora.scale * model.lora.rank, target_modules=targets)
    wrapped = get_peft_model(plain(model), config)
    parameters = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    named = {f"base_model.model.{name.removesuffix('.weight')}.default.weight": x for name, x in adapter.items()}
    assert parameters.keys() == named.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(named[name])
    return wrapped


class Saved(NamedTuple):
    """What a learner saved of an adapter."""

    adapter: Path
    """The export in a checkpoint."""
    merged: Path
    """Whole weights, as `python -m learner merge` writes them of the checkpoint."""
    logprobs: list[float]
    """Log-probabilities of the tokens that were asked for, in the learner."""


def saved_by_learner(model: ModelConfig, folder: Path, tokens: Sequence[int]) -> Saved:
    """Train `model` by a stir, and save it into `folder`; log-probabilities are those of `tokens[1:]`."""
    with alone() as mesh:
        policy = policy_of(model, mesh)
        stir(policy)
        checkpoints = Checkpoints(folder / "checkpoints", model, LEARNER, Optimizer(policy, LEARNER, 10), 1)
        checkpoints.save(policy, 1)
        checkpoints.close()
        logprobs = policy.logprobs_of(tokens)
    checkpoint = folder_of(folder / "checkpoints", 1)
    merge(checkpoint, folder / "merged")
    return Saved(checkpoint / "adapter", folder / "merged", logprobs)
