"""`model.lora`: what switches it on, what contradicts it, the disk it takes, and that a run keeps it."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from configs.checks import LORA_ENGINE_KEYS, check
from configs.explain import disk_bytes, explain
from configs.load import ConfigError, load, write
from configs.model_facts import model_facts
from configs.resume import changes, fingerprint, settings
from configs.schema import Config, LoraConfig

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]
EMPTY = "write lora: {} for all its defaults, null to do without, or keys below it"


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config(*overrides), files=())
    return list(error.value.problems)


def with_lora(tmp_path: Path, text: str) -> LoraConfig | None:
    (tmp_path / "run.yaml").write_text(f"model:\n  path: m\n{text}")
    return load([str(tmp_path / "run.yaml"), *NEEDED]).model.lora


def test_the_scale_is_alpha_over_rank() -> None:
    assert config("model.lora.alpha=16").model.lora.scale == 0.5
    assert config("model.lora={rank: 8}").model.lora.scale == 1.0


def test_an_alpha_of_the_rank_is_no_other_setting_than_none() -> None:
    said, unsaid = config("model.lora={rank: 8, alpha: 8}"), config("model.lora={rank: 8}")
    assert said.model.lora == unsaid.model.lora and said.model.lora.scale == 1.0
    assert fingerprint(said) == fingerprint(unsaid)
    assert changes(settings(said), unsaid) == changes(settings(unsaid), said) == []
    written = {"rank": 8, "alpha": 8.0, "targets": "all"}
    assert changes(settings(unsaid) | {"model.lora": written}, said) == []
    with pytest.raises(ConfigError, match=r"model.lora: .*alpha.*4.* -> "):
        changes(settings(unsaid) | {"model.lora": written | {"alpha": 4.0}}, said)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("  lora: {}\n", LoraConfig()),
        ("  lora:\n    rank: 8\n", LoraConfig(rank=8)),
        ("  lora: {targets: [q_proj]}\n", LoraConfig(targets=["q_proj"])),
        ("  lora: null\n", None),
        ("  lora: ~\n", None),
        ("", None),
    ],
)
def test_what_is_written_is_what_is_trained(tmp_path: Path, text: str, wanted: LoraConfig | None) -> None:
    assert with_lora(tmp_path, text) == wanted


@pytest.mark.parametrize("text", ["  lora:\n", "  lora: # the defaults\n", "  lora:\n    # rank: 8\n"])
def test_a_key_without_a_value_does_not_train_all_weights(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_lora(tmp_path, text)
    assert str(error.value) == f"model.lora: nothing stands after it ({tmp_path / 'run.yaml'}:3); {EMPTY}"


def test_an_override_without_a_value_neither() -> None:
    with pytest.raises(ConfigError) as error:
        config("model.lora=")
    assert str(error.value) == f"model.lora: nothing stands after it (--model.lora); {EMPTY}"
    assert config("batch.target_staleness=").batch.target_staleness is None  # where null switches nothing off


@pytest.mark.parametrize("lora", ["null", "{}", "{rank: 8, alpha: 4, targets: [q_proj]}"])
def test_a_written_config_reads_back(tmp_path: Path, lora: str) -> None:
    given = config(f"model.lora={lora}")
    write(given, tmp_path / "config.yaml")
    assert load([str(tmp_path / "config.yaml")]) == given


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rank=0", "model.lora.rank: 0 is not a whole number >= 1 and <= 512 (--model.lora.rank)"),
        ("rank=513", "model.lora.rank: 513 is not a whole number >= 1 and <= 512 (--model.lora.rank)"),
        ("alpha=0", "model.lora.alpha: 0 is not a number > 0 or null (--model.lora.alpha)"),
        ("rnak=8", "model.lora.rnak: no such key (--model.lora.rnak); did you mean model.lora.rank?"),
    ],
)
def test_bounds(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(f"model.lora.{override}")
    assert str(error.value) == line


def test_nothing_to_train_is_refused() -> None:
    line = "model.lora.targets: [] leaves nothing to train; name linear layers, as [q_proj, v_proj], or set all"
    assert refused("model.lora.targets=[]") == [line]


def test_frozen_parts_are_refused() -> None:
    line = "model.freeze: [vision] with model.lora, which trains an adapter of the text model alone; remove it"
    assert refused("model.lora={}", "model.freeze=[vision]") == [line]


def test_engine_keys_of_ours_are_refused_with_an_adapter_only() -> None:
    given = [f"rollout.engine.{name}=1" for name in LORA_ENGINE_KEYS]
    lines = [f"rollout.engine.{name}: Headrace sets it with model.lora; remove the key" for name in LORA_ENGINE_KEYS]
    assert refused("model.lora={}", *given) == lines
    check(config("rollout.engine.load_format=dummy"), files=())
    (line,) = refused("model.lora={}", "rollout.engine.quantization=fp8")
    assert line.startswith("rollout.engine.quantization: fp8 quantises policies as they are pushed")


def test_a_run_keeps_its_adapter() -> None:
    full, adapter, other = config(), config("model.lora={}"), config("model.lora.rank=8")
    assert len({fingerprint(one) for one in (full, adapter, other)}) == 3
    with pytest.raises(ConfigError, match=r"model.lora: null -> .*it may not change"):
        changes(settings(full), adapter)


def header(folder: Path, tensors: dict[str, tuple[int, ...]]) -> Path:
    """A model's folder as far as its facts are read: no tensor is stored."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    table: dict[str, Any] = {name: {"dtype": "F32", "shape": shape} for name, shape in tensors.items()}
    raw = json.dumps(table).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    return folder


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """Two blocks with a linear layer of each kind, experts, and a tower."""
    block = {"self_attn.q_proj.weight": (6, 4), "self_attn.q_proj.bias": (6,), "mlp.up_proj.weight": (8, 4)}
    block |= {"input_layernorm.weight": (4,), "mlp.experts.0.down_proj.weight": (4, 8)}
    tensors = {f"model.layers.{number}.{name}": shape for number in range(2) for name, shape in block.items()}
    tensors |= {"model.embed_tokens.weight": (100, 4), "model.visual.blocks.0.mlp.fc.weight": (3, 3)}
    folder = header(tmp_path / "model", tensors)
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}}')
    return folder


