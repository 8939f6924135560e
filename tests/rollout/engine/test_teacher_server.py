"""The arguments of a teacher server, what it refuses, and that its gate counts its own requests as progress."""

import json
from pathlib import Path

import pytest

from configs.load import ConfigError, load
from rollout.engine import teacher_server
from rollout.engine.reward_server import TokenGate, command_line
from rollout.evaluate import check_evaluated
from rollout.teachers.messages import PATH
from tests.harness.weightless import add_weights

NEEDED = ["--model.path=m", "--data.train=d.jsonl", "--data.max_prompt_tokens=10", "--sampling.max_tokens=20"]
SOURCES = (
    "--teacher.by_source=[{data_source: math, model: small, servers: 2, engine: {max_model_len: 99, dtype: half}}]"
)
TAUGHT = [*NEEDED, "--teacher.model=big", "--teacher.servers=1", "--teacher.port=6000", SOURCES]


def with_folders(folder: Path, **files: object) -> list[str]:
    for name in ("big", "small"):
        (folder / name).mkdir()
        (add_weights(folder / name) / "config.json").write_text(json.dumps(files.get(name, {})))
    return [word.replace("=big", f"={folder}/big").replace("small", f"{folder}/small") for word in TAUGHT]


def test_each_server_has_its_teacher_its_port_and_room_for_a_sample_and_one_token_more(tmp_path: Path) -> None:
    config = load(with_folders(tmp_path))
    first, last = (teacher_server.arguments(config, number, cpu=False) for number in (0, 2))
    assert (first["model"], first["port"], first["max_model_len"]) == (f"{tmp_path}/big", 6000, 31)
    assert (last["port"], last["max_model_len"], last["dtype"]) == (6002, 99, "half")
    assert last["model"] == f"{tmp_path}/small"
    assert first["runner"] == "generate" and first["middleware"].endswith("reward_server.TokenGate")
    words = command_line(teacher_server.arguments(config, 0, cpu=True))
    assert '--hf-overrides={"head_dtype": "float32"}' in words and "--enforce-eager" in words
    assert "--no-enable-prefix-caching" in words and TokenGate.scores == "/classify" and PATH == "/headrace/scores"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("teacher-3", "teacher-3 is no teacher server of this run; name one of teacher-0 to teacher-2"),
        ("teacher", "teacher is no teacher server of this run; name one of teacher-0 to teacher-2"),
    ],
)
def test_a_name_of_no_server_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        teacher_server.main(["--name", name, *with_folders(tmp_path)])


def test_a_teacher_of_cohere_sees_as_many_tokens_as_transformers_lets_it(tmp_path: Path) -> None:
    """vLLM 0.32 adds one to the window."""
    config = load(with_folders(tmp_path, big={"model_type": "cohere2", "sliding_window": 512}))
    given = teacher_server.arguments(config, 0, cpu=True)["hf_overrides"]
    assert given == {"head_dtype": "float32", "sliding_window": 511}


def test_a_teacher_that_only_its_server_has_is_judged_there(tmp_path: Path) -> None:
    """No check of a run file reads a hub's models."""
    config = load(with_folders(tmp_path, small={"model_type": "olmoe", "clip_qkv": 8.0}))
    teacher_server.arguments(config, 0, cpu=True)
    with pytest.raises(ConfigError, match=r"^teacher.by_source.0.model: .*small \(olmoe\): clip_qkv in .* is 8.0, by"):
        teacher_server.arguments(config, 1, cpu=True)


def test_a_server_may_be_asked_for_more_than_top_k_tokens(tmp_path: Path) -> None:
    """As many as the teacher has: some may be none of the policy's."""
    config = load([*with_folders(tmp_path), "--teacher.top_k=16"])
    assert teacher_server.arguments(config, 0, cpu=True)["max_logprobs"] == -1


def test_a_run_without_teacher_servers_has_none_to_start() -> None:
    with pytest.raises(ValueError, match=r"--name: teacher-0 is no teacher server of this run; set teacher\.servers"):
        teacher_server.main([*NEEDED, "--reward.function=math"])


def test_an_argument_that_vllm_lacks_is_named_with_its_key() -> None:
    config = load([*TAUGHT[:-1], SOURCES.replace("max_model_len", "max_modell_len")])
    (line,) = teacher_server.unknown_arguments(config)
    assert line.startswith(
        "teacher.by_source.0.engine.max_modell_len: vLLM's AsyncEngineArgs has no such field; did you"
    )


def test_a_run_without_a_reward_evaluates_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"^reward\.function: none, so nothing says which answers are right; name a rew"
    ):
        check_evaluated(load([*NEEDED, "--model.path=org/m", "--teacher.url=http://h:1", "--teacher.tokenizer=t"]))
