"""What a run file may ask of a model with experts, known from its config.json; and what its routes take."""

import json
from pathlib import Path

import pytest

from configs.checks import check, max_group_bytes
from configs.expert_models import FAILING, PROVEN, described
from configs.load import ConfigError, load
from configs.model_facts import expert_layers, model_facts
from configs.schema import Config

REPLAY = "rollout.routing_replay=true"
QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
DENSE = {"model_type": "qwen3", "num_hidden_layers": 4}


def config(folder: Path, model: dict[str, object], *overrides: str) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    needed = [f"--model.path={folder}", "--data.train=d.parquet", "--reward.function=countdown"]
    return load([*needed, *(f"--{one}" for one in overrides)])


CUDA = "rollout.device=cuda"
CANNOT = "with which policies cannot be loaded into the 128 experts of MODEL;"
ENGINE, TRUE = "rollout.engine", "rollout.routing_replay: true"


@pytest.mark.parametrize(
    ("model", "overrides", "line"),
    [
        (
            {**QWEN, "model_type": "gpt_oss"},
            ["rollout.device=cpu"],
            "model.path: MODEL is of type gpt_oss, of which vLLM on this device (cpu) keeps the experts of an earlier "
            "policy; use another device, or a model that docs/experts.md lists",
        ),
        (
            {**QWEN, "model_type": "afmoe"},
            ["rollout.device=cpu"],
            "model.path: MODEL is of type afmoe, of which vLLM on this device (cpu) cannot load the bias of a router's "
            "scores again; use another device, or a model that docs/experts.md lists",
        ),
        (
            {**QWEN, "model_type": "new_moe"},
            ["weights.probe_every=0"],
            "weights.probe_every: 0, and MODEL is of type new_moe, whose experts only a probe of the first policy "
            "compares with the learner; set it to 1",
        ),
        (
            {**QWEN, "model_type": "gpt_oss"},
            [CUDA, "weights.probe_every=0", "rollout.tensor_parallel=2"],
            "weights.probe_every: 0, and MODEL is of type gpt_oss, whose experts only a probe of the first policy "
            "compares with the learner; set it to 1",
        ),
        (QWEN, [f"{ENGINE}.quantization=fp8"], f"{ENGINE}.quantization: fp8, {CANNOT} remove the key"),
        (
            QWEN,
            [f"{ENGINE}.enable_expert_parallel=true"],
            f"{ENGINE}.enable_expert_parallel: True, {CANNOT} remove the key",
        ),
        (QWEN, [f"{ENGINE}.enable_eplb=true"], f"{ENGINE}.enable_eplb: True, {CANNOT} remove the key"),
        (QWEN, [f"{ENGINE}.moe_backend=aiter"], f"{ENGINE}.moe_backend: aiter, {CANNOT} set one of auto, triton"),
        (DENSE, [REPLAY], f"{TRUE}, but MODEL (qwen3) has no experts; set it to false"),
        (
            {**QWEN, "model_type": "glm4_moe"},
            [REPLAY],
            f"{TRUE}, but MODEL is of type glm4_moe, and the learner replays routes of qwen3_moe only; set it to false",
        ),
        (
            QWEN,
            [REPLAY, "rollout.device=cpu"],
            f"{TRUE} needs a GPU, but rollout.device is cpu, where vLLM returns no routes; set it to false",
        ),
        (
            QWEN,
            [REPLAY, f"{ENGINE}.enable_prefix_caching=false"],
            f"{TRUE} needs vLLM's prefix cache; remove {ENGINE}.enable_prefix_caching, or set it to false",
        ),
        (
            QWEN,
            [REPLAY, f"{ENGINE}.decode_context_parallel_size=2"],
            f"{TRUE}, and with {ENGINE}.decode_context_parallel_size 2 vLLM returns no routes; remove one of them",
        ),
        (
            QWEN,
            [f"{ENGINE}.enable_return_routed_experts=true"],
            f"{ENGINE}.enable_return_routed_experts: True contradicts rollout.routing_replay False; remove it and set "
            "rollout.routing_replay",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, model, overrides, line):
    with pytest.raises(ConfigError) as caught:
        check(config(tmp_path / "m", model, *overrides), files=())
    assert list(caught.value.problems) == [line.replace("MODEL", str(tmp_path / "m"))]


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (QWEN, [REPLAY, "rollout.engine.moe_backend=triton"]),
        ({**QWEN, "model_type": "olmoe"}, ["rollout.device=cpu"]),
        ({**QWEN, "model_type": "mixtral"}, []),
        ({**QWEN, "model_type": "gpt_oss"}, [CUDA]),
        ({**QWEN, "model_type": "new_moe"}, []),
        (QWEN, ["weights.probe_every=0"]),
        (QWEN, ["rollout.device=cpu", "rollout.tensor_parallel=2", "weights.probe_every=0"]),
        (QWEN, [CUDA, "rollout.tensor_parallel=2"]),
        ({**QWEN, "model_type": "gpt_oss"}, [CUDA, "rollout.tensor_parallel=2"]),
        (DENSE, ["rollout.engine.enable_expert_parallel=true", "rollout.engine.quantization=fp8"]),
        ({}, [REPLAY]),
    ],
)
def test_what_can_be_is_not(tmp_path, model, overrides):
    check(config(tmp_path / "m", model, *overrides), files=())


