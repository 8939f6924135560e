"""Multimodal models that are trained on text alone: what is beside the text model is frozen, and travels once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from configs.architecture import trains_text_alone, unsupported
from configs.model_facts import TOWER, facts_of, model_facts
from configs.schema import LoraConfig, ModelConfig
from learner.certify.certifier import certify, write_copy
from learner.certify.ranks import Pair
from learner.model import loading
from learner.model.exactness import check_adapter
from learner.model.idle_parts import TEXT_ALONE, idle_modules, idle_names
from learner.model.memory import sizes_of
from learner.model.shrink import small
from tests.harness.certified import two_ranks
from tests.harness.lanes import long_but
from tests.harness.pictured import seeing_model
from tests.harness.world import policy_of


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two ranks for the certificates."""
    with two_ranks() as pair:
        yield pair


def copy_of(kind: str, folder: Path, text_alone: bool = False) -> ModelConfig:
    return write_copy(config_of(kind, text_alone), ModelConfig(path=kind, text_alone=text_alone), folder)


def config_of(kind: str, text_alone: bool = True) -> Any:
    config = AutoConfig.for_model(kind)
    if text_alone:
        setattr(config, TEXT_ALONE, True)
    return config


@pytest.mark.parametrize(
    "kind", long_but(["gemma3", "mistral3", "internvl", "qwen2_vl", "qwen3_5", "llava_onevision"], 0, 2, 4)
)
def test_all_but_the_text_model_is_idle(kind: str) -> None:
    with torch.device("meta"):
        model: Any = loading.auto_class(config := small(config_of(kind))).from_config(config)
    idle, text = idle_names(model), {id(p) for p in model.get_decoder().parameters()}
    named = dict(model.named_parameters())
    assert {name for name in named if name in idle} == {name for name in named if "language_model" not in name} - {
        "lm_head.weight"
    }
    assert idle and not any(id(named[name]) in text for name in idle & named.keys())
    inside = {id(p) for part in idle_modules(model) for p in part.parameters()}
    loose = [name for name in idle & named.keys() if id(named[name]) not in inside]
    assert loose == (["model.image_newline"] if kind == "llava_onevision" else [])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_vl"])
def test_nothing_is_idle_in_a_text_model_or_where_images_are_trained(kind: str, tmp_path: Path) -> None:
    path = seeing_model(tmp_path, kind) if kind == "qwen3_vl" else copy_of(kind, tmp_path)
    empty = loading.build_on_meta(path, "sdpa")
    assert idle_names(empty) == frozenset() and idle_modules(empty) == []
    assert (model_facts(path.path).idle, model_facts(path.path).proven) == (0, True)


def test_idle_weights_travel_once_under_the_names_of_the_files_and_keep_their_values(mesh: Any, tmp_path: Path) -> None:
    """InternVL's files name the tower otherwise than transformers does."""
    path = copy_of("internvl", tmp_path)
    policy, read = policy_of(path, mesh), loading.read_whole(path)
    frozen, every = policy.frozen_names(), [spec.name for spec in policy.weight_specs()]
    assert policy.unsent_by_rows() in dict(policy.model.named_parameters())
    assert frozen < set(every) and not any("language_model" in name for name in frozen)
    assert [name for name, _ in policy.full_weights(frozen)] == [name for name in every if name not in frozen]
    assert [name for name, _ in policy.full_weights()] == every
    assert not any(p.requires_grad for name, p in policy.model.named_parameters() if name in idle_names(policy.model))
    for name in idle_names(policy.model) & dict(policy.model.named_parameters()).keys():
        assert torch.equal(policy.model.get_parameter(name).full_tensor(), read.get_parameter(name))  # type: ignore[operator]


def test_the_estimates_know_what_is_idle(tmp_path: Path) -> None:
    path = copy_of("gemma3", tmp_path, text_alone=True)
    facts, sizes = facts_of(path), sizes_of(path)
    assert facts.idle == sizes.idle > 0 and facts.parameters == sizes.parameters
    assert sizes.trained == sizes.parameters - sizes.idle and sizes.tower is None
    assert facts.state_bytes(path) == 16 * sizes.trained + 4 * sizes.idle
    assert facts.sent_bytes(path) == 4 * (2 * sizes.trained + sizes.idle)
    assert (facts.tower, facts.image_token, facts.proven) == (None, None, False)
    assert not any(word in facts.linear for word in ("fc1", "out_proj")), "linear layers of the text model alone"


def test_an_adapter_for_such_a_model_is_refused(tmp_path: Path) -> None:
    model = copy_of("mistral3", tmp_path).model_copy(update={"lora": LoraConfig()})
    with pytest.raises(ValueError, match=r"model.lora: .* \(mistral3\) is a multimodal model that is trained on text"):
        check_adapter(model, loading.read_config(model))


@pytest.mark.parametrize("kind", long_but(["qwen3_5", "qwen2_5_vl", "qwen3_vl", "gemma3"], 1))
def test_a_model_that_reads_images_is_trained_on_text_alone_if_the_run_says_so(
    kind: str, mesh: Any, pair: Pair, tmp_path: Path
) -> None:
    model = copy_of(kind, tmp_path, text_alone=True)
    policy, facts = policy_of(model, mesh), facts_of(model)
    assert policy.sight is None and facts.text_alone and (facts.tower, facts.image_token) == (None, None)
    assert {name for name in policy.frozen_names()} == {
        name for name, _ in policy.full_weights() if TOWER.search(f".{name}")
    }
    assert facts.idle == sizes_of(model).idle > 0
    found = certify(model, True, mesh, pair)
    assert found.faults == [] and not any(check.what.startswith("images") for check in found.checks)
    with pytest.raises(ValueError, match=r"model.lora: .* is a multimodal model that is trained on text alone"):
        check_adapter(model.model_copy(update={"lora": LoraConfig()}), loading.read_config(model))


def test_layers_that_attend_to_images_alone_are_refused() -> None:
    config = AutoConfig.for_model("mllama").to_dict()
    (line,) = unsupported(config)
    assert line.startswith("its layers [3, 8, 13, 18, 23, 28, 33, 38] attend to images alone, and text")


@pytest.mark.parametrize(
    ("config", "alone"),
    [
        ({"model_type": "mistral3", "text_config": {}, "vision_config": {}}, True),
        ({"model_type": "gemma3", "text_config": {}, "vision_config": {}}, False),
        ({"model_type": "qwen2_vl", "vision_config": {}, "hidden_size": 64}, True),
        ({"model_type": "qwen2_5_vl", "text_config": {}, "vision_config": {}}, False),
        ({"model_type": "gemma3_text"}, False),
    ],
)
def test_config_json_says_whether_text_alone_is_trained(config: dict[str, Any], alone: bool) -> None:
    assert trains_text_alone(config) is alone
