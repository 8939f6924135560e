"""A rank that misses a collective: one line says which, where and for how long, and all ranks exit."""

import json
import time
from pathlib import Path

from learner.watchdog import verdict
from tests.harness.world import outcome


def test_a_rank_that_sleeps_is_named(tmp_path: Path) -> None:
    started = time.monotonic()
    ended = outcome("late", 3, tmp_path, timeout_s=2.0)
    assert time.monotonic() - started < 90, "the sleeper itself would have ended after 110 s"
    assert [code for code, _ in ended] == [1, 1, 1]
    lines = [line for _, errors in ended for line in errors.splitlines() if "learner: timeout:" in line]
    assert len(lines) == 1, lines
    assert "gloo:all_reduce" in lines[0] and "for rank 1, which has begun" in lines[0]
    assert "rank.py" in lines[0] and "sleep_in_here" in lines[0] and "learner.timeout_s is 2" in lines[0]
    accounts = list((tmp_path / "logs").glob("flight-*.json"))
    assert accounts and json.loads(accounts[0].read_text())["entries"]


def note(begun: int, age: float = 0.0) -> dict:
    return {"begun": begun, "where": "learner/train/step.py:80 backward", "at": time.time() - age}


def test_verdicts() -> None:
    entry = {"profiling_name": "nccl:all_gather"}
    by = (entry, 12.34, 0, 10.0, Path("f.json"))

    def said(notes) -> str:
        return verdict(by[0], by[1], notes, *by[2:])

    assert "has waited 12.3 s in nccl:all_gather (learner/train/step.py:80 backward) for rank 2" in said(
        [note(9), note(9), note(8)]
    )
    assert "silent for 30" in said([note(9), note(8, age=30)])
    assert "rank 1, which never reported" in said([note(9), None])
    assert "begun as many collectives" in said([note(9), note(9)])
