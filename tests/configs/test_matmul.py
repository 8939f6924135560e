"""What `learner.matmul: fp8` contradicts, each by its line; what is said of it before a run starts."""

import json
from pathlib import Path

import pytest

from actors.doctor.fp8_gpus import parse_capabilities, without_fp8
from actors.doctor.host import Gpu
from configs.checks import check, check_sft
from configs.explain import explain
from configs.load import ConfigError, load
from configs.resume import changes, settings
from configs.schema import Config

FP8 = "learner.matmul=fp8"
DENSE = {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}


def config(model: Path, *overrides: str) -> Config:
    needed = [f"--model.path={model}", "--data.train=d.parquet", "--reward.function=countdown"]
    return load([*needed, *(f"--{one}" for one in overrides)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"num_hidden_layers": 2}))
    return tmp_path


REFUSED = [
    ("learner.device=cpu", "needs a GPU, but learner.device is cpu"),
    ("model.dtype=float32", "casts bfloat16, but model.dtype is float32; set model.dtype: bfloat16, or"),
    ("learner.compile=false", "casts in compiled code, but learner.compile is false; set learner.compile: auto, or"),
    ("learner.cpu_offload=true", "is compiled, which is not tested with learner.cpu_offload: true; set that to fal"),
    ("learner.cpu_offload=optimizer", "is not tested with learner.cpu_offload: optimizer; set that to false, or"),
    ("model.lora={}", "is not tested with model.lora; set model.lora: null, or"),
    ("algorithm.advantage=gae", "is not tested with a critic (algorithm.advantage: gae); set another advantage, or"),
]


@pytest.mark.parametrize(("option", "line"), REFUSED, ids=lambda text: text.partition("=")[0])
def test_each_contradiction_has_its_line(option: str, line: str, model: Path) -> None:
    found = []
    for options in ([FP8, option], [option]):
        with pytest.raises(ConfigError) as refused:
            check(config(model, *options), files=(), further=["last"])
        found.append([line for line in refused.value.problems if line.startswith("learner.matmul")])
    (ours,), none = found
    assert ours.startswith(f"learner.matmul: fp8 {line}") and ours.endswith("set learner.matmul: bfloat16")
    assert not none


def test_experts_are_refused(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(DENSE | {"model_type": "qwen3_moe", "num_experts": 8}))
    with pytest.raises(ConfigError, match=r"learner\.matmul: fp8 has no products of experts, and .* has 8 a layer"):
        check(config(model, FP8), files=())


def test_what_is_allowed_is_explained_and_may_change(model: Path) -> None:
    plain, fp8 = config(model), config(model, FP8)
    check(fp8, files=())
    said = [line for line in explain(fp8) if line.startswith("matmul: ")]
    assert len(said) == 2 and "in bfloat16 stay head, embeddings, norms, attention" in said[0] and "price" in said[1]
    assert not any(line.startswith("matmul: ") for line in explain(plain))
    changed = [str(change) for change in changes(settings(plain), fp8) if change.key.startswith("learner.")]
    assert changed == ['learner.matmul: "bfloat16" -> "fp8"']
    assert (plain.weights.tolerance, fp8.weights.tolerance) == (0.05, 1.0)
    assert config(model, FP8, "weights.probe_tolerance=0.2").weights.tolerance == 0.2


def test_supervised_fine_tuning_obeys_the_same_rules(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.matmul: fp8 needs a GPU, but learner\.device is cpu"):
        check_sft(config(model, "sft.rows=8", FP8, "learner.device=cpu"), files=())


def test_a_launch_asks_the_driver_which_gpus_multiply_in_fp8(model: Path) -> None:
    known = parse_capabilities("GPU-a, 9.0\nGPU-b, 8.0\nGPU-c, [N/A]\n")
    assert known == {"GPU-a": (9, 0), "GPU-b": (8, 0)}
    gpus = {name: Gpu(f"NVIDIA {name}", 1, 0, f"GPU-{name}") for name in "abc"}
    fp8, needs = config(model, FP8), "learner.matmul: fp8 needs a GPU with compute capability 8.9 or later, and"
    assert without_fp8(fp8, [gpus["a"], gpus["c"]], known) == []
    old = f"{needs} NVIDIA b has 8.0; set learner.matmul: bfloat16"
    assert without_fp8(fp8, [gpus["a"], gpus["b"], gpus["b"]], known) == [old]
    assert without_fp8(fp8, [], {}) == [f"{needs} this machine has none; set learner.matmul: bfloat16"]
    assert without_fp8(config(model), [gpus["b"]], known) == []
    assert without_fp8(config(model, FP8, "cluster.address=a:1"), [], {}) == []
