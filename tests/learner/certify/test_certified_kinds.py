"""Kinds of models that the table of families does not have: with a vision tower, and with their own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from configs.schema import ModelConfig
from learner.certify.certifier import certify
from learner.certify.ranks import Pair
from learner.certify.rows import SHORT, cases
from learner.model.shrink import small
from tests.harness.certified import tiny_config
from tests.harness.pictured import seeing_model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_code"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize(("kind", "number"), [("qwen2_5_vl", 29), ("qwen3_vl", 29), ("qwen3_5", 17), ("gemma3", 17)])
def test_a_model_that_sees_holds_on_text_and_images(
    kind: str, number: int, mesh: Any, pair: Pair, tmp_path: Path
) -> None:
    found = certify(seeing_model(tmp_path, kind), True, mesh, pair)
    assert found.faults == [] and found.kind == kind
    assert sum(check.verdict == "holds" for check in found.checks) == number


def test_a_model_with_its_own_code_holds_where_that_may_run(mesh: Any, pair: Pair, tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "own_code"')
    auto = '"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},'
    (tmp_path / "config.json").write_text(text.replace("{", "{" + auto, 1))
    (tmp_path / "own.py").write_text(CODE)
    found = certify(ModelConfig(path=str(tmp_path), dtype="float32", trust_remote_code=True), False, mesh, pair)
    assert (found.faults, found.kind) == ([], "own_code")
    notes = [check.note for check in found.checks if "prompt" in check.what]
    assert set(notes) == {"learner.share_prompts is off"}


def test_a_small_copy_keeps_what_decides_how_it_is_computed() -> None:
    """The shape of Gemma 2 27B: softcaps, scale, windows and the ratio of heads stay."""
    config = tiny_config("gemma2", hidden_size=4608, num_hidden_layers=46, num_attention_heads=32, head_dim=128)
    config.num_key_value_heads, config.intermediate_size, config.vocab_size = 16, 36864, 256000
    config.layer_types = ["sliding_attention", "full_attention"] * 23
    little = small(config)
    kept = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "head_dim", "rope_parameters")
    assert all(getattr(little, name) == getattr(config, name) for name in kept)
    assert little.layer_types == ["sliding_attention", "full_attention"] and little.sliding_window == 8
    assert (little.num_attention_heads, little.num_key_value_heads, little.hidden_size) == (4, 2, 512)
    assert (config.num_hidden_layers, config.vocab_size) == (46, 256000)


def test_heads_of_a_state_fit_the_width_of_the_copy() -> None:
    """Granite 4 without layers that keep a state names such heads too: 128 of 40, which do not divide its copy."""
    given = {"hidden_size": 2560, "num_attention_heads": 40, "num_key_value_heads": 8, "layer_types": ["attention"] * 2}
    config = AutoConfig.for_model("granitemoehybrid", num_hidden_layers=2, num_local_experts=0, **given)
    assert config.mamba_n_heads * config.mamba_d_head == 2 * 2560
    little = small(config)
    assert little.mamba_n_heads * little.mamba_d_head == little.mamba_expand * little.hidden_size
    type(little).from_dict(little.to_dict())  # transformers refuses heads that do not fit when it reads them


LISTED = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 32, "head_dim": 128}
"""As Kimi Linear's published config.json writes what its layers are."""


@pytest.mark.parametrize("given", [{}, {"linear_attn_config": LISTED}], ids=["by default", "listed"])
def test_a_small_copy_has_few_heads_of_a_delta_rule(given: dict[str, Any]) -> None:
    """Torch computes [heads, 64, 64, 128] numbers for each 64 tokens: with 32 heads a certificate took minutes."""
    config = AutoConfig.for_model("kimi_linear", num_hidden_layers=4, **given)
    little = small(config)
    assert config.linear_num_heads == 32 and (little.linear_num_heads, little.linear_head_dim) == (2, 128)
    assert type(little).from_dict(little.to_dict()).linear_num_heads == 2  # it is read again from its file


RULES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 61, "first_k_dense_replace": 3},
    "jamba": {"num_hidden_layers": 32, "attn_layer_offset": 4, "attn_layer_period": 8},
    "bamba": {"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]},
    "lfm2_moe": {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2, "num_dense_layers": 2},
    "gemma4_text": {"num_hidden_layers": 35, "num_kv_shared_layers": 20},
    "ernie4_5_moe": {"num_hidden_layers": 54, "moe_layer_start_index": 3, "moe_layer_end_index": 53},
    "afmoe": {"num_hidden_layers": 56, "num_dense_layers": 2},
    "laguna": {"num_hidden_layers": 40, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10},
}
"""Published configs whose rules, not lists, say which block is of which kind."""


@pytest.mark.parametrize("kind", RULES)
def test_a_small_copy_has_a_block_of_each_kind(kind: str) -> None:
    """DeepSeek-V3's first three blocks have no experts: a copy of the first two proved nothing of its mixture."""
    config = AutoConfig.for_model(kind, **RULES[kind])
    little = small(config)

    def parts(each: Any) -> set[str]:
        with torch.device("meta"):
            blocks = AutoModelForCausalLM.from_config(each).get_decoder().layers
        return {", ".join(sorted({type(part).__name__ for part in block.modules()})) for block in blocks}

    assert parts(little) == parts(config)
    assert little.num_hidden_layers < config.num_hidden_layers


def test_rows_are_longer_and_shorter_than_windows() -> None:
    every = list(cases(64))
    assert max(SHORT) < 8 and len({case.what for case in every}) == len(every) == 7
    assert all(len(case.row.scored) == sum(map(len, case.texts)) - sum(case.given) for case in every)
    assert max(len(text) for case in every for text in case.texts if not case.shares) > 4 * 8
