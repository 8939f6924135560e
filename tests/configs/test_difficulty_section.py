"""`data.difficulty`: what switches it on, what is refused, that a run keeps it, and what `configs` says it will do."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.ledger.difficulty import Shares
from buffer.ledger.rules import Ledger
from buffer.ledger.types import SampleStats
from configs.explain import MIXTURES, explain
from configs.flow.capacity import memory_bytes
from configs.flow.difficulty import KINDS, drawn_shares, split
from configs.load import ConfigError, load
from configs.resume import changes, fingerprint, settings
from configs.schema import Config, DifficultyConfig

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]
REWARDS = {"unsolved": (0.0, 0.0), "between": (1.0, 0.0), "solved": (1.0, 1.0)}


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


def test_it_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert config().data.difficulty is None and config("data.difficulty=null").data.difficulty is None
    assert config("data.difficulty={}").data.difficulty == DifficultyConfig()
    assert config("data.difficulty.between=2").data.difficulty == DifficultyConfig(between=2)
    assert fingerprint(config()) == fingerprint(config("data.difficulty=null"))
    assert not any(line.startswith("difficulty") for line in explain(config(), 100))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("data.difficulty.unseen=0", "data.difficulty.unseen"),
        ("data.difficulty.solved=-1", "data.difficulty.solved"),
        ("data.difficulty.between=inf", "data.difficulty.between"),
        ("data.difficulty.unsolved=nan", "data.difficulty.unsolved"),
        ("data.difficulty.solved_at=nan", "data.difficulty.solved_at"),
        ("data.difficulty.groups=0", "data.difficulty.groups"),
        ("data.difficulty.rest=-1", "data.difficulty.rest"),
        ("data.difficulty.return_after=0", "data.difficulty.return_after"),
        ("data.difficulty.betwen=1", "did you mean data.difficulty.between"),
        ("data.difficulty=true", "data.difficulty"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(given)
    assert any(words in line for line in error.value.problems), error.value.problems


def test_a_run_keeps_it_and_may_write_its_defaults_or_not() -> None:
    short, long = config("data.difficulty={}"), config("data.difficulty={unseen: 0.3, groups: 2}")
    assert fingerprint(short) == fingerprint(long) and changes(settings(short), long) == []
    for other in (config(), config("data.difficulty={rest: 7}")):
        with pytest.raises(ConfigError, match=r"data.difficulty: .* -> "):
            changes(settings(short), other)
        assert fingerprint(other) != fingerprint(short)


def test_the_buffer_s_memory_counts_what_it_keeps_of_each_row() -> None:
    without, with_it = memory_bytes(config(), 10**6), memory_bytes(config("data.difficulty={}"), 10**6)
    assert with_it - without == 320 * 10**6 and without - memory_bytes(config()) == 336 * 10**6


def test_configs_says_what_it_will_do() -> None:
    run = config("data.difficulty={}", "run.versions=400", "batch.groups=32")
    first, second = [line for line in explain(run, 2000) if line.startswith("difficulty: ")]
    assert first.startswith("difficulty: of 32 groups drawn 9.6 unseen, 3.2 unsolved, 16.0 between, 3.2 solved; ")
    assert "rests for 4 versions, one solved by all samples of 2 groups in a row for 50 more" in first
    assert "of the groups of 2,000 problems so many are of problems solved by some samples only: " in second
    assert "instead of 33% if a third each is never, sometimes and always solved; " in second
    assert len([line for line in explain(run) if line.startswith("difficulty: ")]) == 1
    notes = "\n".join(explain(config("data.difficulty={}", "run.versions=54"), 100))
    assert "data.difficulty.rest 4 + return_after 50 is not below run.versions 54" in notes


@given(
    st.floats(0, 1e6),
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(0.01, 10), st.floats(0, 1e4)), min_size=1),
)
def test_a_split_is_whole_and_bounded_by_room(amount: float, bands: dict[str, tuple[float, float]]) -> None:
    weights, room = ({name: pair[at] for name, pair in bands.items()} for at in (0, 1))
    taken, whole = split(amount, weights, room), sum(room.values())
    if whole > 1e-3:
        assert sum(taken.values()) == pytest.approx(amount, abs=1e-3)
    if amount <= whole:
        assert all(taken[name] <= room[name] + 1e-3 for name in taken)


@pytest.mark.parametrize("words", MIXTURES)
@pytest.mark.parametrize(("problems", "versions"), [(300, 100), (2000, 60)])
def test_what_configs_says_is_what_the_ledger_draws(words: str, problems: int, versions: int) -> None:
    mixture, difficulty, groups = MIXTURES[words], DifficultyConfig(), 16
    expected = drawn_shares(difficulty, problems, groups, versions, mixture)
    bounds = mixture["unsolved"], mixture["unsolved"] + mixture["between"]
    kinds = [KINDS[sum(row / problems >= bound - 1e-9 for bound in bounds)] for row in range(problems)]
    shares = Shares(difficulty.shares, difficulty.rest, difficulty.return_after)
    ledger, drawn = Ledger(problems, groups, 0, difficulty=shares), Counter[str]()
    for version in range(versions):
        for it in ledger.ask("s#1", version, groups, 0.0, version + 1):
            drawn[kinds[it.index]] += 1
            group = tuple(SampleStats(4, 2, reward) for reward in REWARDS[kinds[it.index]])
            ledger.put("s#1", it.item, it.lease, group, 0.0)
        ledger.batches.take(version)
        ledger.batches.trained(version)
    for kind in KINDS:
        assert drawn[kind] / drawn.total() == pytest.approx(expected[kind], abs=0.06)
