"""A model's weights are all in its files, or it is refused by name: transformers would make up the others."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from configs.load import ConfigError
from configs.schema import ModelConfig
from learner.model.loading import read_config, read_whole
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


def test_a_model_with_code_of_its_own_is_refused_with_the_key_that_runs_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    with pytest.raises(ConfigError, match=r"needs Python code of its own; read that code and set model.trust_remote_"):
        read_config(ModelConfig(path=str(tmp_path)))
