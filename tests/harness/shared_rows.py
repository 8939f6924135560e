"""Steps of a learner whose ranks share rows, and of one without: the same cases computed by any number of ranks."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from configs.schema import AlgorithmConfig, LoraConfig, ModelConfig
from learner.mesh import make_mesh
from learner.model import context
from learner.train.batch import Batch
from tests.harness import world
from tests.harness.adapters import stir
from tests.harness.episodic import make_episodes
from tests.harness.expert_batches import SIZES, routed

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": world.VOCABULARY, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "wide": {"model_type": "qwen3", "hidden_size": 256, "head_dim": 64},
    "wide_key": {"model_type": "qwen3", "hidden_size": 256, "head_dim": 64, "num_key_value_heads": 1},
    "one_key_head": {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "window": {"model_type": "mistral", "sliding_window": 7},
    "softcap": {"model_type": "gemma2", "sliding_window": 7, "query_pre_attn_scalar": 16},
    "sinks": {"model_type": "gpt_oss", "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    "experts": {
        "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "latent": {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
"""Fields of a config beside SHAPE."""
BATCHES = {"samples": world.make_samples, "groups": world.make_groups, "episodes": make_episodes}
Case = dict[str, Any]
"""`model`: of MODELS. `algorithm`, `learner`: keys. `batch`: of BATCHES. `budget`: tokens of a row. `copied`: as
`Policy.sharing.most_copied`. `lora`, `replay`: with them. `dtype`: if not float32. `backend`: of torch.compile."""
Found = dict[str, Any]


def write_models(folder: Path) -> None:
    """A folder with random weights for each of MODELS."""
    for name, fields in MODELS.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**({"model_type": name} | SHAPE | fields))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms, biases and sinks that change something
                    parameter.add_(0.2 * torch.randn(parameter.shape))
        model.save_pretrained(folder / name)


def compute(folder: Path, cases: list[Case], size: int, device: str = "cpu", shards: int | None = None) -> list[Found]:
    """What a learner finds in each case whose ranks share rows by `size`. `shards`: ranks that share a copy of the
    model, if not all."""
    mesh = make_mesh(device, shards or dist.get_world_size())
    return [_computed(folder, case, mesh, size) for case in cases]


def _computed(folder: Path, case: Case, mesh: Any, size: int) -> Found:
    lora = LoraConfig(rank=4, alpha=8.0) if case.get("lora") else None
    model = ModelConfig(path=str(folder / case["model"]), dtype=case.get("dtype", "float32"), lora=lora)
    config = AlgorithmConfig.model_validate(case.get("algorithm", {}))
    learner = world.LEARNER.model_copy(update={"context_parallel": size} | case.get("learner", {}))
    options = {"entropy_gradient": config.entropy_bonus > 0, "replay": bool(case.get("replay"))}
    by = {"backend": case["backend"]} if "backend" in case else {}
    with patch.object(torch, "compile", partial(torch.compile, **by)):
        policy = world.policy_of(model, mesh, learner, **options)
    policy.sharing.most_copied = case.get("copied", -1.0)
    if lora:
        stir(policy)
    algorithm, batch = world.algorithm_of(policy, case["budget"], config), BATCHES[case.get("batch", "samples")]()
    parts, rank = mesh.size() // size, mesh.get_rank() // size
    entries = routed(batch, last=True) if case.get("replay") else batch
    cuts = [len(entries) // parts] * (parts - 1)
    part = world.cut(entries, 3, [*cuts, len(entries) - sum(cuts)], rank)
    packed = Batch.from_part(
        part,
        case["budget"],
        policy.costs.quadratic,
        policy.sharing.prompts,
        replayed=SIZES if case.get("replay") else None,
    )
    rows, text = [policy.place(row) for row in packed.microbatches], list(range(2, 9))
    probe = torch.tensor(policy.logprobs_of(text))
    algorithm.backward(policy, packed)
    gradients = world.gradients(policy)
    algorithm.optimizer.adamw.zero_grad()
    scores = [policy.score(row)[row.scored] for row in rows]
    metrics = algorithm.step(policy, part)
    breaks = list(counters["graph_break"])
    return {
        "gradients": {name: gradient.cpu() for name, gradient in gradients.items()},
        "logprobs": torch.cat(scores).cpu(),
        "metrics": {name: value for name, value in metrics.items() if not name.startswith("time/")},
        "probe": probe,
        "shared": {type(row.shared).__name__ for row in rows},
        "crossed": sum(crosses(row) for row in rows),
        "graph breaks": breaks,
    }


def crosses(row: Any) -> bool:
    """Whether a document lies on both sides of a border between slices."""
    if row.own is None:
        return False
    size, _ = context.size_and_rank(row.own.group)
    width, bounds = len(row.tokens) // size, {*row.cu_seqlens.tolist()}
    return any(border * width not in bounds for border in range(1, size))


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Largest difference of two tensors of a name, relative to the largest value of that name, and the name."""
    assert ours.keys() == theirs.keys()
    found = [
        (float((ours[name] - wanted).abs().max() / wanted.abs().max()), name)
        for name, wanted in theirs.items()
        if "k_proj.bias" not in name and wanted.abs().max() > 0  # attention does not depend on such a bias
    ]
    return max(found)
