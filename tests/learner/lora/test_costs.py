"""What an adapter takes: FLOPs against torch's count, memory against what autograd keeps, and the figures of large
models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen3MoeConfig

from configs.schema import LoraConfig, ModelConfig
from learner.model.head import HeadOptions, chunked_loss, logprobs_and_entropy
from learner.model.loading import blocks, build_on_meta
from learner.model.lora.adapter import Factor, adapt, factors
from learner.model.memory import GIB, META_ATTENTION, estimate
from learner.model.microbatch import one_document
from tests.harness.adapters import adapted_model, peft_model
from tests.harness.world import LEARNER, policy_of, tiny_model
from tests.learner.model.test_attention import packed


def test_flops(tmp_path: Path, mesh) -> None:
    """All tokens scored. torch leaves out the gradients of the first block's input, which nobody needs."""
    model, n = adapted_model(tmp_path), 48
    policy = policy_of(model, mesh)
    theirs = peft_model(model, dict(policy.adapter()))
    with FlopCounterMode(display=False) as counter:
        theirs(torch.zeros(1, n, dtype=torch.int64)).logits.sum().backward()
    first = [p for name, p in blocks(policy.model)[0].self_attn.named_parameters() if name[0] in "qkv" and p.dim() > 1]
    unneeded = 2 * n * sum(p.numel() for p in first if p.shape[-1] == 64)
    costs = policy.costs
    attention = 2 * costs.per_pair * n * n  # transformers computes all pairs
    want = costs.per_token * n + costs.per_trainable * n + attention
    assert counter.get_total_flops() == pytest.approx(want - unneeded, rel=0.01)
    full = policy_of(tiny_model(tmp_path), mesh).costs
    assert costs.per_trainable == 4 * full.per_trainable / 6 and costs.per_pair == full.per_pair


