"""`rollout.servers` as a number and as `{min, max}`: how it is read, written, refused, explained and changed."""

from pathlib import Path

import pytest

from configs.checks import check
from configs.explain import explain
from configs.help import keys
from configs.load import ConfigError, load, write
from configs.resume import changes, fingerprint, settings
from configs.schema import Config

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]
RANGE = "--rollout.servers={min: 2, max: 8}"


def config(*words: str) -> Config:
    return load([*NEEDED, *words])


def test_both_forms_are_read_written_and_overridden(tmp_path: Path) -> None:
    ranged = config(RANGE)
    assert (ranged.rollout.least_servers, ranged.rollout.most_servers) == (2, 8)
    write(ranged, tmp_path / "run.yaml")
    assert load([str(tmp_path / "run.yaml")]) == ranged
    assert load([str(tmp_path / "run.yaml"), "--rollout.servers.max=4"]).rollout.most_servers == 4
    assert load([str(tmp_path / "run.yaml"), "--rollout.servers=3"]).rollout.servers == 3
    assert config("--rollout.servers={max: 8}").rollout.least_servers == 1
    assert {"rollout.servers", "rollout.servers.min", "rollout.servers.max"} <= keys().keys()
    assert keys()["rollout.servers"].type == "a whole number >= 1 or a map of min, max"


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--rollout.servers=0", "rollout.servers: 0 is not a whole number >= 1 or a map of min, max"),
        ("--rollout.servers={min: 3}", "rollout.servers.max: missing"),
        ("--rollout.servers={min: 0, max: 3}", "rollout.servers.min: 0 is not a whole number >= 1"),
        ("--rollout.servers={max: 3, mn: 1}", "did you mean rollout.servers.min?"),
    ],
)
def test_what_is_no_number_of_servers(word: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(word)
    assert line in "\n".join(error.value.problems)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rollout.servers={min: 4, max: 3}"], "rollout.servers: min 4 is more than max 3; lower it or raise max"),
        ([RANGE, "--rollout.chat.port=9000"], "rollout.chat.port: 9000 for 8 servers"),
    ],
)
def test_contradictions(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(config(*words), files=())
    assert any(problem.startswith(line) for problem in error.value.problems)


def test_a_range_may_come_and_go_while_the_run_goes_on() -> None:
    (change,) = changes(settings(config("--rollout.servers=2")), config(RANGE))
    assert change.key == "rollout.servers" and fingerprint(config(RANGE)) == fingerprint(config())


def test_a_run_with_a_range_starts_with_the_fewest_and_counts_the_most() -> None:
    text = "\n".join(explain(config(RANGE, "--batch.groups=32", "--batch.samples=16")))
    assert "GPUs: learner 1 rank + 2 servers x tensor parallel 1 = 3" in text
    assert "servers: 2 to 8, 1 GPU each where there are any: more while the learner waits, fewer while they do" in text
    assert "sequences: 8 x 512 = 4,096 at a time" in text and "auto begins with 64 a server" in text
