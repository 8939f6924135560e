"""`algorithm.critic`: what is refused by name, what a run may change, and what `configs` says of a critic."""

import json
from pathlib import Path

import pytest

from configs.checks import check
from configs.critic import STATE_BYTES, rules
from configs.explain import explain
from configs.load import ConfigError, load
from configs.resume import changes, settings
from configs.schema import Config, CriticConfig

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]
GAE = "algorithm.advantage=gae"


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


def test_all_defaults_are_accepted() -> None:
    check(config(GAE), files=())
    assert config(GAE).algorithm.critic == CriticConfig()
    full = config(
        GAE,
        "algorithm.critic={learning_rate: 2e-5, warmup_versions: 5, updates: 2, clip: 0.2, gamma: 0.9, whiten: false}",
    )
    check(full, files=())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["algorithm.critic.learning_rate=1e-4"],
            "critic.learning_rate: has no effect with algorithm.advantage group_mean; set algorithm.adv",
        ),
        (["algorithm.critic.gamma=0.5", "algorithm.advantage=group_std"], "critic.gamma: has no effect with"),
        ([GAE, "algorithm.critic.clip=0.2"], "clip: 0.2 has no effect with algorithm.critic.updates 1"),
        ([GAE, "algorithm.critic.warmup_versions=100"], "warmup_versions: 100 is not below run.versions 100"),
        ([GAE, "model.lora={}"], "algorithm.advantage: gae with model.lora: a critic is trained in full"),
        ([GAE, "learner.cpu_offload=true"], "algorithm.advantage: gae with learner.cpu_offload: true"),
        ([GAE, "learner.context_parallel=2", "learner.ranks=2"], "gae with learner.context_parallel: 2: a critic comp"),
        ([GAE, "data.demonstrations.path=a.jsonl"], "gae with data.demonstrations: nobody has trained both"),
        ([GAE, "algorithm.loss=topr"], "algorithm.loss: topr weights whole samples"),
        ([GAE, "algorithm.opsm_delta=0.1"], "algorithm.opsm_delta: 0.1 masks whole samples"),
        ([GAE, "algorithm.turn_discount=0.9"], "set turn_discount: null; algorithm.critic.gamma discounts turns"),
    ],
)
def test_what_contradicts_a_critic_is_refused_by_name(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(config(*given), files=())
    assert len(error.value.problems) == 1 and words in error.value.problems[0], error.value.problems


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, "has 8 experts, and a critic is of dense models"),
        (
            {"vision_config": {"depth": 1}, "image_token_id": 5, "model_type": "qwen3_vl"},
            "reads images, and a critic reads text alone",
        ),
        ({"vision_config": {"depth": 1}, "model_type": "mistral3"}, "is multimodal, and a critic is of text models"),
    ],
)
def test_models_that_no_test_has_shown_are_refused_by_name(tmp_path: Path, facts: dict, words: str) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **shape, **facts}))
    assert [line for line in rules(config(GAE, f"model.path={tmp_path}")) if words in line]


@pytest.mark.parametrize(
    "given",
    ["learning_rate=0", "learning_rate=inf",
     "updates=0", "updates=17", "clip=0", "gamma=1.01", "gae_lambda=-0.1", "warmup_versions=-1",
     "head=shared", "model=other"],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(GAE, f"algorithm.critic.{given}")
    assert f"algorithm.critic.{given.partition('=')[0]}" in error.value.problems[0]


def test_a_run_may_change_the_learning_rate_and_nothing_else() -> None:
    before = settings(config(GAE))
    (change,) = changes(before, config(GAE, "algorithm.critic.learning_rate=1e-4"))
    assert change.key == "algorithm.critic.learning_rate"
    for other in ("algorithm.critic.gamma=0.5", "algorithm.critic.updates=2", "algorithm.advantage=group_mean"):
        with pytest.raises(ConfigError, match="may not change while the run goes on"):
            changes(before, config(GAE, other))


def test_explain_says_what_a_critic_costs() -> None:
    plain, valued = (
        "\n".join(explain(config(*given), 100)) for given in ([], [GAE, "algorithm.critic.warmup_versions=7"])
    )
    assert "trains a critic, a second copy of the model: one forward pass, a step of its own" in valued
    assert f"{STATE_BYTES} bytes per parameter" in valued and "until then, and the policy learns nothing" in valued
    assert "12 bytes per parameter and checkpoint" in plain and "24 bytes per parameter and checkpoint" in valued
    assert "critic" not in plain
    skipping = "\n".join(explain(config(GAE, "batch.skip_zero_variance=true"), 100))
    assert "the critic never sees them; set batch.skip_zero_variance: false" in skipping
