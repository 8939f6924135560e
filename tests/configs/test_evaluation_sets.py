"""`data.eval` and `eval`: a path or named sets, what docs/evaluation.md shows, and what is refused in one line."""

import re
from pathlib import Path

import pytest
import yaml

from configs.checks import check
from configs.load import ConfigError, load, write

ROOT = Path(__file__).parents[2]
NEEDED = ["--model.path=m/n/o", "--data.train=t.parquet", "--reward.function=math"]


def refusals(*given: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(load([*NEEDED, *given]), files=())
    return list(caught.value.problems)


def test_a_path_alone_is_one_set_with_one_greedy_answer():
    config = load([*NEEDED, "--data.eval=e.parquet", "--eval.every=3"])
    (given,) = config.data.eval.values()
    assert list(config.data.eval) == ["eval"] and (given.path, given.samples, given.k) == (Path("e.parquet"), 1, [])
    assert given.temperature_of(config.sampling) == 0.0
    assert load([*NEEDED, "--data.eval=null"]).data.eval == {}
    check(config, files=())


def test_the_page_s_run_file_is_one(tmp_path: Path):
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/evaluation.md").read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(block)))
    config = load([str(file), *NEEDED])
    aime, easy = config.data.eval.values()
    assert (aime.samples, aime.k, aime.temperature_of(config.sampling)) == (32, [1, 8], 1.0)
    assert (easy.limit, easy.temperature_of(config.sampling), config.eval.every) == (200, 0.0, 20)
    assert config.data.sources() == {
        "train": Path("t.parquet"),
        "eval.aime": Path("data/aime.parquet"),
        "eval.easy": Path("data/easy.jsonl"),
    }
    write(config, tmp_path / "config.yaml")
    assert load([str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--eval.every=5"], "eval.every: 5, but data.eval names no problems"),
        (
            ["--data.eval.a.path=p", "--data.eval.a.samples=4", "--data.eval.a.k=[1, 8]"],
            "data.eval.a.k: 8 is more than data.eval.a.samples 4",
        ),
        (
            ["--data.eval.a.path=p", "--data.eval.a.samples=4", "--data.eval.a.temperature=0"],
            "data.eval.a.temperature: 0 makes all of data.eval.a.samples 4 answers the same",
        ),
        (
            ["--data.eval.a.path=p", "--data.eval.a.max_tokens=9000", "--rollout.engine.max_model_len=8192"],
            "rollout.engine.max_model_len: 8192 is less than data.max_prompt_tokens 1024 + data.eval.a.max_tokens 9000",
        ),
    ],
)
def test_contradictions_are_refused(given: list[str], line: str):
    (found,) = refusals(*given)
    assert found.startswith(line) and ";" in found


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["--data.eval.a.samples=4"],
            "data.eval.a.path: missing (--data.eval.a.samples); set it, e.g. data.eval.a.path: data/",
        ),
        (["--data.eval.a.path=p", "--data.eval.a.samples=0"], "data.eval.a.samples: 0 is not a whole number >= 1 (--"),
        (["--data.eval.a.path=p", "--data.eval.a.samples=on"], "data.eval.a.samples: true is not a whole number"),
        (["--data.eval.a.path=p", "--data.eval.a.k=[0]"], "data.eval.a.k: 0 in [0] is not a whole"),
        (
            ["--data.eval.a.path=p", "--data.eval.a.sampels=2"],
            "data.eval.a.sampels: no such key (--data.eval.a.sampels);",
        ),
        (["--data.eval.a=p"], 'data.eval: "p" in {"a": "p"} is not a path, or a map with a name for each set (--'),
        (["--data.eval=5"], "data.eval: 5 is not a path, or a map with a name for each set"),
        (["--data.eval.a/b.path=p"], 'data.eval: "a/b" in {"a/b": {"path": "p"}} is not a path, or a map'),
        (["--data.eval=e", "--eval.share=0"], "eval.share: 0 is not a number"),
    ],
)
def test_wrong_values_are_named_with_their_set(given: list[str], line: str):
    assert refusals(*given)[0].startswith(line)
