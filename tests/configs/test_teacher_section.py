"""The section teacher: what it means, every contradiction in one line, and what may change between launches."""

import json
from pathlib import Path

import pytest

from buffer.keys import READS
from configs.checks import check, max_group_bytes
from configs.explain import explain
from configs.load import ConfigError, load, write
from configs.origins import variables
from configs.plain_text import visible
from configs.resume import changes, fingerprint, settings
from configs.schema import Config

NEEDED = ["--model.path=m", "--data.train=d.parquet"]
REWARD = "--reward.function=math"


def config(*words: str) -> Config:
    return load([*NEEDED, *(word if word.startswith("--") else f"--teacher.{word}" for word in words)])


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config(*words), files=())
    return list(error.value.problems)


SOURCES = (
    "by_source=[{data_source: openai/gsm8k, model: a, servers: 2}, {data_source: code, url: 'http://h:1', model: b}]"
)


def test_servers_are_numbered_over_all_teachers() -> None:
    teacher = config(REWARD, "model=big", "servers=1", SOURCES, "port=6000").teacher
    assert list(teacher.teachers) == ["", "openai/gsm8k", "code"] and teacher.served == [
        "",
        "openai/gsm8k",
        "openai/gsm8k",
    ]
    assert teacher.urls_of("openai/gsm8k") == ["http://127.0.0.1:6001", "http://127.0.0.1:6002"]
    assert teacher.urls_of("") == ["http://127.0.0.1:6000"] and teacher.urls_of("code") == ["http://h:1"]
    assert teacher.all_gpus == 3


def test_it_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    given = config("model=big", "servers=1", SOURCES, "weight=0.5")
    write(given, tmp_path / "config.yaml")
    assert load([str(tmp_path / "config.yaml")]) == given


def test_with_a_teacher_no_reward_is_needed_and_without_one_it_is() -> None:
    assert config("model=big", "servers=1").reward.function == "none"
    with pytest.raises(ConfigError, match=r"^reward.function: missing"):
        config("weight=2")
    (line,) = refused("--reward.function=none")
    assert line == "reward.function: none leaves nothing to learn from; name a reward, or a teacher in teacher.model"


def test_a_run_without_a_teacher_has_the_fingerprint_of_before() -> None:
    given = config(REWARD)
    assert given.model_dump(exclude_defaults=True) == {
        "model": {"path": "m"},
        "data": {"train": Path("d.parquet")},
        "reward": {"function": "math"},
    }
    assert fingerprint(given) != fingerprint(config(REWARD, "model=big", "servers=1"))


def test_where_a_teacher_is_may_change_and_who_it_is_may_not() -> None:
    before = settings(config(REWARD, "model=big", "servers=1"))
    assert changes(before, config(REWARD, "model=big", "servers=2", "port=6001", "timeout_s=9"))
    for changed in ("model=other", "weight=2", "top_k=4"):
        with pytest.raises(ConfigError, match=f"^teacher.{changed.partition('=')[0]}: "):
            changes(before, config(REWARD, "model=big", "servers=1", changed))


def test_a_teacher_takes_room_in_a_group() -> None:
    plain, taught = config(REWARD), config(REWARD, "model=big", "servers=1")
    assert max_group_bytes(taught) * 13 == max_group_bytes(plain) * 17
    most = config(REWARD, "model=big", "servers=1", "top_k=16")
    assert max_group_bytes(most) * 13 == max_group_bytes(plain) * (17 + 16 * 8)


