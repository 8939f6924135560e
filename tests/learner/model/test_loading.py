"""A model's weights are all in its files, or it is refused by name: transformers would make up the others."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from configs.load import ConfigError
from configs.schema import ModelConfig
from learner.certify.process import one_rank
from learner.model.loading import auto_class, build_on_meta, init_random, read_config, read_whole
from learner.model.shrink import small
from tests.harness.world import tiny_model

FILE = "model.safetensors"


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model_is_read(tied: bool, tmp_path: Path) -> None:
    assert read_whole(tiny_model(tmp_path, tied)).num_parameters() > 0


def test_a_weight_that_the_files_lack_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    weights = load_file(tmp_path / FILE)
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        del weights[name]
    save_file(weights, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"files lack 2 weights .*, such as lm_head.weight; correct config.json or"):
        read_whole(model)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ConfigError, match=r"mlp.down_proj.weight of shape \[64, 96\], .* describes \[64, 128\]; "):
        read_whole(model)


def test_a_head_of_its_own_beside_a_config_that_ties_it_is_refused(tmp_path: Path) -> None:
    """transformers would compute with that head, and the learner and servers with the embedding."""
    model = tiny_model(tmp_path, tied=True)
    weights = load_file(tmp_path / FILE)
    head = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights | {"lm_head.weight": head}, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head.weight, which differs from model.embed_tokens.weight, and config"):
        read_whole(model)


@pytest.mark.parametrize("leaf", ["weight_scale", "bias"])
def test_a_tensor_that_no_layer_would_get_is_refused(leaf: str, tmp_path: Path) -> None:
    """transformers leaves it out, and the layer computes something else than the files describe."""
    model, layer = tiny_model(tmp_path), "model.layers.1.mlp.up_proj"
    weights = load_file(tmp_path / FILE)
    other = {"model.layers.9.mlp.up_proj.weight": torch.ones(1), "mtp.x": torch.ones(1)}
    save_file(weights | other | {f"{layer}.{leaf}": torch.ones(96)}, tmp_path / FILE, {"format": "pt"})
    words = rf"files have 1 tensors of layers that have none such in config.json, such as {layer}.{leaf}; correct"
    with pytest.raises(ConfigError, match=words):
        read_whole(model)
    save_file(weights | other, tmp_path / FILE, {"format": "pt"})
    assert read_whole(model).num_parameters() > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_tensors_that_no_layer_needs_are_left_out(family: str, tmp_path: Path) -> None:
    """Files of published models have heads for further tokens, angles of RoPE, scales of embeddings and tied heads."""
    made = AutoModelForCausalLM.from_config(small(AutoConfig.for_model(family)))
    made.save_pretrained(tmp_path)
    weights = load_file(tmp_path / FILE)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    attention, layer = "model.layers.0.self_attn", "model.layers.61"
    names = (
        *("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq", "model.rotary_emb.cos_cached"),
        *("model.embed_tokens.embed_scale",) * (family == "gemma2"),
        *(f"{attention}.rotary_emb.inv_freq", f"{attention}.masked_bias", "mtp.fc.weight"),
        *(f"{layer}.mlp.gate.weight", f"{layer}.shared_head.head.weight", f"{layer}.eh_proj.weight"),
    )
    others = {name: torch.ones(4) for name in names}
    save_file(weights | others | {"lm_head.weight": head.clone()}, tmp_path / FILE, {"format": "pt"})
    read = read_whole(ModelConfig(path=str(tmp_path))).state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in made.state_dict().items())


@pytest.mark.parametrize("family", ["nemotron_h", "gemma3", "qwen3_5", "qwen2_5_vl"])
def test_random_weights_leave_the_buffers_that_the_config_gives(family: str, tmp_path: Path) -> None:
    """Nemotron-H has no angles of RoPE, Gemma 3 scales its embeddings, and each tower has its own."""
    config = small(AutoConfig.for_model(family))
    config.save_pretrained(tmp_path)
    empty = build_on_meta(ModelConfig(path=str(tmp_path)), "sdpa")
    with one_rank():
        init_random(empty, torch.device("cpu"), 1)
    whole = auto_class(config).from_config(config)
    made = dict(empty.named_buffers())
    assert all(torch.equal(made[name].float(), x.float()) for name, x in whole.named_buffers())
    assert all(bool(torch.isfinite(x).all()) for x in empty.parameters())


def test_a_config_is_refused_before_transformers_makes_lists_of_it(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", num_hidden_layers=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]  # transformers makes one of so many
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1001}))
    with pytest.raises(ConfigError) as refused:
        read_config(ModelConfig(path=str(tmp_path)))
    what = "num_hidden_layers in its config.json is 1001, and at most 1,000 are read"
    assert refused.value.problems == (f"model.path: {tmp_path}: {what}; correct it or download the model again",)


def test_a_model_with_code_of_its_own_is_refused_with_the_key_that_runs_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    with pytest.raises(ConfigError, match=r"needs Python code of its own; read that code and set model.trust_remote_"):
        read_config(ModelConfig(path=str(tmp_path)))
