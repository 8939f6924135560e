"""The benchmark of a teacher's price: what each case stands against, and commands that write to one file."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import teacher_price
from benchmarks.teacher_price import TOKENS, compared, earlier, main
from benchmarks.weights.table import ResultRow, write

SPEEDS = {
    "none, SmolLM2-135M": 200.0,
    "none, speck": 100.0,
    "beside, speck": 90.0,
    "beside, speck, top_k 16": 80.0,
    "shared, SmolLM2-135M": 190.0,
    "shared, Qwen2.5-1.5B": 50.0,
}


def test_each_case_stands_against_the_run_without_a_teacher_of_its_shape() -> None:
    rows = compared([ResultRow(TOKENS, speed, "1/s", case=name).line() for name, speed in SPEEDS.items()])
    shares = {row["case"]: row["value"] / row["against_value"] for row in rows if row["against_value"]}
    assert shares == {"beside, speck": 0.9, "beside, speck, top_k 16": 0.8, "shared, SmolLM2-135M": 0.95}
    assert {row["ratio"] for row in rows if row["against_value"]} == set(shares.values())


def test_commands_that_measure_side_by_side_keep_each_other_s_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "price.json"

    def other_ends_first(args: object, case: str) -> list[ResultRow]:
        write(out, "teacher_price", [ResultRow(TOKENS, 100.0, "1/s", case="none, speck").line()], show=False)
        return [ResultRow(TOKENS, 90.0, "1/s", case=f"{case}, speck")]

    monkeypatch.setattr(teacher_price, "measured", other_ends_first)
    words = ["--shape", "speck", "--cases", "shared", "--work", str(tmp_path / "work"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["teacher_price", *words])
    assert main() == 0
    assert {row["case"]: row["value"] for row in earlier(out)} == {"none, speck": 100.0, "shared, speck": 90.0}
    assert json.loads(out.read_text())["rows"][1]["ratio"] == 0.9


def test_a_command_that_measures_nothing_leaves_the_figures_of_another_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "price.json"
    write(out, "teacher_price", [ResultRow(TOKENS, 100.0, "1/s", case="none, speck").line()], show=False)
    before = out.read_text().replace('"date": "', '"date": "before ')
    out.write_text(before)

    def fails(args: object, case: str) -> list[ResultRow]:
        raise TimeoutError("no version")

    monkeypatch.setattr(teacher_price, "measured", fails)
    words = ["--shape", "speck", "--cases", "shared", "--work", str(tmp_path / "work"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["teacher_price", *words])
    assert main() == 1
    assert out.read_text() == before