@pytest.mark.parametrize("chunked", [False, True])
def test_a_frozen_head_has_no_gradient_and_costs_a_product_less(chunked: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(20, 8, generator=draw), torch.randn(300, 8, generator=draw)
    targets, by = torch.randint(300, (20,), generator=draw), torch.randn(20, generator=draw)
    found, products, options = [], [], HeadOptions(0.7, 7)
    for trained in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        with FlopCounterMode(display=False) as counter:
            if chunked:
                chunked_loss(h, w, targets, lambda logp, _, chunk: (by[chunk] * logp).sum(), options)[2].backward()
            else:
                (by * logprobs_and_entropy(h, w, targets, options)[0]).sum().backward()
        found.append(h.grad)
        products.append(counter.get_total_flops() / (2 * 20 * 300 * 8))
        assert (w.grad is not None) is trained
    assert torch.equal(*found)
    assert products == ([3, 2] if chunked else [4, 3])


def kept_by_autograd(policy, tokens: int) -> int:
    """Bytes that the forward pass of a row keeps, besides weights."""
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    row = packed([[1] * tokens])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.unshard()
        given = {"cu_seq_lens_q": row.cu_seqlens, "max_length_q": row.max_seqlen, "use_cache": False}
        policy.model.get_decoder()(input_ids=row.tokens[None], position_ids=row.positions[None], **given)
    weights = {p.untyped_storage()._cdata for p in policy.parameters()}
    sizes = [x.untyped_storage().nbytes() for place, x in seen.items() if place not in weights]
    return sum(size for size in sizes if size >= tokens)


@pytest.mark.parametrize("saving", ["none", "block"])
def test_activations_are_what_autograd_keeps(tmp_path: Path, mesh, saving: str) -> None:
    model = adapted_model(tmp_path)
    learner = LEARNER.model_copy(update={"activation_checkpointing": saving})
    hidden = 4 * 64
    ours = estimate(model, learner, 1).candidates[0].per_token["activations"] - 3 * hidden  # the head has these
    policy = policy_of(model, mesh, learner)
    small, large = (kept_by_autograd(policy, tokens) for tokens in (512, 1024))
    assert ours == pytest.approx((large - small) / 512, rel=0.25, abs=1.1 * hidden)


def test_state_is_what_the_policy_and_its_optimizer_hold(tmp_path: Path, mesh) -> None:
    model = adapted_model(tmp_path, dtype=torch.bfloat16)
    policy = policy_of(model, mesh)
    policy(one_document([1, 2, 3]))[0].sum().backward()
    held, fixed = list(policy.parameters()), estimate(model, LEARNER, 1).candidates[0].fixed
    grads = [p.grad.to_local().nbytes for p in held if p.grad is not None]
    assert fixed["weights"] == sum(p.to_local().nbytes for p in held)
    assert fixed["gradients"] == sum(grads) and fixed["optimizer"] == 2 * sum(grads)
    assert len(grads) == 28
    assert estimate(model, LEARNER, 4).candidates[0].fixed["optimizer"] == fixed["optimizer"] // 4


def factors_of(model: ModelConfig) -> list[Factor]:
    """The adapter's matrices, on meta."""
    empty = build_on_meta(model, META_ATTENTION)
    assert model.lora is not None
    adapt(empty, model.lora, torch.bfloat16)
    return list(factors(empty))


def adapter_parameters(model: ModelConfig) -> tuple[int, int]:
    """Matrices of the adapter, and their parameters."""
    sizes = [factor.parameter.numel() for factor in factors_of(model)]
    return len(sizes), sum(sizes)


def state_gib(fixed: dict[str, int]) -> float:
    return sum(fixed[name] for name in ("weights", "gradients", "optimizer")) / GIB


def test_7b_learns_on_one_gpu(tmp_path: Path) -> None:
    """Qwen2.5-7B, rank 32 in all linear layers: 14.2 GiB of weights, 154 MiB to send, 1.2 GiB of state; 113 GiB for
    all weights."""
    Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    model = ModelConfig(path=str(tmp_path), lora=LoraConfig())
    tensors, adapter = adapter_parameters(model)
    assert tensors == 392 and 2 * adapter / 2**20 == pytest.approx(154, abs=0.5)
    block = LEARNER.model_copy(update={"activation_checkpointing": "block", "head_chunk_tokens": 1024})
    expected = estimate(model, block, 1)
    assert state_gib(expected.candidates[0].fixed) == pytest.approx(14.2 + 1.2, abs=0.05)
    assert 16 * adapter / GIB == pytest.approx(1.2, abs=0.01)
    assert expected.total(32768) < 0.9 * 80 * GIB
    whole = estimate(model.model_copy(update={"lora": None}), block, 1)
    assert state_gib(whole.candidates[0].fixed) == pytest.approx(113.5, abs=0.1)


def test_compiled_layers_keep_a_sum_where_they_have_an_adapter(tmp_path: Path) -> None:
    """W x + B A x, not both of them: beside what full training keeps only A x. With both, 7B was estimated at 126 GiB
    where an H200 had a peak of 98 (benchmarks.learner, `ours-7b-lora`)."""
    model = adapted_model(tmp_path)
    compiled = LEARNER.model_copy(update={"compile": True, "activation_checkpointing": "none"})
    assert model.lora is not None
    kept, whole = (
        estimate(each, compiled, 1).candidates[0].per_token["activations"]
        for each in (model, model.model_copy(update={"lora": None}))
    )
    layers, normed = len(factors_of(model)) // 2, 4 * 64  # the last norm is frozen, and keeps one number less
    assert kept == whole + layers * model.lora.rank * 4 - normed


def test_attention_of_30b_a3b_is_a_small_adapter(tmp_path: Path) -> None:
    """Qwen3-30B-A3B, rank 32 in attention alone: 56.9 GiB of weights, 51 MiB to send, 0.4 GiB of state."""
    shape: Any = Qwen3MoeConfig
    shape(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    lora = LoraConfig(targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = ModelConfig(path=str(tmp_path), lora=lora)
    tensors, adapter = adapter_parameters(model)
    assert tensors == 384 and 2 * adapter / 2**20 == pytest.approx(51, abs=0.5)
    assert 16 * adapter / GIB == pytest.approx(0.4, abs=0.01)
    expected = estimate(model, LEARNER, 1)
    assert state_gib(expected.candidates[0].fixed) == pytest.approx(56.9 + 0.4, abs=0.05)
    assert expected.total(16384) < 0.9 * 139 * GIB
