"""docs/sft.md: its commands work as they stand there, and the command starts its own ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.help import keys
from learner.record.metrics import read
from learner.sft.answers import AnswerReader
from tests.harness.demonstrated import chatml_tokenizer, sft_config, sft_run
from tests.harness.world import ROOT

PAGE = (ROOT / "docs" / "sft.md").read_text(encoding="utf-8")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def blocks(kind: str) -> list[str]:
    """The page's blocks of code of a kind."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_each_key_has_its_default_on_the_page() -> None:
    for name, key in keys().items():
        if name.startswith("sft."):
            default = key.default.strip('"')
            assert f"| `{name}` | {default} |" in PAGE


def test_its_rows_can_be_trained(tmp_path: Path) -> None:
    first, flagged = blocks("json")
    for text, turns in ((first, "all"), (flagged, "flagged")):
        reader = AnswerReader(chatml_tokenizer(), sft_config(tmp_path, sft={"turns": turns}))
        assert all(len(reader.texts(json.loads(line))) == 1 for line in text.splitlines())
        reader.close()


@pytest.mark.long
def test_its_commands_work(tmp_path: Path) -> None:
    (tmp_path / "demonstrations.jsonl").write_text(blocks("json")[0])
    (tmp_path / "sft.yaml").write_text(blocks("yaml")[0])
    for line in "".join(blocks("bash")).splitlines():
        words = line.split()
        assert words[0] == "python"
        ended = subprocess.run(
            [sys.executable, *words[1:]], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{line}\n{ended.stderr}"
    assert (tmp_path / "runs" / "sft" / "checkpoints" / "v000020" / "huggingface" / "model.safetensors").is_file()
    records = read(tmp_path / "runs" / "sft" / "metrics.jsonl")
    assert [one["version"] for one in records if "eval/eval/loss" in one] == [0, 5, 10, 15, 20]


@pytest.mark.long
def test_one_command_starts_all_ranks(tmp_path: Path) -> None:
    """A wrong row ends it with exit code 2 whatever the ranks."""
    learner = {"ranks": 2, "threads": 1}
    for name, rows, code in (("right", None, 0), ("wrong", [{"messages": []}], 2)):
        words = sft_run(tmp_path, rows, run={"name": name, "versions": 2}, learner=learner)
        ended = subprocess.run(
            [sys.executable, "-m", "learner", *words], env=ENVIRONMENT, capture_output=True, text=True
        )
        assert ended.returncode == code, ended.stderr
        assert ("line 1: the messages of the row are []" in ended.stderr) is (code == 2)
    assert [one["version"] for one in read(tmp_path / "right" / "metrics.jsonl")] == [1, 2]
