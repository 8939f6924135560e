"""Every file of results names the command that wrote it, and that command is there."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_name_a_command_that_is_there(file: Path) -> None:
    command = json.loads(file.read_text(encoding="utf-8"))["command"]
    modules = re.findall(r"-m ((?:benchmarks|tests)\.[\w.]+)", command)
    assert modules
    assert [module for module in modules if find_spec(module) is None] == []


def test_there_are_results() -> None:
    assert len(RESULTS) > 10
