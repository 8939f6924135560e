"""Numbers in a model's config.json that no model has are refused before anything makes lists of such lengths."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.model_facts import model_facts
from configs.model_folder import faults
from configs.model_sizes import oversized

BILLION = 10**9
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "max_position_embeddings": 64}
LARGE: list[tuple[dict[str, Any], str, str]] = [
    ({"num_hidden_layers": BILLION}, "num_hidden_layers in its config.json is 1000000000", "1,000"),
    ({"num_hidden_layers": 1e9}, "num_hidden_layers in its config.json is 1000000000.0", "1,000"),
    ({"n_layer": 10**40}, "n_layer in its config.json is 10000000000000000000...", "1,000"),
    ({"vision_config": {"depth": BILLION}}, "depth in its config.json is 1000000000", "1,000"),
    ({"depths": [2, BILLION]}, "depths in its config.json is 1000000000", "1,000"),
    (
        {"attention_types": [[["global", "local"], BILLION]]},
        "attention_types in its config.json is 1000000000",
        "1,000",
    ),
    ({"layer_types": ["full_attention"] * 1001}, "layer_types in its config.json has 1,001 entries", "1,000"),
    ({"num_experts": BILLION}, "num_experts in its config.json is 1000000000", "100,000"),
    ({"num_labels": BILLION}, "num_labels in its config.json is 1000000000", "1,000,000"),
    ({"hidden_size": BILLION}, "hidden_size in its config.json is 1000000000", "10,000,000"),
    ({"text_config": {"vocab_size": BILLION}}, "vocab_size in its config.json is 1000000000", "100,000,000"),
]


@pytest.mark.parametrize(("large", "what", "limit"), LARGE, ids=[next(iter(large)) for large, _, _ in LARGE])
def test_a_number_that_no_model_has_is_refused_by_its_key(
    large: dict[str, Any], what: str, limit: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | large))
    line = f"{what}, and at most {limit} are read; correct it or download the model again"
    assert list(faults(tmp_path)) == list(faults(tmp_path, served=True)) == [line]
    assert model_facts(str(tmp_path)).positions is None


def test_numbers_that_count_no_parts_may_be_large() -> None:
    """Some files write "without limit" as a large number."""
    config = {"max_window_layers": BILLION, "sliding_window": BILLION, "rope_theta": BILLION, "eos_token_id": BILLION}
    config |= {"use_cache": True, "max_position_embeddings": BILLION, "vision_feature_layer": -2}
    quantised = {"quantization_config": {"ignored_layers": ["lm_head"] * 5000}}
    assert not list(oversized(LLAMA | config | quantised))


def test_the_number_of_a_word_counts_no_parts() -> None:
    """Chameleon's and Emu3's config.json have their whole vocabulary."""
    words = {"layers": 14_793, "▁heads": 100_001, "block": BILLION}
    assert not list(oversized(LLAMA | {"vocabulary_map": words, "text_config": {"vocabulary_map": words}}))
    assert not list(oversized(LLAMA | {"label2id": {"building block": 20_000}, "id2label": {"0": "layers"}}))
