"""How `slow_judge` and `evaluation` judge pairs of runs, and what `learns` leaves behind."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import evaluation, learns, slow_judge
from benchmarks.slow_judge import SHOWN, SlowJudge


def phase(seconds: float) -> dict[str, float]:
    return dict.fromkeys(SHOWN, 1.0) | {"s/version": seconds}


@pytest.mark.parametrize(("slow", "ratio"), [([1.05, 2.16, 9.0], 1.08), ([1.15, 2.4, 0.5], 1.15)])
def test_a_slow_judge_is_judged_by_the_median_of_its_pairs(slow: list[float], ratio: float) -> None:
    """A machine that becomes slower, and another one's burst in one phase, decide nothing."""
    quick = [1.0, 2.0, 3.0]
    phases = [each for one, other in zip(slow, quick, strict=True) for each in ((5.0, phase(one)), (0.0, phase(other)))]
    rows, found = slow_judge.rows_of(phases, SlowJudge())
    values = {row["what"]: row["value"] for row in rows}
    assert found is (ratio <= slow_judge.LIMIT)
    assert values["  with / at once, median of the pairs"] == pytest.approx(ratio)
    assert values["  with / at once, pair 2"] == pytest.approx(slow[2] / 3.0, rel=1e-3)


def test_an_evaluation_is_judged_by_the_median_of_its_pairs() -> None:
    def run(versions_h: float, wait_s: float) -> dict[str, float]:
        return dict.fromkeys((*evaluation.KEYS, "evaluations", "versions"), 1.0) | {
            "versions/h": versions_h,
            "waits s/version": wait_s,
        }

    found = {
        "1 with": [run(100.0, 0.2), run(50.0, 0.4), run(10.0, 9.0)],
        "1 without": [run(105.0, 0.2), run(51.0, 0.1), run(90.0, 0.1)],
    }
    rows = {row["what"].strip(): row for row in evaluation.rows(found, [])}
    judged = rows["time of a version, with / without, median of the pairs"]
    assert judged["value"] == pytest.approx(1.05) and judged["against_value"] == evaluation.TARGET
    assert rows["wait, with / without, median of the pairs"]["value"] == pytest.approx(4.0)
    assert judged["case"] == "1 server, 3 pairs of runs"


def test_a_run_of_learns_leaves_rows_answers_and_a_picture_beside_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["learns"])

    def kept(staleness: int, share: float) -> dict[str, list[float]]:
        args = argparse.Namespace(example="countdown", staleness=staleness, out=tmp_path / "learns.json")
        records = [{"version": v, "sample/solved": share, "age/mean": 1, "length/mean": 9, "time/version_s": 2}
                   for v in range(1, 12)]  # fmt: skip
        records += [{"version": 2, "eval/version": 1, "eval/held_out/mean@4": share}]
        rows = [row.line() for row in learns.rows_of(args, records)]
        learns.keep(args, rows, records, ["the first answers", f"the last answers of {staleness}"])
        found: dict[str, list[float]] = {}
        for row in json.loads(args.out.read_text())["rows"]:
            if row["what"].startswith(learns.CURVE):
                found.setdefault(row["case"], []).append(row["value"])
        return found

    assert kept(0, 0.25) == {"countdown 0": [0.25]}
    first = (tmp_path / "learns.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert kept(4, 0.5) == {"countdown 0": [0.25], "countdown 4": [0.5]}
    assert kept(0, 0.75) == {"countdown 4": [0.5], "countdown 0": [0.75]}, "in place of its own"
    assert (tmp_path / "learns.png").read_bytes() != first
    for staleness in (0, 4):
        text = (tmp_path / f"learns.countdown-{staleness}.samples.txt").read_text()
        assert text == f"the first answers\nthe last answers of {staleness}"
        assert json.loads((tmp_path / f"learns.countdown-{staleness}.raw.json").read_text())
