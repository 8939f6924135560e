"""The reward section: several functions, reward servers, and every contradiction in one line."""

import pytest

from configs.checks import check
from configs.load import ConfigError, load, write
from configs.resume import changes, fingerprint, settings
from configs.schema import Config, RewardConfig

NEEDED = ["--model.path=m", "--data.train=d.parquet"]


def config(*reward: str) -> Config:
    return load([*NEEDED, *(f"--reward.{one}" for one in reward)])


def refused(*reward: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config(*reward), files=())
    return list(error.value.problems)


def test_several_functions_are_read_with_their_defaults(tmp_path):
    given = config("function=[{function: math}, {function: my/a.py:score, weight: -0.5, kwargs: {a: 1}}]")
    parts = given.reward.parts
    assert [(part.metric, part.weight, part.kwargs) for part in parts] == [("math", 1.0, {}), ("score", -0.5, {"a": 1})]
    write(given, tmp_path / "config.yaml")
    assert load([str(tmp_path / "config.yaml")]) == given
    (one,) = config("function=math", "kwargs={score: 2}").reward.parts
    assert (one.function, one.weight, one.kwargs, one.metric) == ("math", 1.0, {"score": 2}, "math")


def test_weights_are_fixed_and_servers_may_change():
    before = config("function=[{function: math}]")
    assert fingerprint(before) != fingerprint(config("function=[{function: math, weight: 2}]"))
    served = ("function=reward_model", "model=rm")
    assert changes(settings(config(*served, "servers=1")), config(*served, "servers=2", "concurrency=8"))
    with pytest.raises(ConfigError, match=r'reward.model: "rm" -> "other"'):
        changes(settings(config(*served)), config("function=reward_model", "model=other"))


def test_a_run_file_of_before_has_the_fingerprint_of_before():
    assert config("function=math") == load([*NEEDED, "--reward.function=math", "--reward.servers=0"])
    assert RewardConfig(function="math").model_dump(exclude_defaults=True) == {"function": "math"}


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "[{function: a, wieght: 2}]",
            "reward.function.0.wieght: no such key (--reward.function); did you mean reward.function.0.weight?",
        ),
        ("[{function: a, weight: x}]", 'reward.function.0.weight: "x" is not a number (--reward.function)'),
        (
            "[{function: a}, {weight: 1}]",
            "reward.function.1.function: missing (--reward.function); set it, e.g. reward.function.1.function: ",
        ),
        (
            "[3]",
            "reward.function: 3 in [3] is not a map of function, weight, kwargs, name (--reward.function)",
        ),
        (
            "[]",
            "reward.function: [] is not text or a list, each a map of function, weight, kwargs, "
            "name (--reward.function)",
        ),
        (
            "5",
            "reward.function: 5 is not text or a list, each a map of function, weight, kwargs, "
            "name (--reward.function)",
        ),
        ("[{function: a, weight: .nan}]", "reward.function.0.weight: NaN is not a number (--reward.function)"),
        ("[{function: a, name: x y}]", 'reward.function.0.name: "x y" is not text matching '),
    ],
)
def test_a_wrong_entry_is_named_in_one_line(value: str, line: str):
    with pytest.raises(ConfigError) as error:
        config(f"function={value}")
    (problem,) = error.value.problems
    assert problem.startswith(line)


OWN = ["function=reward_model", "model=rm", "servers=2"]


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        (
            ["function=[{function: a.py:score}, {function: b.py:score}]"],
            "reward.function: 2 entries are called score; give them a name each",
        ),
        (
            ["function=[{function: math}]", "kwargs={score: 2}"],
            "reward.kwargs: several functions do not share them; write kwargs into the entries of reward.function",
        ),
        (
            ["function=[{function: maths}]"],
            "reward.function: 'maths' is neither one of countdown, math, math_verify, exact_match, regex, length, "
            "judge, reward_model, reasoning_gym, task nor path/to/file.py:function",
        ),
        (
            ["function=reward_model"],
            "reward.function: reward_model has no server to ask; "
            "set its url in kwargs, or let the run start one: reward.servers: 1 and reward.model",
        ),
        (
            ["function=math", "model=rm", "servers=1"],
            "reward.servers: 1, but no reward function uses them; "
            "set reward.function: reward_model without url, or reward.servers: 0",
        ),
        (
            ["function=reward_model", "kwargs={url: 'http://a:1', template: x}", "model=rm"],
            "reward.model: rm is served by nobody; set reward.servers: 1, or remove the key",
        ),
        (
            ["function=reward_model", "servers=1"],
            "reward.servers: 1, but they have no model; set reward.model",
        ),
        (
            [*OWN, "kwargs={model: other}"],
            "reward.kwargs.model: the run's own servers have reward.model; remove the key",
        ),
        ([*OWN, "engine={runner: pooling}"], "reward.engine.runner: Headrace sets it; remove the key"),
        (
            [*OWN, "port=65535"],
            "reward.port: the last of 2 reward servers would listen on 65536; lower it",
        ),
    ],
)
def test_contradictions(reward: list[str], line: str):
    assert refused(*reward) == [line]


def test_a_reward_model_that_vllm_would_compute_otherwise_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "partial_rotary_factor": 0.5}')
    (line,) = refused("function=reward_model", "servers=1", f"model={tmp_path}")
    assert line.startswith(
        f"reward.model: {tmp_path} (llama): partial_rotary_factor in its config.json is 0.5, by which"
    )
    assert line.endswith("; remove it")


def test_reward_servers_leave_the_buffers_port_alone():
    beside = config(*OWN, "port=5599")
    buffer = beside.buffer.model_copy(update={"address": "tcp://127.0.0.1:5600"})
    with pytest.raises(ConfigError) as caught:
        check(beside.model_copy(update={"buffer": buffer}), files=())
    (line,) = caught.value.problems
    assert line == "reward.port: 5599 to 5600 for the reward servers include the buffer's; choose others"
    check(beside, files=())  # a buffer on a Unix socket takes no port


def test_what_is_no_contradiction():
    check(config(*OWN, "engine={dtype: float32}"), files=())
    check(config("function=[{function: reward_model}, {function: length}]", "model=rm", "servers=1"), files=())
    check(config("function=reward_model", "kwargs={url: 'http://a:1'}"), files=())
