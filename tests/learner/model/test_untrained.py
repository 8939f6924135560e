"""Weights that a model's own code never trains: they stay as the model's files have them, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from configs.checkpoint_files import folder_of
from configs.schema import ModelConfig
from learner.checkpoint import Checkpoints
from learner.model.loading import persistent_buffers, read_base
from learner.model.shrink import small
from learner.saved import export
from learner.saved.merge import merge
from learner.train.optimizer import Optimizer
from tests.harness.adapters import LORA
from tests.harness.world import LEARNER, policy_of

BIASES = {
    "ernie4_5_moe": "mlp.moe_statics.e_score_correction_bias",
    "afmoe": "mlp.expert_bias",
    "laguna": "mlp.experts.e_score_correction_bias",
    "minimax_m2": "block_sparse_moe.e_score_correction_bias",
}
"""Ends of names in the files of routers' biases. MiniMax-M2's is a buffer."""


def written(kind: str, folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Write a bfloat16 model whose biases are float32, and no numbers of bfloat16; returns these by their names."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small(AutoConfig.for_model(kind)), dtype=torch.bfloat16)
    for name, weight in [*model.named_parameters(), *persistent_buffers(model)]:
        if name.endswith("bias") and not weight.requires_grad:
            weight.data = torch.randn(weight.shape)
    model.save_pretrained(folder)
    files = load_file(folder / "model.safetensors")
    biases = {name: tensor for name, tensor in files.items() if name.endswith(BIASES[kind])}
    assert biases and all(not torch.equal(x, x.bfloat16().float()) for x in biases.values())
    return ModelConfig(path=str(folder)), biases


@pytest.mark.parametrize("kind", BIASES)
def test_a_routers_bias_keeps_its_bits(kind: str, tmp_path: Path, mesh: Any) -> None:
    model, biases = written(kind, tmp_path / "model")
    policy = policy_of(model, mesh)
    assert all(parameter.requires_grad for parameter in policy.parameters())
    published = {name: weight for name, weight in policy.full_weights() if name in biases}
    assert {spec.dtype for spec in policy.weight_specs() if spec.name in biases} == {torch.float32}
    export.write(export.collect(policy), model, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, bias in biases.items():
        assert torch.equal(published[name], bias) and torch.equal(exported[name], bias), name


def test_a_checkpoint_has_them(tmp_path: Path, mesh: Any) -> None:
    model, biases = written("ernie4_5_moe", tmp_path / "model")

    def parts() -> Any:
        policy = policy_of(model, mesh)
        return policy, Checkpoints(tmp_path / "checkpoints", model, LEARNER, Optimizer(policy, LEARNER, 9), 9)

    policy, checkpoints = parts()
    for _, buffer in persistent_buffers(policy.model):
        buffer.add_(1)
    checkpoints.save(policy, LEARNER.checkpoint_every)
    checkpoints.close()
    other, restoring = parts()
    assert restoring.restore(other) == LEARNER.checkpoint_every
    restoring.close()
    found = dict(other.full_weights())
    assert all(torch.equal(found[name], bias + 1) for name, bias in biases.items())


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "minimax_m2"])
def test_an_adapter_is_merged_into_a_base_that_has_them(kind: str, tmp_path: Path, mesh: Any) -> None:
    """The learner's base and the merged one have one digest, and the merged files all names and bits of the base."""
    model, biases = written(kind, tmp_path / "model")
    model = model.model_copy(update={"lora": LORA.model_copy(update={"targets": ["q_proj"]})})
    policy = policy_of(model, mesh)
    optimizer = Optimizer(policy, LEARNER, 9)
    checkpoints = Checkpoints(tmp_path / "checkpoints", model, LEARNER, optimizer, 9)
    checkpoints.save(policy, LEARNER.checkpoint_every)
    checkpoints.close()
    merge(folder_of(tmp_path / "checkpoints", LEARNER.checkpoint_every), tmp_path / "merged")
    base, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "merged"))
    assert merged.keys() == base.keys()
    assert all(torch.equal(merged[name], bias) for name, bias in biases.items())


def test_a_base_without_sdpa_is_read(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(small(AutoConfig.for_model("gpt_oss"))).save_pretrained(tmp_path)
    base = read_base(ModelConfig(path=str(tmp_path)))
    assert {(parameter.dtype, parameter.requires_grad) for parameter in base.parameters()} == {(torch.bfloat16, False)}
