"""Which keys may change when a run is started again: the table, the fingerprint, and the words of a refusal."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from configs.help import keys
from configs.load import ConfigError, load, write
from configs.resume import CHANGEABLE, changes, fingerprint, is_changeable, settings, written

NEEDED = ["--model.path=m", "--data.train=d.jsonl", "--reward.function=countdown"]


@pytest.mark.parametrize("pattern", CHANGEABLE)
def test_the_table_names_keys(pattern: str) -> None:
    assert any(fnmatch(key, pattern) for key in keys())


@pytest.mark.parametrize(
    "key", ["model.path", "data.train", "data.shuffle", "batch.samples", "run.seed", "algorithm.loss", "rollout.task"]
)
def test_what_decides_the_data_is_fixed(key: str) -> None:
    assert not is_changeable(key)


def test_the_docs_have_the_same_table() -> None:
    """Keys in the first column of the table, without those after `but`."""
    page = (Path(__file__).parents[2] / "docs/recovery.md").read_text()
    table = page.partition("| keys | what to know |")[2].partition("\n\n")[0]
    told, untold = set[str](), set[str]()
    for row in table.splitlines():
        column, _, rest = row.split("|")[1].partition(" but ") if row else ("", "", "")
        told |= set(re.findall(r"`([\w.*]+)`", column))
        untold |= set(re.findall(r"`([\w.*]+)`", rest))
    for key in keys():
        documented = any(fnmatch(key, pattern) for pattern in told) and not any(fnmatch(key, name) for name in untold)
        assert documented == is_changeable(key), key


def test_the_fingerprint_covers_the_fixed_keys() -> None:
    base = fingerprint(load(NEEDED))
    assert len(base) == 16
    for same in ("run.versions=7", "learner.lr=1e-3", "rollout.engine.a=9", "log.display=plain", "run.folder=/x"):
        assert fingerprint(load([*NEEDED, f"--{same}"])) == base
    for other in ("run.name=b", "run.seed=1", "batch.groups=3", "model.path=n", "sampling.stop=[a]"):
        assert fingerprint(load([*NEEDED, f"--{other}"])) != base
    assert fingerprint(load([*NEEDED, "--batch.groups=32"])) == base  # the default, said aloud


def test_changes_are_told_and_fixed_keys_refused() -> None:
    before = settings(load([*NEEDED, "--run.versions=2"]))
    (change,) = changes(before, load([*NEEDED, "--run.versions=4"]))
    assert str(change) == "run.versions: 2 -> 4"
    with pytest.raises(ConfigError) as refused:
        changes(before, load([*NEEDED, "--run.versions=4", "--batch.samples=4", "--run.seed=3"]))
    seed, samples = refused.value.problems
    assert seed.startswith("run.seed: 0 -> 3; ") and samples.startswith("batch.samples: 8 -> 4; ")
    assert "run.name" in seed and "--fork-from" in seed
    assert changes(None, load(NEEDED)) == []


def test_keys_of_a_section_within_a_section_change_one_by_one() -> None:
    base = [*NEEDED, "--rollout.chat.max_turns=9"]
    moved = load([*base, "--rollout.chat.port=5800", "--rollout.chat.public_url=https://tunnel.example"])
    assert fingerprint(moved) == fingerprint(load(base)) != fingerprint(load(NEEDED))
    before = settings(load(base))
    assert [change.key for change in changes(before, moved)] == ["rollout.chat.port", "rollout.chat.public_url"]
    with pytest.raises(ConfigError, match=r"rollout\.chat\.max_turns: 9 -> 64"):
        changes(before, load(NEEDED))


def test_settings_of_an_earlier_release() -> None:
    """It had no key batch.groups, and weights.timeout_s by its old name."""
    before = settings(load([*NEEDED, "--weights.timeout_s=7"]))
    before["weights.deadline_s"] = before.pop("weights.timeout_s")
    del before["batch.groups"]
    assert changes(before, load([*NEEDED, "--weights.timeout_s=7"])) == []
    with pytest.raises(ConfigError, match=r"batch\.groups: 32 -> 16"):
        changes(before, load([*NEEDED, "--batch.groups=16"]))


def test_a_written_config_has_the_same_settings(tmp_path: Path) -> None:
    config = load([*NEEDED, "--learner.lr=1e-6", "--learner.betas=[0.9, 0.98]", "--data.eval=e.jsonl"])
    assert written(tmp_path) is None
    write(config, tmp_path / "config.yaml")
    assert written(tmp_path) == settings(config)


def test_a_run_of_a_release_with_groups_in_flight_goes_on() -> None:
    """They may have changed, and never were part of the fingerprint."""
    before, now = settings(load([*NEEDED, "--batch.samples=4"])), load([*NEEDED, "--batch.samples=4"])
    del before["rollout.sequences"]
    before["rollout.groups_in_flight"] = 16
    assert [str(change) for change in changes(before, now)] == ['rollout.sequences: 64 -> "auto"']
    assert fingerprint(now) == fingerprint(load([*NEEDED, "--batch.samples=4", "--rollout.groups_in_flight=16"]))
    assert changes(before, load([*NEEDED, "--batch.samples=4", "--rollout.sequences=64"])) == []
