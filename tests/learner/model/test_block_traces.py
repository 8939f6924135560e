"""What a block's passes hold: kinds of blocks, moments, and what the compiler keeps, in bytes a token."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, PretrainedConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3Config

from configs.schema import LoraConfig, ModelConfig
from learner.model import memory
from learner.model.block_traces import ModelTrace, trace_compiled, trace_model
from learner.model.loading import blocks
from learner.model.recomputing import recompute

WIDTH, INNER, HEADS, KEYS = 64, 256, 128, 32
"""Numbers of a hidden state, an MLP's factor, all queries, and all keys."""
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
CONFIGS: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma3": Gemma3TextConfig,
                                             "qwen3_5": Qwen3_5TextConfig}  # fmt: skip
LSE = 4 * 4
"""Bytes of attention's log-sum-exps, float32 for each head."""


def traced(
    folder: Path, kind: str, way: str = "none", compiled: bool = False, lora: bool = False, **sizes: Any
) -> ModelTrace:
    """The trace of a small model in bfloat16."""
    CONFIGS[kind](**(SIZES | sizes)).save_pretrained(folder)
    adapter = LoraConfig(rank=4) if lora else None
    model = ModelConfig(path=str(folder), dtype="bfloat16", lora=adapter)
    empty = memory._trained_on_meta(model)
    memory._cast(empty, model)
    decode = partial(memory._decode, empty, 1)
    recompute(empty, way, compiled)
    return trace_compiled(empty, decode, way == "block") if compiled else trace_model(empty, decode)


def test_a_recomputed_block_keeps_its_input(tmp_path: Path) -> None:
    found = traced(tmp_path, "qwen2", "block")
    assert [block.kept for block in found.blocks] == 3 * [2 * WIDTH]
    assert found.blocks[0] is found.blocks[2], "blocks of one kind are traced once"
    kept = traced(tmp_path, "qwen2")
    highest = [max(line.per_token for line in each.blocks[0].moments) for each in (found, kept)]
    assert 0.9 * highest[1] < highest[0] <= highest[1], "while it is computed again it holds what it would keep"
    assert found.ends == kept.ends


@pytest.mark.parametrize(
    ("kind", "halves"),
    [
        # input, sum before the MLP, two normed; queries, keys, values, attention's output; three factors
        ("qwen2", 4 * WIDTH + 2 * HEADS + 2 * KEYS + 3 * INNER),
        # queries and keys before their norms, too
        ("qwen3", 4 * WIDTH + 3 * HEADS + 3 * KEYS + 3 * INNER),
        # and what is normed after attention and MLP, from one of which the sum follows
        ("gemma3", 5 * WIDTH + 3 * HEADS + 3 * KEYS + 3 * INNER),
    ],
)
def test_a_compiled_block_keeps_what_lies_nearest_to_its_matmuls(tmp_path: Path, kind: str, halves: int) -> None:
    (block, *_) = traced(tmp_path, kind, compiled=True).blocks
    assert block.kept == 2 * halves + LSE


def test_a_compiled_adapter_has_two_gradients_for_each_factor(tmp_path: Path) -> None:
    """A factor of the MLP gets one gradient through the base and one through the adapter."""
    extra = {}
    for lora in (False, True):
        (block, *_) = traced(tmp_path / str(lora), "qwen2", "block", compiled=True, lora=lora).blocks
        (kept, *_) = traced(tmp_path / str(lora), "qwen2", compiled=True, lora=lora).blocks
        assert block.kept == 2 * WIDTH
        extra[lora] = (block.moments[0].per_token - kept.kept - 2 * WIDTH) // (2 * INNER)
    assert extra == {False: 2, True: 5}


def test_a_block_that_keeps_a_state_is_recomputed_beside_compiled_ones(tmp_path: Path) -> None:
    """It is not compiled, but recomputed as the others."""
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2}
    given = SIZES | sizes | {"linear_num_value_heads": 2, "layer_types": ["linear_attention"] * 2 + ["full_attention"]}
    found = traced(tmp_path, "qwen3_5", "block", compiled=True, **given)
    assert [block.kept for block in found.blocks] == 3 * [2 * WIDTH]


def test_a_product_that_is_not_saved_counts(tmp_path: Path) -> None:
    """As a state space in torch makes it: 1,000 numbers a token, whose sum alone goes on."""
    Qwen2Config(**SIZES).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    plain, wide = (memory._trained_on_meta(model) for _ in range(2))
    for empty in (plain, wide):
        memory._cast(empty, model)
    for block in blocks(wide):
        block.mlp.forward = _multiplied  # type: ignore[union-attr, method-assign]
    rows = [trace_model(empty, partial(memory._decode, empty, 1)) for empty in (plain, wide)]
    highest = [max(line.per_token for line in row.blocks[0].moments) for row in rows]
    assert highest[1] > 2 * 1000 * 2 * WIDTH > highest[0], "two gradients of the product"


def _multiplied(hidden: Tensor) -> Tensor:
    return (hidden[..., None] * torch.ones(1000, dtype=hidden.dtype, device="meta") * hidden[..., None]).sum(-1)