def test_a_sample_grows_by_its_routes(tmp_path):
    tokens = 1024 + 1024
    plain = config(tmp_path / "m", QWEN, "batch.samples=4")
    replayed = config(tmp_path / "m", QWEN, "batch.samples=4", REPLAY)
    assert max_group_bytes(plain) == 4 * tokens * 13 and max_group_bytes(replayed) == 4 * tokens * (13 + 48 * 8)
    many = {**QWEN, "num_experts": 257, "mlp_only_layers": [0, 3], "decoder_sparse_step": 2}
    assert expert_layers(many) == [layer for layer in range(1, 48, 2) if layer != 3]
    config(tmp_path / "m", many)
    assert model_facts(str(tmp_path / "m")).route_bytes == 23 * 8 * 2


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 64}, 64),
        ({"model_type": "doge", "num_experts": 16384, "is_moe": True}, 16384),
        ({"model_type": "doge", "num_experts": 16384, "is_moe": False}, 0),
        ({"model_type": "nemotron_h", "n_routed_experts": 8, "layers_block_type": ["mlp", "moe"]}, 8),
        ({"model_type": "nemotron_h", "n_routed_experts": 8, "layers_block_type": ["mamba", "mlp"]}, 0),
        ({"model_type": "nemotron_h", "n_routed_experts": 8, "layers_block_type": ["mamba", "attention"]}, 0),
        ({"model_type": "nemotron_h", "n_routed_experts": 8, "hybrid_override_pattern": "M*M-"}, 0),
        ({"model_type": "nemotron_h", "n_routed_experts": 8, "hybrid_override_pattern": "M*ME"}, 8),
        ({"model_type": "gemma4_text", "num_experts": 8, "enable_moe_block": False}, 0),
        ({"model_type": "gemma4_text", "num_experts": 8, "enable_moe_block": True}, 8),
        ({"model_type": "gemma4", "text_config": {"num_experts": 8, "enable_moe_block": False}}, 0),
        ({"model_type": "gemma4", "text_config": {"num_experts": 8, "enable_moe_block": True}}, 8),
        ({"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0, 1], "num_hidden_layers": 2}, 0),
        ({"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 3, "num_hidden_layers": 2}, 0),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8, "first_k_dense_replace": 2, "num_hidden_layers": 2}, 0),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8, "first_k_dense_replace": 1, "num_hidden_layers": 2}, 8),
        ({"model_type": "glm_moe_dsa", "n_routed_experts": 8, "mlp_layer_types": ["dense", "dense"]}, 0),
        ({"model_type": "glm_moe_dsa", "n_routed_experts": 8, "mlp_layer_types": ["dense", "sparse"]}, 8),
        (
            {
                "model_type": "glm_moe_dsa",
                "n_routed_experts": 8,
                "mlp_layer_types": ["dense", "sparse"],
                "first_k_dense_replace": 3,
                "num_hidden_layers": 2,
            },
            8,
        ),
        ({"model_type": "jamba", "num_experts": 1}, 0),
        ({"model_type": "afmoe", "num_experts": None}, 0),
        ({"model_type": "granitemoehybrid", "num_local_experts": 8, "layers_block_type": ["mamba"]}, 8),
        ({"model_type": "granitemoehybrid", "num_local_experts": 0}, 0),
    ],
)
def test_which_models_are_mixtures(tmp_path: Path, model: dict[str, object], experts: int) -> None:
    config(tmp_path, model)
    assert model_facts(str(tmp_path)).experts == experts


@pytest.mark.parametrize("model", [{"num_experts": [4, 8]}, {"num_experts": None}, {"text_config": None}])
def test_a_number_that_is_none_is_no_fact(tmp_path: Path, model: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "odd", "num_hidden_layers": 2} | model))
    facts = model_facts(str(tmp_path))
    assert (facts.kind, facts.experts, facts.route_bytes) == ("odd", 0, 0)


def test_the_page_names_the_mixtures_that_were_compared_and_those_that_failed():
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
    assert described() in page
    assert len({(each.kind, each.device) for each in FAILING} & {(m.kind, d) for m in PROVEN for d in m.devices}) == 0
