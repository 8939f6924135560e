"""What `learner.context_parallel` contradicts, each by its line; what is allowed; what `explain` shows of it."""

import json
from pathlib import Path

import pytest

from configs.checks import check, check_sft
from configs.context_parallel import parts_of, why_not
from configs.explain import explain
from configs.load import ConfigError, load
from configs.resume import changes, settings
from configs.schema import Config

SEVEN_B = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "num_hidden_layers": 28}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"} | SEVEN_B))
    return tmp_path


def config(model: Path, *overrides: str) -> Config:
    needed = [f"--model.path={model}", "--data.train=d.parquet", "--reward.function=countdown"]
    return load([*needed, *(f"--{one}" for one in overrides)])


SIX = {"num_attention_heads": 12, "num_key_value_heads": 6}
REFUSED = [
    (["ranks=4", "context_parallel=3"], {}, "3 does not divide the 4 learner.ranks of a node; set it to a number that"),
    (["ranks=1", "context_parallel=2"], {}, "2 does not divide the 1 learner.ranks of a node; set it to a number that"),
    (
        ["ranks=8", "nodes=2", "context_parallel=8"],
        {},
        "8 does not divide the 4 learner.ranks of a node; set it to a n",
    ),
    (
        ["ranks=8", "shard=2", "context_parallel=4"],
        {},
        "4 does not divide learner.shard 2; set it to a number that doe",
    ),
    (
        ["ranks=8", "context_parallel=8"],
        {},
        "8 does not divide the 28 attention heads of MODEL; set it to a number that",
    ),
    (
        ["ranks=4", "context_parallel=4"],
        SIX,
        "4 is neither a divisor nor a multiple of the 6 heads of keys and values of MODEL; set it to",
    ),
]


@pytest.mark.parametrize(
    ("keys", "shape", "line"), REFUSED, ids=lambda it: " ".join(it) if isinstance(it, list) else ""
)
def test_each_contradiction_has_its_line(keys: list[str], shape: dict[str, int], line: str, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"} | SEVEN_B | shape))
    with pytest.raises(ConfigError) as error:
        check(config(model, *(f"learner.{key}" for key in keys)), files=())
    wanted = f"learner.context_parallel: {line.replace('MODEL', str(model))}"
    assert any(found.startswith(wanted) for found in error.value.problems), error.value.problems


def test_supervised_fine_tuning_has_rows_of_one_rank(model: Path) -> None:
    given = [f"--model.path={model}", "--data.train=d.jsonl", "--sft.rows=8", "--learner.ranks=2"]
    check_sft(load(given), files=())
    with pytest.raises(ConfigError) as error:
        check_sft(load([*given, "--learner.context_parallel=2"]), files=())
    line = "learner.context_parallel: 2, but supervised fine-tuning trains each row on one rank; set it to 1"
    assert list(error.value.problems) == [line]


def test_a_group_of_ranks_needs_one_sample(model: Path) -> None:
    """Eight ranks in groups of four get two parts of a batch."""
    small = ("batch.groups=1", "batch.samples=2", "learner.ranks=8")
    run = config(model, *small, "learner.context_parallel=4")
    assert parts_of(run.learner) == 2
    check(run, files=())
    with pytest.raises(ConfigError) as error:
        check(config(model, *small, "learner.context_parallel=2"), files=())
    (line,) = error.value.problems
    assert line.startswith("learner.ranks: 8 / learner.context_parallel 2 = 4 is more than batch.groups 1 x batch.samp")


def test_heads_of_keys_may_be_fewer_than_ranks() -> None:
    assert not any(why_not(28, 4, size) for size in (1, 2, 4, 28)) and why_not(28, 4, 7)
    assert not any(why_not(12, 1, size) for size in (1, 2, 3, 4, 6, 12)) and why_not(12, 2, 3)


def test_explain_shows_who_shares_a_row(model: Path) -> None:
    keys = ("learner.ranks=4", "batch.groups=12", "batch.samples=4", "learner.context_parallel=2")
    lines = explain(config(model, *keys))
    assert "long documents: 2 ranks share each microbatch, each with 1/2 of its tokens" in lines
    assert any(line.startswith("microbatches: 2 ranks train together about 24 samples per version") for line in lines)
    assert not any("long documents" in line for line in explain(config(model)))


def test_it_may_change_between_launches(model: Path) -> None:
    before = settings(config(model, "learner.ranks=2"))
    changed = changes(before, config(model, "learner.ranks=2", "learner.context_parallel=2"))
    assert [str(change) for change in changed] == ["learner.context_parallel: 1 -> 2"]


def test_the_page_quotes_the_lines(model: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "long-documents.md").read_text()
    for words in (["ranks=4", "context_parallel=3"], ["ranks=8", "context_parallel=8"]):
        with pytest.raises(ConfigError) as error:
            check(config(model, *(f"learner.{word}" for word in words)), files=())
        lines = [line.replace(str(model), "m") for line in error.value.problems]
        assert any(f"| `{line}` |" in page for line in lines), lines
    shared = ("--sft.rows=8", "--learner.ranks=2", "--learner.context_parallel=2")
    with pytest.raises(ConfigError) as error:
        check_sft(load(["--model.path=m", "--data.train=d.jsonl", *shared]), files=())
    assert f"| `{error.value.problems[0]}` |" in page
