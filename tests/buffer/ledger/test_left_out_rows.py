"""A row that failed all its attempts is left out: not drawn again, through restarts, until what failed was mended."""

from typing import Any

import pytest

from buffer.ledger import reasons
from buffer.ledger.counts import BANDS
from buffer.ledger.difficulty import Shares
from buffer.ledger.rules import Ledger
from buffer.ledger.types import SampleStats, Transaction
from buffer.store.sqlite import Store

GROUP = (SampleStats(10, 6, 0.0), SampleStats(12, 8, 1.0))
EVEN = Shares(dict.fromkeys(BANDS, 1.0), rest=0, return_after=1)
SOURCES = [(10, 1.0), (40, 3.0)]
WAYS: list[dict[str, Any]] = [{}, {"difficulty": EVEN}, {"shares": SOURCES}, {"difficulty": EVEN, "shares": SOURCES}]


def play(ledger: Ledger, bad: set[int], versions: int, kind: Any = "reward") -> list[int]:
    """Rows in the order of their attempts; those of `bad` fail."""
    drawn, number = [], ledger.state.next_lease
    for _ in range(versions):
        while work := ledger.ask("a#1", ledger.state.version, 100, 0.0, number):
            number += 100
            for it in work:
                drawn.append(it.index)
                if it.index in bad:
                    ledger.fail("a#1", it.item, it.lease, "score.py:score raised KeyError: 'unit'", 0.0, kind=kind)
                else:
                    assert ledger.put("a#1", it.item, it.lease, GROUP, 0.0) is None
        if ledger.batches.take(ledger.state.version) is not None:
            ledger.batches.trained(ledger.state.version - 1)
    return drawn


@pytest.mark.parametrize("more", WAYS)
def test_a_row_that_fails_every_attempt_is_tried_in_no_later_epoch(more: dict[str, Any]) -> None:
    """13 of 50 rows cost 39 attempts, and not half of all."""
    bad, ledger = set(range(0, 39, 3)), Ledger(50, 5, 1, max_failed_share=1.0, **more)
    drawn = play(ledger, bad, 60)
    assert sum(row in bad for row in drawn) == 3 * len(bad) == 39
    assert set(ledger.view.left_out()) == bad and len(drawn) - 39 == 60 * 5 + 5
    assert ledger.view.dropped() == {"score.py:score raised KeyError: 'unit'": 13}
    assert ledger.view.problems_by_state()["left_out"] == 13 and sum(ledger.state.rows.bands.values()) == 37 + 13
    assert reasons.left_out(ledger)[0] == "row 0 of data.train: reward: score.py:score raised KeyError: 'unit'"


@pytest.mark.parametrize("more", WAYS)
def test_epochs_end_where_only_rows_are_left_that_are_left_out(more: dict[str, Any]) -> None:
    ledger = Ledger(50, 5, 0, epochs=2, attempts=1, max_failed_share=1.0, **more)
    play(ledger, set(range(40)), 40)
    assert ledger.view.outcome() == "data" and not ledger.upcoming(9)
    assert reasons.ended(ledger).endswith("40 rows left out")


def test_failures_of_vllm_and_of_the_infrastructure_leave_no_row_out() -> None:
    for kind in ("engine", "infrastructure"):
        ledger = Ledger(6, 2, 0, epochs=2, max_failed_share=1.0)
        assert play(ledger, {1}, 9, kind).count(1) == 6 and not ledger.view.left_out()


def test_a_row_that_once_made_a_group_is_not_left_out() -> None:
    ledger = Ledger(6, 2, 0, epochs=2, max_failed_share=1.0)
    play(ledger, set(), 3)
    assert play(ledger, {1}, 9).count(1) == 3 and not ledger.view.left_out()


def test_a_permanent_failure_leaves_a_row_out_at_once() -> None:
    ledger = Ledger(6, 2, 0, shuffle=False)
    first, *_ = ledger.ask("a#1", 0, 2, 0.0, 1)
    ledger.fail("a#1", first.item, first.lease, "prompt of 2000 tokens", 0.0, permanent=True, kind="prompt")
    assert ledger.view.left_out() == {0: "prompt: prompt of 2000 tokens"}


@pytest.mark.parametrize("more", WAYS)
def test_a_run_whose_rows_are_all_left_out_has_failed_and_a_new_start_tries_them_again(
    more: dict[str, Any],
) -> None:
    store, every = Store(None), set(range(50))
    ledger = Ledger(50, 5, 1, max_failed_share=1.0, attempts=1, **more)
    assert len(play(ledger, every, 99)) == 50 and ledger.view.outcome() == "failed"
    first, *lines = reasons.ended(ledger).splitlines()
    left_out = "all 50 rows of data.train are left out, because every attempt at them failed"
    assert first == f"the run was given up after version 0: {left_out}"
    assert lines[-1] == "  mend what failed, then start the run again"
    store.commit(Transaction(ledger.drain()))
    ledger = Ledger(50, 5, 1, max_failed_share=1.0, attempts=1, recall=store.closed, **more)
    ledger.restore(store.load(), 0.0)
    assert ledger.view.outcome() == "failed" and len(ledger.view.left_out()) == 50
    ledger.batches.rewind(0)
    assert not ledger.view.left_out() and len(play(ledger, set(), 3)) == 20


def test_it_is_left_out_through_a_restart_and_more_attempts_bring_it_back(tmp_path: Any) -> None:
    for attempts, tried, left_out in ((2, 2, 1), (2, 0, 1), (3, 1, 1), (3, 0, 1), (5, 2, 1)):
        with Store(tmp_path / "buffer.sqlite", fsync=False) as store:
            ledger = Ledger(6, 2, 0, attempts=attempts, recall=store.closed)
            ledger.restore(store.load(), 0.0)
            ledger.batches.rewind(ledger.state.version)
            drawn = play(ledger, {4}, 6)
            assert drawn.count(4) == tried and len(ledger.view.left_out()) == left_out
            store.commit(Transaction(ledger.drain()))


def test_the_log_names_a_row_when_it_is_left_out() -> None:
    ledger = Ledger(6, 2, 2, attempts=1, shuffle=False, place=lambda row: f"a.jsonl line {row + 1}")
    play(ledger, {3}, 1)
    words = "left out from now on, a.jsonl line 4: every attempt at it failed: reward: score.py:score raised KeyError"
    assert reasons.newly_left_out(ledger) == f"{words}: 'unit'; 1 of 6 rows are left out"
    assert reasons.newly_left_out(ledger) == ""
