"""The benchmark of memory: which combinations it takes, what it says of them, and what holds a peak."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.__main__ import kept, rows_of, selected, share, summary
from benchmarks.memory.combinations import COMBINATIONS, CRITICS, SHAPES, Combination
from benchmarks.memory.holders import holders
from benchmarks.memory.training import filled, run_file_of
from configs.critic import keeps_critic

FOUND: dict[str, Any] = {
    "peak": 70.0, "estimate": 77.0, "largest": 8192, "tokens/s": 10.0, "settings": {"compile": False},
}  # fmt: skip


def event(action: str, addr: int, size: int, line: int = 1) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "frames": [{"filename": "a/b.py", "line": line, "name": "f"}]}


def test_holders_are_those_of_the_highest_sum_and_not_of_the_end() -> None:
    events = [
        *(event("alloc", 1, 2**30), event("alloc", 2, 2**30), event("alloc", 3, 2**29, line=2)),
        *(event("free_requested", 1, 2**30), event("free_completed", 1, 2**30)),
        *(event("free_requested", 3, 2**29), event("alloc", 1, 2**28, line=3)),
    ]
    assert holders(events) == ["2.000 GiB = 2 x 1,073,741,824: b.py:1 f", "0.500 GiB = 1 x 536,870,912: b.py:2 f"]


@pytest.mark.parametrize("items", [COMBINATIONS, CRITICS, SHAPES], ids=["combinations", "critics", "shapes"])
def test_shares_are_the_whole_list_once(items: list[Combination]) -> None:
    taken = [index for number in range(1, 5) for index in selected(items, "", share(f"{number}/4"))]
    assert sorted(taken) == [*range(len(items))]
    assert len({one.name for one in items}) == len(items)


def test_a_share_of_what_is_named() -> None:
    found = selected(COMBINATIONS, "2 ranks", share("2/2"))
    assert [one.name for one in found.values()] == [one.name for one in COMBINATIONS if one.ranks == 2][1::2]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", ""])
def test_no_share(text: str) -> None:
    with pytest.raises(Exception, match="write 1/4 for the first of four"):
        share(text)


def test_what_is_more_than_5_percent_off_counts_as_off() -> None:
    one = COMBINATIONS[0]
    assert [row.value for row in rows_of(one, FOUND)][:2] == [70.0, pytest.approx(10.0)]
    answers = {"a": FOUND, "b": FOUND | {"estimate": 72.0}, "c": FOUND | {"estimate": 66.0}, "d": {"error": "full"}}
    assert [row.value for row in summary(answers, 3)] == [1, 0, 2, 3]


def test_a_shape_that_is_refused_did_not_run_out_of_memory() -> None:
    refused = {"refused": "learner.tokens_per_microbatch: auto: a sample of 8704 tokens takes 79.8 GiB"}
    (row,) = rows_of(SHAPES[0], refused)
    assert row.what.startswith("refused") and row.against == refused["refused"]
    assert [row.value for row in summary({"a": FOUND, "b": refused}, 0)] == [0, 1, 1, 0]


def test_a_critic_is_trained_where_the_list_says_so(tmp_path: Path) -> None:
    assert all(keeps_critic(run_file_of(one, tmp_path)) for one in CRITICS)
    assert not any(keeps_critic(run_file_of(one, tmp_path)) for one in SHAPES)
    assert "advantage gae" in CRITICS[0].name


def test_samples_fill_microbatches() -> None:
    lengths = [len(sample.tokens.numpy()) for sample in filled(2500, 1000, 64, 3)]
    assert lengths == [1000, 1000, 500] * 3


def test_answers_of_an_earlier_command_are_kept_for_the_same_day_and_hardware(tmp_path: Path) -> None:
    here, file = {"date": "2026-11-29", "hardware": "1 x NVIDIA H200"}, tmp_path / "memory.json"
    assert kept(file, here, {"a"}) == {}
    file.write_text(json.dumps(here | {"cases": {"a": {"peak": 1.0}, "b": {"peak": 2.0}}, "rows": []}))
    assert kept(file, here, {"a", "c"}) == {"a": {"peak": 1.0}}
    assert kept(file, here | {"hardware": "1 x NVIDIA H100"}, {"a"}) == {}