def test_targets_that_the_model_lacks_are_refused(known: Path) -> None:
    path = f"model.path={known}"
    lines = refused(path, "model.lora.targets=[q_proj, down_proj, lm_head]")
    has = f"the blocks of {known} have q_proj, up_proj; name some of these, or set all"
    assert lines == [f"model.lora.targets: {name}: {has}" for name in ("down_proj", "lm_head")]
    check(config(path, "model.lora.targets=[up_proj]"), files=())


@pytest.mark.parametrize(("targets", "sizes"), [("all", 2 * (6 + 4) + 2 * (8 + 4)), ("[q_proj]", 2 * (6 + 4))])
def test_disk_is_the_adapter_s(known: Path, targets: str, sizes: int) -> None:
    """Weight, two moments and an export, each of 4 bytes, in each of the three checkpoints on disk."""
    run = config(f"model.path={known}", f"model.lora={{rank: 5, targets: {targets}}}")
    parameters = 5 * sizes
    assert model_facts(str(known)).adapter_parameters(run.model) == parameters
    assert disk_bytes(run) == 3 * 16 * parameters
    text = "\n".join(explain(run))
    assert "parameters x (3 x 16 + 0 bytes)" in text and "none of them trained with model.lora" in text


def test_state_in_memory(known: Path) -> None:
    facts, adapter = model_facts(str(known)), config(f"model.path={known}", "model.lora.rank=5").model
    assert facts.state_bytes(config().model) == 16 * facts.parameters
    assert facts.state_bytes(adapter) == 16 * 5 * 44 + 2 * facts.parameters


def test_a_reference_takes_no_copy() -> None:
    lines = ["\n".join(explain(config("algorithm.reference_kl=0.1", f"model.lora={lora}"))) for lora in ("null", "{}")]
    assert "keeps a frozen copy of the model" in lines[0] and "copy of the model and costs" not in lines[1]
    assert "the reference is the model without its adapter" in lines[1]
