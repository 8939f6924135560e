"""The section sft: what a run file of supervised fine-tuning needs, and what has no effect in one."""

import json
from pathlib import Path

import pytest

from configs.checks import check, check_sft, max_sample_tokens, refuse_sft
from configs.load import ConfigError, load, write
from configs.resume import changes, settings
from configs.schema import Config

NEEDED = ["--model.path=m", "--data.train=d.jsonl", "--sft.rows=8"]
NO_EFFECT = "has no effect in supervised fine-tuning; remove the key"


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


def refused(*overrides: str, rows: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check_sft(config(*overrides), rows=rows, files=())
    return list(error.value.problems)


def test_a_short_file_is_enough_and_reads_back_as_it_was(tmp_path: Path) -> None:
    given = config()
    check_sft(given, files=())
    write(given, tmp_path / "config.yaml")
    again = load([str(tmp_path / "config.yaml")])
    check_sft(again, files=())
    assert again == given and changes(settings(given), again) == []


def test_products_in_fp8_set_no_key_that_has_no_effect(tmp_path: Path) -> None:
    """weights.probe_tolerance has another default beside `learner.matmul: fp8`."""
    given = config("learner.matmul=fp8")
    check_sft(given, files=())
    write(given, tmp_path / "config.yaml")
    check_sft(load([str(tmp_path / "config.yaml")]), files=())
    assert refused("learner.matmul=fp8", "weights.probe_tolerance=1")[0] == f"weights.probe_tolerance: {NO_EFFECT}"


def test_reinforcement_learning_needs_a_reward_as_before() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.function: missing; set it, e\.g\. reward\.function: countdown$"):
        load(NEEDED[:2])
    with pytest.raises(ConfigError, match=r"^reward\.function: missing"):
        load([*NEEDED[:2], "--sft.turns=last"])


def test_each_kind_of_run_refuses_the_file_of_the_other() -> None:
    line = "sft.rows: 8: the run file describes supervised fine-tuning; run it with python -m learner sft"
    for judge in (check, refuse_sft):
        with pytest.raises(ConfigError) as error:
            judge(config())
        assert list(error.value.problems) == [f"{line}, or remove the section sft"]
    assert refused("sft.rows=null", "reward.function=math")[0].startswith(
        "sft.rows: null; set it to the rows of a batch"
    )


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("reward.function=math", "reward.function"),
        ("sampling.temperature=0.7", "sampling.temperature"),
        ("batch.groups=4", "batch.groups"),
        ("algorithm.loss=ppo", "algorithm.loss"),
        ("rollout.servers=2", "rollout.servers"),
        ("rollout.engine={max_model_len: 64}", "rollout.engine.max_model_len"),
        ("rollout.chat.history=keep", "rollout.chat.history"),
        ("weights.probe_every=1", "weights.probe_every"),
        ("buffer.fsync=false", "buffer.fsync"),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens"),
        ("eval.keep_samples=1", "eval.keep_samples"),
        ("data.eval={held: {path: h.jsonl, samples: 4}}", "data.eval.held.samples"),
    ],
)
def test_a_key_without_effect_is_refused(override: str, key: str) -> None:
    assert f"{key}: {NO_EFFECT}" in refused(override)


def test_keys_that_have_an_effect_are_taken() -> None:
    words = ("rollout.chat.template_kwargs={enable_thinking: false}", "data.eval={held: {path: h.jsonl, limit: 4}}")
    check_sft(config(*words, "eval.every=5", "learner.keep_best=1", "data.epochs=2"), rows=400, files=())


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("learner.ranks=9", "learner.ranks: 9 is more than sft.rows 8, a rank would get nothing; raise sft.rows"),
        ("eval.every=5", "eval.every: 5, but data.eval names no rows; name some or set eval.every: null"),
        (
            "learner.keep_best=2",
            "learner.keep_best: 2 keeps checkpoints by their held-out loss, and data.eval names no rows; name some or "
            "set learner.keep_best: 0",
        ),
        (
            "data.epochs=2",
            "data.epochs: 2 x 100 rows = 200, but run.versions 100 x sft.rows 8 = 800 rows; set data.epochs: 8 (or "
            "null) or run.versions: 25",
        ),
        (
            "data.train=reasoning_gym:chain_sum?size=9&seed=1",
            "data.train: reasoning_gym:chain_sum?size=9&seed=1: a generated set holds no demonstrations; write its "
            "rows to a file with answers",
        ),
    ],
)
def test_a_contradiction_is_refused(override: str, line: str) -> None:
    assert line in refused(override, rows=100)


def test_what_only_a_server_computes_otherwise_is_refused_beside_servers_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmoe", "clip_qkv": 8.0}))
    check_sft(config(f"model.path={tmp_path}"), files=())
    with pytest.raises(ConfigError, match=r"clip_qkv in its config\.json is 8\.0, by which transf"):
        check(load([*NEEDED[1:2], f"--model.path={tmp_path}", "--reward.function=math"]), files=())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "is_causal": False}))
    (line,) = refused(f"model.path={tmp_path}")
    assert "is_causal in its config.json is false, so tokens would see later ones" in line


def test_the_longest_row_follows_from_model_and_microbatch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 256}))
    model = f"model.path={tmp_path}"
    assert max_sample_tokens(config(model)) == 256
    assert max_sample_tokens(config(model, "learner.tokens_per_microbatch=128")) == 128
    assert max_sample_tokens(config(model, "sft.max_tokens=64")) == 64
    found = refused(model, "sft.max_tokens=512", "learner.tokens_per_microbatch=400")
    assert f"sft.max_tokens: 512 is more than the 256 positions of {tmp_path}; lower it" in found
    assert "learner.tokens_per_microbatch: 400 is less than sft.max_tokens 512; set it to 512 or more" in found


@pytest.mark.parametrize("key", ["image_dir=.", "min_pixels=9", "max_pixels=null", "max_images=2"])
def test_keys_of_images_have_an_effect_only_where_a_model_sees_them(tmp_path: Path, key: str) -> None:
    seeing = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}, "image_token_id": 5, "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(seeing))
    words = f"model.path={tmp_path}", f"data.{key}"
    check_sft(config(*words), files=())
    line = f"data.{key.partition('=')[0]}: has no effect, because {tmp_path} sees no images; remove the key"
    assert line in refused(*words, "model.text_alone=true")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert line in refused(*words)


def test_bounds_and_folder_of_images_are_judged_as_in_reinforcement_learning(tmp_path: Path) -> None:
    assert "data.min_pixels: 9 is more than data.max_pixels 8; lower it or raise data.max_pixels" in refused(
        "data.min_pixels=9", "data.max_pixels=8"
    )
    with pytest.raises(ConfigError, match=f"data.image_dir: {tmp_path / 'none'}: no such folder"):
        check_sft(config(f"data.image_dir={tmp_path / 'none'}"), files=("data.image_dir",))
