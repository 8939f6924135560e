"""`data.demonstrations`: what is refused, that a run keeps it, and what `configs` says of it."""

import json
from pathlib import Path

import pytest

from configs.checks import check, check_sft
from configs.explain import explain
from configs.load import ConfigError, load
from configs.resume import changes, fingerprint, settings
from configs.schema import Config

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


def refused(*overrides: str, files: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config(*overrides), files=files)
    return list(error.value.problems)


def test_a_run_keeps_its_demonstrations() -> None:
    plain, given = config(), config("data.demonstrations.path=a.jsonl")
    assert plain.data.demonstrations is None and fingerprint(plain) != fingerprint(given)
    assert changes(settings(given), config("data.demonstrations={path: a.jsonl, share: 0.1}")) == []
    for other in (
        plain,
        config("data.demonstrations.path=b.jsonl"),
        config("data.demonstrations={path: a.jsonl, share: 0.2}"),
    ):
        with pytest.raises(ConfigError, match=r"data\.demonstrations.*may not change while the run goes on"):
            changes(settings(given), other)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("data.demonstrations={path: a.jsonl, share: 0}", "data.demonstrations.share"),
        ("data.demonstrations={path: a.jsonl, share: 1}", "data.demonstrations.share"),
        ("data.demonstrations={path: a.jsonl, weight: 0}", "data.demonstrations.weight"),
        ("data.demonstrations={path: a.jsonl, weight: inf}", "data.demonstrations.weight"),
        ("data.demonstrations={share: 0.5}", "data.demonstrations.path"),
        ("data.demonstrations={path: []}", "data.demonstrations.path"),
        ("data.demonstrations={path: a.jsonl, shere: 0.5}", "did you mean data.demonstrations.share"),
    ],
)
def test_a_wrong_value_is_refused(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(given)
    assert words in str(error.value)


def test_what_nobody_has_proven_is_refused(tmp_path: Path) -> None:
    (line,) = refused("data.demonstrations.path=reasoning_gym:leg_counting?size=10&seed=1")
    assert line.startswith(
        "data.demonstrations.path: reasoning_gym:leg_counting?size=10&seed=1: a generated set holds no dem"
    )
    given = "data.demonstrations.path=a.jsonl"
    assert any(line.startswith("data.demonstrations: ") for line in refused(given, "rollout.routing_replay=true"))
    shared = refused(given, "learner.context_parallel=2", "learner.ranks=2")
    assert any("each rank trains its own, and learner.context_parallel is 2; remove one" in line for line in shared)
    (line,) = refused(f"data.demonstrations.path={tmp_path / 'none.jsonl'}", files=("data.demonstrations",))
    assert line.startswith(f"data.demonstrations.path: {tmp_path / 'none.jsonl'}: ")


def test_supervised_fine_tuning_has_none() -> None:
    words = ["--model.path=m", "--data.train=d.jsonl", "--sft.rows=8", "--data.demonstrations.path=a.jsonl"]
    with pytest.raises(ConfigError, match=r"data\.demonstrations: has no effect in supervised fine-tuning"):
        check_sft(load(words), files=())


def test_configs_says_how_many_there_are(tmp_path: Path) -> None:
    file = tmp_path / "shown.jsonl"
    file.write_text("".join(json.dumps({"problem": str(n), "answer": "a"}) + "\n" for n in range(280)))
    given = f"data.demonstrations={{path: {file}, share: 0.1, weight: 0.25}}"
    (line,) = [line for line in explain(config(given, "batch.groups=16", "batch.samples=16"), 100) if "demonst" in line]
    assert line == (
        "demonstrations: 28 beside the 256 samples of a batch, each of 280 once in 10.0 versions; "
        "their loss is multiplied by 0.25"
    )
    assert not any("demonstrations" in line for line in explain(config(), 100))
