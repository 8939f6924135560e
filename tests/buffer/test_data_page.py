"""What docs/data.md and docs/reasoning-gym.md say of keys, and their run files: their sources load, and mean what the
pages say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from buffer.problems import load_problems
from configs.data.sources import SUFFIXES, needs_truth
from configs.schema import Config

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("data.md", "reasoning-gym.md"))
MIXTURE, SETS = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))


def run_file(keys: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "reward": {"function": "math"}} | keys)


def test_the_keys_of_the_page_exist() -> None:
    keys = set(re.findall(r"`([a-z]+)\.([a-z_]+)", PAGE)) - {
        ("reasoning_gym", "leg_counting"),
        ("extra_info", "reasoning_gym"),
        ("config", "json"),
    }
    known = {(section, key) for section, field in Config.model_fields.items() for key in field.annotation.model_fields}
    assert ("data", "columns") in keys and keys <= known
    assert all(f"`{suffix}`" in PAGE for suffix in SUFFIXES)


def test_the_mixture_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data/gsm8k"
    folder.mkdir(parents=True)
    import pyarrow as pa
    from pyarrow import parquet

    for name in ("train-0", "train-1", "test"):
        parquet.write_table(pa.Table.from_pylist([{"question": name, "answer": "1"}]), folder / f"{name}.parquet")
    config = run_file(MIXTURE)
    train = load_problems(config.data.train, config.data)
    assert train.shares == [(2, 3.0), (10_000, 1.0)]
    assert [train[row]["problem"] for row in range(2)] == ["train-0", "train-1"]
    assert train[2]["extra_info"]["reasoning_gym"]["name"] == "leg_counting"
    assert load_problems(config.data.sources()["eval"], config.data, key="data.eval")[0]["problem"] == "test"


def test_the_sets_of_the_page_do_not_overlap() -> None:
    config = run_file(SETS)
    assert not needs_truth(config)
    train, held_out = (load_problems(source, config.data) for source in config.data.sources().values())
    assert (len(train), len(held_out)) == (10_000, 200)
    assert json.dumps(train[0]["problem"]) != json.dumps(held_out[0]["problem"])