OWN = ["model=big", "servers=1"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["model=big"],
            "teacher.model: big is served by nobody; set teacher.servers: 1, or the teacher.url of a server",
        ),
        (
            ["servers=1", REWARD],
            "teacher.servers: there is no teacher that it is for; set teacher.model or teacher.url",
        ),
        (["weight=2", REWARD], "teacher.weight: there is no teacher that it is for"),
        ([*OWN, "url=http://h:1"], "teacher.servers: 1, but teacher.url names servers; remove one of the two"),
        (["url=http://h:1"], "teacher.tokenizer: null, so nothing shows the vocabulary behind teacher.url; name the"),
        (["url=http://h:1/v1", "model=b"], "teacher.url: http://h:1/v1: write it as http://HOST:PORT, without /v1"),
        (["url=http://h:99999", "model=b"], "teacher.url: http://h:99999: write it as http://HOST:PORT, without /v1"),
        (["url=h:1", "model=b"], "teacher.url: h:1: write it as http://HOST:PORT, without /v1"),
        ([*OWN, "api_key_env=KEY"], "teacher.api_key_env: the run's own servers ask for the token of the run; remove"),
        ([*OWN, "engine={runner: pooling}"], "teacher.engine.runner: Headrace sets it; remove the key"),
        (
            [*OWN, "engine={max_model_len: 9}"],
            "teacher.engine.max_model_len: 9 is less than samples of up to 2048 tokens",
        ),
        ([*OWN, "port=65536"], "teacher.port: 65536 is not a whole number"),
        (["model=b", "servers=2", "port=65535"], "teacher.port: the last of 2 teacher servers would listen on 65536"),
        (
            ["model=b", "servers=2", "port=5599", "--buffer.address=tcp://127.0.0.1:5600"],
            "teacher.port: 5599 to 5600 for the teacher servers include the buffer's; choose others",
        ),
        (
            [*OWN, "port=5701", "--reward.function=reward_model", "--reward.model=r", "--reward.servers=2"],
            "teacher.port: 5701 to 5701 for the teacher servers include that of reward-1; choose others",
        ),
        (
            ["by_source=[{data_source: a, model: x, servers: 1}, {data_source: a, model: y, servers: 1}]"],
            "teacher.by_source: 2 teachers have data_source a; leave one of them",
        ),
        (["by_source=[{data_source: a}]"], "teacher.by_source.0: it has neither model nor url; set one of them"),
        (
            ["by_source=[{data_source: a, model: x, servers: 1}]", "weight=2"],
            "teacher.weight: teacher has no model or url; write it into the entries of teacher.by_source",
        ),
        (
            ["by_source=[{data_source: a, model: x}]"],
            "teacher.by_source.0.model: x is served by nobody; set teacher.by_source.0.servers: 1",
        ),
        (["by_source=[{model: x}]"], "teacher.by_source.0.data_source: missing"),
        (["by_source=[{data_source: a, wieght: 2}]"], "teacher.by_source.0.wieght: no such key"),
        ([*OWN, "top_k=65"], "teacher.top_k: 65 is not a whole number"),
        (["top_k=8", REWARD], "teacher.top_k: there is no teacher that it is for"),
        ([*OWN, "engine={logprobs_mode: raw_logits}"], "teacher.engine.logprobs_mode: Headrace sets it; remove"),
        ([*OWN, "engine={max_logprobs: 9}"], "teacher.engine.max_logprobs: Headrace sets it; remove the key"),
        (
            [*OWN, "top_k=8", "--algorithm.loss=own.py:loss"],
            "teacher.top_k: 8 with algorithm.loss: own.py:loss: nobody has trained both; set it to null",
        ),
        ([*OWN, "weight=0"], "teacher.weight: 0 is not a number"),
        ([*OWN, "--sampling.temperature=0.7"], "sampling.temperature: 0.7, but a teacher's log-probabilities are of 1"),
        ([*OWN, "--algorithm.loss=gspo"], "algorithm.loss: gspo weights whole samples, and a teacher gives each token"),
        ([*OWN, "--algorithm.loss=topr"], "algorithm.loss: topr weights whole samples"),
        ([*OWN, "--algorithm.opsm_delta=0.1"], "algorithm.opsm_delta: 0.1 masks whole samples"),
        (
            [*OWN, REWARD, "--algorithm.advantage=gae"],
            "algorithm.advantage: gae with a teacher: nobody has trained bot",
        ),
        (
            [*OWN, "--learner.context_parallel=2", "--learner.ranks=2"],
            "learner.context_parallel: 2 with a teacher: nobody has trained both",
        ),
        ([*OWN, REWARD, "--batch.skip_zero_variance=true"], "batch.skip_zero_variance: true leaves out groups that a"),
        (
            [*OWN, "--eval.every=5", "--data.eval=e.parquet"],
            "eval.every: 5, but reward.function is none, so all rewards",
        ),
        ([*OWN, "--data.difficulty={}"], "data.difficulty: it follows rewards, but reward.function is none"),
        ([*OWN, "--learner.keep_best=1"], "learner.keep_best: 1 follows rewards, but reward.function is none"),
        ([*OWN, "--algorithm.overlong=soft"], "algorithm.overlong: soft lowers rewards, but reward.function is none"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(words: list[str], line: str) -> None:
    found = refused(*words)
    assert len(found) == 1 and found[0].startswith(line), found


def test_what_is_no_contradiction() -> None:
    for words in (OWN, [*OWN, REWARD], [SOURCES, REWARD], ["url=http://h:1", "tokenizer=t"], [*OWN, SOURCES]):
        check(config(*words), files=())
    check(config(*OWN, REWARD, "--eval.every=5", "--data.eval=e.parquet", "--algorithm.overlong=mask"), files=())


def test_a_policy_that_reads_images_and_a_short_teacher_are_refused(tmp_path: Path) -> None:
    for name, facts in (
        ("seeing", {"vision_config": {"patch_size": 14}, "image_token_id": 5, "model_type": "qwen3_vl"}),
        ("short", {"max_position_embeddings": 8}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"model_type": "qwen2", "num_hidden_layers": 1} | facts)
        )
    found = refused(*OWN, f"--model.path={tmp_path}/seeing")
    assert any(
        line.endswith("and a teacher gets tokens only; remove the section teacher, or set model.text_alone: true")
        for line in found
    )
    check(config(*OWN, REWARD, f"--model.path={tmp_path}/seeing", "--model.text_alone=true"), files=())
    (line,) = refused(f"model={tmp_path}/short", "servers=1")
    assert line.startswith(
        f"teacher.model: {tmp_path}/short has 8 positions, less than samples of up to 2048 tokens and"
    )


