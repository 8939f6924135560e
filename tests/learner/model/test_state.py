"""Layers that keep a state: which documents are computed together, their arithmetic, and attentions for families."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    MambaConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from configs.load import ConfigError
from configs.schema import LearnerConfig, ModelConfig
from learner.model import attention, loading, state
from learner.model.flops import Costs
from learner.model.memory import estimate
from tests.learner.model.test_families import config_of, row_of


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [((9, 3, 8), [[3], [8, 9]]), ((4, 5, 5), [[4, 5, 5]]), ((10, 13), [[10], [13]]), ((1,), [[1]])],
)
def test_documents_of_similar_length_are_computed_together(lengths: tuple[int, ...], groups: list[list[int]]) -> None:
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    found = state._similar(list(pairwise(edges)))
    assert [[end - start for start, end in group] for group in found] == groups


def test_each_document_is_a_padded_sequence_of_a_batch() -> None:
    """The layer sees no place of the row twice but as padding, and its outputs come back in the row's order."""
    seen: list[torch.Tensor] = []

    class CountingMixer(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            seen.append(hidden[..., 0])
            return hidden.cumsum(1) * factor

    block, row = torch.nn.Module(), torch.arange(1.0, 10).view(1, 9, 1)
    block.mixer = type("FalconH1Mixer", (CountingMixer,), {})()
    block.forward = lambda hidden, **_: block.mixer(hidden, factor=torch.full((1, 9, 1), 2.0))
    loading.bounds.follow([block])
    state.separate([block])
    got = block(row, cu_seq_lens_q=torch.tensor([0, 4, 5, 9]), max_length_q=4)
    assert [x.tolist() for x in seen] == [[[5.0]], [[1.0, 2.0, 3.0, 4.0], [6.0, 7.0, 8.0, 9.0]]]
    assert got.flatten().tolist() == [2.0, 6.0, 12.0, 20.0, 10.0, 12.0, 26.0, 42.0, 60.0]


def test_a_row_that_shares_prompts_is_refused() -> None:
    """Its answers would begin with an empty state."""
    block = torch.nn.Module()
    block.mixer = type("FalconH1Mixer", (torch.nn.Identity,), {})()
    block.forward = lambda hidden, **_: block.mixer(hidden)
    loading.bounds.follow([block])
    state.separate([block])
    row: dict[str, Any] = {"cu_seq_lens_q": torch.tensor([0, 4, 9]), "max_length_q": 5}
    with pytest.raises(ConfigError, match=r"learner.share_prompts: the model's FalconH1Mixer keeps a state.*to false"):
        block(torch.zeros(1, 9, 1), **row, shared_prompts=row_of([np.arange(4), np.arange(5)], (1,)).shared)


@pytest.mark.parametrize(("name", "attending", "products"), [("qwen3_5", 1, 2 * 3 * 4 * 16 * 16), ("lfm2", 1, 0)])
def test_flops_and_memory_of_a_hybrid(tmp_path: Path, name: str, attending: int, products: int) -> None:
    """Attention costs pairs in the layers that attend alone; a state costs its multiplications, three passes of 2."""
    config_of(name).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float32")
    empty = loading.build_on_meta(model, attention.registered("varlen"))
    costs, matrices = (
        Costs.of(empty),
        sum(p.numel() for b in loading.blocks(empty) for p in b.parameters() if p.dim() > 1),
    )
    assert costs.per_pair == 6 * attending * 2 * 32
    assert costs.per_token == 6 * (matrices + products)
    expected = estimate(model, LearnerConfig(head_chunk_tokens=32, activation_checkpointing="none"), 1)
    assert expected.total(1024) > expected.total(0) + 1024 * 4 * 64 * 3


def test_a_delta_rule_with_a_decay_for_each_channel_is_counted_too(tmp_path: Path) -> None:
    config_of("kimi_linear").save_pretrained(tmp_path)
    first, *_ = loading.blocks(loading.build_on_meta(ModelConfig(path=str(tmp_path)), attention.registered("sdpa")))
    assert [state.products(layer) for layer in state.layers_of(first)] == [3 * 2 * 16 * 16]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Gemma2Config(attn_logit_softcapping=50.0), r"does not compute the model's softcap of 50"),
        (Gemma4TextConfig(), r"takes heads of 256 numbers at most, and the model's have 512"),
    ],
    ids=["softcap", "wide heads"],
)
def test_a_gpu_takes_sdpa_for_what_fused_kernels_do_not_compute(config: Any, words: str) -> None:
    gpu = torch.device("cuda")
    assert attention.choose("auto", gpu, torch.bfloat16, config) == "sdpa"
    with pytest.raises(ConfigError, match=rf"^learner.attention: varlen {words}; use auto, or sdpa"):
        attention.choose("varlen", gpu, torch.bfloat16, config)
    assert attention.choose("varlen", gpu, torch.bfloat16, Qwen2Config()) == "varlen"


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (PhiConfig(hidden_size=2560, num_attention_heads=32), 80),
        (Qwen3Config(head_dim=112), 112),
        (DeepseekV3Config(qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=40), 40),
        (OlmoHybridConfig(hidden_size=2560, num_attention_heads=32), 80),
    ],
    ids=["of the hidden size", "written", "latent attention", "beside a delta rule"],
)
def test_heads_whose_gradients_flash_attention_4_gets_wrong_take_another_kernel(
    config: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(attention, "installed", lambda name: name == "flash4")
    with pytest.raises(ConfigError, match=rf"flash4 computes wrong gradients for heads of {width} numbers; use auto"):
        attention.choose("flash4", gpu, torch.bfloat16, config)
    assert attention.choose("auto", gpu, torch.bfloat16, config) == "varlen"
    delta_rule = Qwen3NextConfig(linear_key_head_dim=512, linear_value_head_dim=80)
    state_space = NemotronHConfig(head_dim=128, mamba_head_dim=80)
    for sound in (Qwen2Config(), Qwen3Config(head_dim=64), DeepseekV3Config(), delta_rule, state_space, MambaConfig()):
        assert attention.choose("auto", gpu, torch.bfloat16, sound) == "flash4"


def test_a_head_that_no_config_names_is_refused_where_flash_attention_4_would_compute_it() -> None:
    """As DiffLlama's: its values are twice as wide as its queries."""
    q, v = torch.zeros(1, 2, 3, 24), torch.zeros(1, 2, 3, 48)
    starts = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3}
    with pytest.raises(ValueError, match=r"Linear has heads of 48 numbers; set learner.attention to varlen"):
        attention.ATTENTIONS["flash4"](torch.nn.Linear(1, 1), q, q, v, None, **starts)
