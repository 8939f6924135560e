"""Settings of verl, EasyR1, TRL and OpenRLHF become run files that are valid, and every setting is used or listed."""

import re
import resource
from pathlib import Path
from typing import Any

import pytest

from configs.__main__ import main
from configs.checks import check
from configs.critic import rules
from configs.load import ConfigError, load
from configs.migration import easyr1, openrlhf, trl, verl
from configs.migration.convert import convert, write_new
from configs.migration.draft import UNKNOWN
from configs.migration.settings import read_settings
from configs.schema import Config, CriticConfig

GIVEN = Path(__file__).parent / "given"
PAGE = Path(__file__).parents[3] / "docs/from-other-systems.md"
FILES = {
    "verl.sh": "verl",
    "easyr1.yaml": "EasyR1",
    "trl.yaml": "TRL",
    "trl_script.py": "TRL",
    "openrlhf.sh": "OpenRLHF",
}


def run_of(name: str, tmp_path: Path) -> Config:
    out = tmp_path / "run.yaml"
    assert main(["--from", str(GIVEN / name), "--out", str(out)]) == 0
    return load([str(out)], {"HOME": "/home/user"})


@pytest.mark.parametrize("name", FILES)
def test_the_run_file_is_valid(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_of(name, tmp_path)
    check(config, files=())
    assert f"settings of {FILES[name]}:" in capsys.readouterr().err
    assert f"settings of {FILES[name]}" in (tmp_path / "run.yaml").read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize("name", FILES)
def test_every_setting_is_used_or_listed(name: str) -> None:
    _, draft = convert(GIVEN / name)
    unknown = [line for line in draft.missing if line.endswith(UNKNOWN)]
    assert [line.partition(": ")[0] for line in unknown] == (
        ["actor_rollout_ref.rollout.made_up_key"] if name == "verl.sh" else []
    )


def value(config: Config, key: str) -> Any:
    held: Any = config
    for part in key.split("."):
        held = getattr(held, part)
    return held


@pytest.mark.parametrize(
    ("settings", "key", "keys"),
    [
        ("algorithm.gamma=0.9", "algorithm.gamma", {}),
        (f"{verl.STYLE}=wsd", verl.STYLE, {"schedule": "constant"}),
        (f"{verl.STYLE}=cosine", "", {"schedule": "cosine"}),
        (f"{verl.RATIO}=0.1", verl.RATIO, {"schedule": "constant"}),
        (f"{verl.RATIO}=0.1 trainer.total_training_steps=50", "", {"warmup_versions": 20}),
    ],
)
def test_what_a_run_file_cannot_say_is_listed(settings: str, key: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """50 steps of 1,024 prompts in updates of 256 are 200 versions."""
    (tmp_path / "run.sh").write_text(f"python -m verl actor_rollout_ref.model.path=m {settings}\n")
    _, draft = convert(tmp_path / "run.sh")
    assert any(line.startswith(f"{key}: ") for line in draft.missing) == bool(key)
    assert keys.items() <= draft.tree["learner"].items()


def test_a_frozen_tower_of_easyr1_is_frozen_with_its_merger(tmp_path: Path) -> None:
    text = (GIVEN / "easyr1.yaml").read_text(encoding="utf-8")
    (tmp_path / "easyr1.yaml").write_text(text.replace("freeze_vision_tower: false", "freeze_vision_tower: true"))
    _, draft = convert(tmp_path / "easyr1.yaml")
    assert draft.tree["model"]["freeze"] == ["vision", "projector"]
    vision = (PAGE.parent / "vision.md").read_text(encoding="utf-8")
    assert "`freeze_vision_tower: true` is `freeze: [vision, projector]`" in " ".join(vision.split())
    assert "| `actor.model.freeze_vision_tower` | `model.freeze: [vision, projector]` |" in PAGE.read_text()


DAPO = """
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-32B"} # the base model
n_gpus=${N_GPUS-8}
max_prompt_length=$((1024 * 2))
max_response_length=$((max_prompt_length * (8 + 2)))
train_prompt_bsz=512
python3 -m recipe.dapo.main_dapo actor_rollout_ref.model.path="${MODEL_PATH}" \\
    data.train_batch_size=${train_prompt_bsz} data.max_prompt_length=${max_prompt_length} \\
    data.train_files="${DATA:-${RAY_DATA_HOME}/data/dapo.parquet}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$(($train_prompt_bsz / 16)) trainer.n_gpus_per_node="${n_gpus}" \\
    data.max_response_length=${max_response_length} trainer.nnodes=$((nobody+1))
"""
"""As verl's own recipes are written: defaults of variables, and arithmetic."""


def test_defaults_of_variables_and_arithmetic_of_a_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(DAPO)
    found = read_settings(tmp_path / "run.sh")
    home = "${oc.env:HOME}/verl"
    assert found["actor_rollout_ref.model.path"] == f"{home}/models/Qwen2.5-32B"
    assert found["data.train_files"] == f"{home}/data/dapo.parquet"
    assert (found["data.max_prompt_length"], found["data.max_response_length"]) == (2048, 20480)
    assert (found["actor_rollout_ref.actor.ppo_mini_batch_size"], found["trainer.n_gpus_per_node"]) == (32, 8)
    assert found["trainer.nnodes"] == "$((nobody+1))", "what cannot be computed stays"


TINY_ZERO = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m critic.model.path={critic} algorithm.lam={lam} "
    "data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64 critic.optim.lr=2e-5 "
    "critic.cliprange_value=0.4 critic.ppo_epochs={epochs} critic.ppo_micro_batch_size=8 trainer.critic_warmup=10\n"
)


@pytest.mark.parametrize(("epochs", "lam", "critic"), [(1, 1.0, "m"), (2, 0.95, "other")])
def test_ppo_of_verl_becomes_a_critic(tmp_path: Path, epochs: int, lam: float, critic: str) -> None:
    """Its estimator is the default, gae; a step has four updates, which are versions."""
    (tmp_path / "run.sh").write_text(TINY_ZERO.format(epochs=epochs, lam=lam, critic=critic))
    _, draft = convert(tmp_path / "run.sh")
    config = Config.model_validate(draft.tree | {"data": {"train": "d"}, "run": {"versions": 400}})
    assert config.algorithm.advantage == "gae" and config.algorithm.loss == "ppo"
    clip = 0.4 if epochs > 1 else None
    assert config.algorithm.critic == CriticConfig(learning_rate=2e-5, warmup_versions=40, updates=epochs, clip=clip)
    assert list(rules(config)) == [] and config.batch.samples == 2
    missing = [line.partition(":")[0] for line in draft.missing]
    assert [name for name in missing if name.startswith("critic") or name.endswith("lam")] == (
        ["algorithm.lam", "critic.model.path"] if epochs > 1 else []
    )
    assert any(line.startswith("critic.ppo_micro_batch_size: the critic is sharded") for line in draft.notes)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "verl.sh",
            {  # 1,024 prompts in four updates of 256
                "batch.groups": 256, "batch.samples": 5, "batch.max_staleness": 3, "run.versions": 400,
                "learner.checkpoint_every": 80, "eval.every": 20, "algorithm.loss": "ppo", "algorithm.dual_clip": 3.0,
                "algorithm.advantage": "group_std", "algorithm.aggregation": "token", "algorithm.reference_kl": 0.001,
                "learner.betas": (0.9, 0.999), "learner.weight_decay": 0.01, "learner.ranks": 4, "rollout.servers": 2,
                "rollout.tensor_parallel": 2, "data.train": Path("/home/user/data/gsm8k/train.parquet"),
                "model.path": "Qwen/Qwen2.5-7B-Instruct", "sampling.max_tokens": 1024, "log.trackers": ["wandb"],
            },
        ),
        (
            "easyr1.yaml",
            {
                "batch.groups": 128, "batch.samples": 5, "batch.max_staleness": 3, "algorithm.reference_kl": 0.01,
                "data.train": Path("data/math12k/train.parquet"), "data.max_pixels": 4194304, "run.seed": 1,
                "reward.function": "./examples/reward_function/math.py:compute_score", "learner.keep_checkpoints": 3,
                "algorithm.clip_high": 0.3, "rollout.tensor_parallel": 2, "model.freeze": [],
            },
        ),
        (
            "trl.yaml",
            {  # 8 x 4 x 4 = 128 answers
                "batch.groups": 8, "batch.samples": 16, "run.versions": 300, "algorithm.aggregation": "constant",
                "algorithm.advantage": "group_mean", "algorithm.clip_high": 0.28, "algorithm.overlong": "mask",
                "model.lora.rank": 32, "model.lora.alpha": 64, "model.lora.targets": ["q_proj", "v_proj"],
                "learner.schedule": "cosine", "learner.warmup_versions": 5, "sampling.temperature": 0.9,
            },
        ),
        (
            "trl_script.py",
            {
                "model.path": "Qwen/Qwen2-0.5B-Instruct", "run.versions": 20, "sampling.max_tokens": 128,
                "algorithm.reference_kl": 0.04, "learner.schedule": "linear", "run.name": "Qwen2-0.5B-GRPO",
            },
        ),
        (
            "openrlhf.sh",
            {  # 64 prompts x 8 answers in four updates of 128 answers
                "batch.groups": 16, "batch.samples": 8, "batch.max_staleness": 3, "algorithm.advantage": "group_std",
                "algorithm.clip_high": 0.28, "batch.skip_zero_variance": True, "learner.ranks": 4,
                "rollout.servers": 2, "data.columns": {"prompt": "context_messages"}, "sampling.temperature": 0.8,
            },
        ),
    ],
)  # fmt: skip
def test_keys_have_the_meaning_of_their_settings(name: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    config = run_of(name, tmp_path)
    assert {key: value(config, key) for key in wanted} == wanted


def test_epochs_become_versions_once_the_rows_are_known(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "1", "answer": "1"}\n' * 100)
    text = (GIVEN / "openrlhf.sh").read_text(encoding="utf-8").replace("data/prompts.jsonl", f"{tmp_path}/rows.jsonl")
    (tmp_path / "run.sh").write_text(text)
    _, draft = convert(tmp_path / "run.sh")
    assert draft.tree["run"]["versions"] == 2 * 100 // 64 * 4


@pytest.mark.parametrize(
    ("change", "key", "wanted"),
    [
        (("adv_estimator=grpo", "adv_estimator=rloo"), "advantage", "leave_one_out"),
        (
            ("adv_estimator=grpo", "adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False"),
            "advantage",
            "group_mean",
        ),
        (("entropy_coeff=0", "loss_agg_mode=seq-mean-token-mean"), "aggregation", "sequence"),
        (("entropy_coeff=0", "policy_loss.loss_mode=gspo"), "loss", "gspo"),
        (("entropy_coeff=0", "clip_ratio_high=0.28"), "clip_high", 0.28),
    ],
)
def test_algorithms_of_verl(change: tuple[str, str], key: str, wanted: object, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text((GIVEN / "verl.sh").read_text(encoding="utf-8").replace(*change))
    assert convert(tmp_path / "run.sh")[1].tree["algorithm"][key] == wanted


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("absent.yaml", None, "no such file"),
        ("a.yaml", "[1, 2]", "no settings are in it"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.sh", "echo 'unended", "not a shell command"),
        ("a.py", "def (", "not Python"),
        ("a.yaml", "lr: 1", "are of none of verl, EasyR1, OpenRLHF, TRL"),
        (
            "a.sh",
            "verl actor_rollout_ref.model.path=m trainer.nnodes=$NODES",
            "give the script numbers for trainer.nnodes=${oc.env:NODES}",
        ),
        ("a.yaml", "num_generations: many", "a setting of TRL has a value that cannot be"),
        ("a.yaml", "num_generations: 0", "a setting of TRL has a value that cannot be"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line(
    name: str, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["--from", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith(f"--from: {tmp_path / name}")


def test_a_local_folder_is_no_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl.yaml").write_text("num_generations: 8\ndataset_name: data/math\nunset: null\n")
    _, draft = convert(tmp_path / "trl.yaml")
    assert draft.tree["data"]["train"] == "data/math/train.parquet"
    (tmp_path / "data/math").mkdir(parents=True)
    _, draft = convert(tmp_path / "trl.yaml")
    assert draft.tree["data"]["train"] == "data/math"
    assert not [line for line in draft.missing if line.startswith("unset")]


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("mine")
    assert main(["--from", str(GIVEN / "trl.yaml"), "--out", str(tmp_path / "run.yaml")]) == 2
    assert "is already there; name another file" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_text() == "mine"
    assert main(["--out", str(tmp_path / "new.yaml")]) == 2
    assert main(["--from", str(GIVEN / "trl.yaml"), "run.yaml"]) == 2


def test_a_file_that_cannot_be_written_whole_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else the next call would find it there, and refuse."""
    out, before = tmp_path / "run.yaml", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # bytes
    try:
        with pytest.raises(ConfigError, match="cannot be written: File too large; name another file"):
            write_new(out, "a text of more bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not out.exists()


def test_variables_of_a_script_are_replaced_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        "A=one\nexport B=${A}/two\nrun \\\n  data.x=$B/c data.y=[\"'a','b'\"] --n 1 2 --on\n"
    )
    found = read_settings(tmp_path / "a.sh")
    assert found == {"data.x": "one/two/c", "data.y": ["a", "b"], "n": [1, 2], "on": True}
    (tmp_path / "a.sh").write_text("run data.x=$HOME/c data.y=1e-6")
    assert read_settings(tmp_path / "a.sh") == {"data.x": "${oc.env:HOME}/c", "data.y": 1e-6}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("algorithm.loss=grpo", "GRPO is algorithm.loss: ppo with algorithm.advantage: group_std"),
        ("algorithm.loss=GRPO", "GRPO is algorithm.loss: ppo with algorithm.advantage: group_std"),
        ("algorithm.loss=dapo", "DAPO is algorithm.loss: ppo with clip_high 0.28"),
        ("algorithm.advantage=ppo", "PPO's is gae, with algorithm.loss: ppo"),
        ("algorithm.aggregation=token-mean", "verl's token-mean is token"),
    ],
)
def test_values_of_other_systems_are_refused_with_what_they_are_here(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(["--model.path=m", "--data.train=d", "--reward.function=math", f"--{key}"])


@pytest.mark.parametrize("system", [verl, easyr1, trl, openrlhf])
def test_the_page_has_every_setting_with_another_name(system: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for theirs, ours in system.NAMES.items():
        shown = re.sub(r"^(actor_rollout_ref|worker)\.", "", theirs)
        assert re.search(rf"^\| .*`{re.escape(shown)}`.* \| .*`{re.escape(ours)}`", page, re.M), (theirs, ours)