def test_a_teacher_that_vllm_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4, "max_window_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"} | windows))
    source = f"by_source=[{{data_source: math, model: {tmp_path}, servers: 1}}]"
    found = refused(f"model={tmp_path}", "servers=1", source)
    for key, line in zip(("teacher.model", "teacher.by_source.0.model"), found, strict=True):
        assert line.startswith(f"{key}: {tmp_path} (qwen2): max_window_layers in its config.json leaves 2 of 4 layers")
        assert line.endswith("; set use_sliding_window to false if no sample exceeds 64 tokens, or take another model")
    check(config("url=http://h:1", f"model={tmp_path}"), files=())


def test_supervised_fine_tuning_has_no_teacher() -> None:
    from configs.checks import check_sft

    with pytest.raises(ConfigError, match=r"teacher.model: has no effect in supervised fine-tuning; remove the key"):
        check_sft(config("model=big", "--sft.rows=4"), files=())


def test_the_run_is_explained_with_its_teachers() -> None:
    gains = "a sampled token has the advantage 1 x (teacher's log-probability - policy's)"
    first, *rest = [line for line in explain(config(*OWN, SOURCES)) if line.startswith("teacher of ")]
    own = "1 server of the run's own at http://127.0.0.1:5800, 1 GPU each where there are any"
    assert first == f"teacher of rows of no other teacher: big, {own}; {gains}"
    own = "2 servers of the run's own at http://127.0.0.1:5801 or http://127.0.0.1:5802, 1 GPU each where there are any"
    assert rest == [
        f"teacher of rows of openai/gsm8k: a, {own}; {gains}",
        f"teacher of rows of code: b, http://h:1; {gains}",
    ]
    (line,) = (line for line in explain(config(*OWN, REWARD, "weight=0.25")) if line.startswith("teacher of all rows"))
    assert "adds to its reward's advantage 0.25 x" in line


def test_the_variable_of_a_key_goes_to_every_node_and_into_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERS_KEY", "a-long-secret-0815")
    monkeypatch.setenv("CODE_KEY", "another-secret-4711")
    sources = "by_source=[{data_source: code, url: 'http://h:1', tokenizer: t, api_key_env: CODE_KEY}]"
    given = config("url=http://h:2", "tokenizer=t", "api_key_env=TEACHERS_KEY", sources)
    assert variables(given) == ["TEACHERS_KEY", "CODE_KEY"]
    assert "secret" not in visible("said a-long-secret-0815 and another-secret-4711")


def test_every_role_has_the_keys_that_it_reads() -> None:
    from actors.process import PROGRESS

    assert set(PROGRESS) == set(READS)
