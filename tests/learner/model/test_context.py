"""How a row is cut into slices, which models cannot be cut, and how heads and tokens change places."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Lfm2Config, Lfm2ForCausalLM

from configs.load import ConfigError
from configs.schema import LearnerConfig, ModelConfig
from learner.model import context
from learner.model.exactness import check_shareable, packed_row
from learner.model.memory import estimate
from tests.harness.pictured import seeing_model
from tests.harness.shapes_of_models import text_folder
from tests.harness.world import tiny_model


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), size=st.integers(1, 5))
def test_slices_are_the_row_and_each_token_is_predicted_once(lengths: list[int], size: int) -> None:
    row = packed_row([np.arange(n) for n in lengths])
    context.GROUPS["each"] = context.ContextGroup(size, 0, None, None)
    cuts = []
    for rank in range(size):
        context.GROUPS["each"] = context.ContextGroup(size, rank, None, None)
        cuts.append(context.cut(row, "each"))
    whole = cuts[0]
    assert len(whole.tokens) % size == 0 and whole.own.filled_from == len(row.tokens)
    assert torch.equal(whole.tokens[: len(row.tokens)], row.tokens)
    assert torch.equal(torch.cat([cut.tokens[cut.held] for cut in cuts]), whole.tokens)
    assert torch.equal(torch.cat([cut.predicted for cut in cuts]), row.scored)
    for cut in cuts:
        assert torch.equal(cut.own.predictor + cut.own.start, cut.predicted - 1)
        assert ((cut.own.predictor >= 0) & (cut.own.predictor < cut.own.stop - cut.own.start)).all()
    assert whole.cu_seqlens[-1] == len(whole.tokens) and whole.max_seqlen == int(whole.cu_seqlens.diff().max())
    positions = torch.cat([torch.arange(int(n)) for n in whole.cu_seqlens.diff()])
    assert torch.equal(whole.positions, positions) and not whole.sampled[len(row.tokens) :].any()


def test_alone_the_exchange_changes_nothing(mesh) -> None:
    """And its gradients are those of the identity, also of heads that are sent to several ranks."""
    name = context.join(1, timedelta(seconds=60))
    q = torch.randn(6, 4, 8, requires_grad=True)
    there = context.to_heads(q, name)
    back = context.scattered(there, 4, name)
    assert torch.equal(back, q)
    torch.library.opcheck(context.to_heads, (q, name))
    torch.library.opcheck(context.to_tokens, (there.detach().requires_grad_(), 4, name))


def test_two_ranks_of_another_size_are_refused(mesh) -> None:
    name = context.planned(4)
    heads = (
        torch.zeros(5, 6, 8, device="meta"),
        torch.zeros(5, 3, 8, device="meta"),
        torch.zeros(5, 3, 8, device="meta"),
    )
    with pytest.raises(
        ConfigError, match=r"^learner\.context_parallel: 4 does not divide the 6 attention heads; set it"
    ):
        context.gathered(*heads, name)


def test_models_that_cannot_be_cut_are_refused_by_name(tmp_path: Path) -> None:
    Lfm2ForCausalLM(
        Lfm2Config(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
                   num_key_value_heads=2, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    ).save_pretrained(tmp_path / "state")  # fmt: skip
    seeing = seeing_model(tmp_path / "seeing", "qwen3_vl")
    for model, kind, why in (
        (
            ModelConfig(path=str(tmp_path / "state")),
            "lfm2",
            "has layers that keep a state (Lfm2ShortConv), which ranks",
        ),
        (seeing, "qwen3_vl_text", "reads images, whose tokens are not split over ranks"),
    ):
        with pytest.raises(ConfigError) as error:
            check_shareable(model, 2)
        (line,) = error.value.problems
        assert line.startswith(f"learner.context_parallel: 2, but {model.path} ({kind}) {why}")
        check_shareable(model, 1)
    check_shareable(tiny_model(tmp_path / "text"), 2)


def test_the_estimate_counts_a_rank_s_slice(tmp_path: Path) -> None:
    """A row of N times the tokens takes what each rank alone would take, and one copy of attention's outputs more, with
    heads and with tokens changed; heads of keys that are sent to several ranks take more."""
    model = ModelConfig(path=str(text_folder(tmp_path, "7B")))
    learner = LearnerConfig(activation_checkpointing="none", compile=True, head_chunk_tokens=1024)
    alone, four, most = (
        estimate(model, learner.model_copy(update={"context_parallel": size}), 4) for size in (1, 4, 28)
    )
    outputs = 28 * 8192 * 3584 * 2
    assert four.total(4 * 8192) == pytest.approx(alone.total(8192) + outputs, rel=1e-3)
    assert 4 * alone.fit(70 << 30) > four.fit(70 << 30) > 3.7 * alone.fit(70 << 30)
    growth = [(way.total(2 << 20) - way.total(1 << 20)) / (1 << 20) for way in (alone, most)]
    copies = 2 * 2 * 128 * (28 - 4) * 28  # bytes of keys and values, 24 heads more, in 28 layers
    assert 28 * growth[1] - growth[0] >= copies
    with pytest.raises(ConfigError, match=r"^learner\.context_parallel: 3 does not divide the 28 attention heads"):
        estimate(model, learner.model_copy(update={"context_parallel": 3}), 3)
