"""When the ledger gives a run up: attempts fail, no group is made, and no item under way could change that; or many
groups in a row lack variance."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.ledger import reasons
from buffer.ledger.rules import Ledger
from buffer.ledger.types import FailureKind, Lease, SampleStats, Transaction
from buffer.store.sqlite import Store

GROUP = (SampleStats(10, 6, 0.0), SampleStats(12, 8, 1.0))
FLAT = (SampleStats(10, 6, 1.0), SampleStats(12, 8, 1.0))
LONG = "prompt of 2000 tokens"


def fail(ledger: Ledger, leased: Sequence[Lease], reason: str = "ValueError: no", kind: FailureKind = "reward") -> None:
    for it in leased:
        ledger.fail("a", it.item, it.lease, reason, 0.0, permanent=kind == "prompt", kind=kind)


def fail_until_given_up(ledger: Ledger, room: int = 4, most: int = 1000, **how: Any) -> int:
    """Let attempts fail, `room` at a time; returns how many were dispatched before the end, or `most`."""
    attempts = 0
    while attempts < most and (work := ledger.ask("a", 0, room, 0.0)):
        attempts += len(work)
        fail(ledger, work, **how)
    return attempts


def reopened(ledger: Ledger, store: Store, **changes: Any) -> Ledger:
    store.commit(Transaction(ledger.drain()))
    again = Ledger(
        ledger.terms.problems,
        ledger.terms.groups,
        ledger.terms.max_staleness,
        shuffle=False,
        recall=store.closed,
        **changes,
    )
    again.restore(store.load(), 0.0)
    return again


@pytest.mark.parametrize(
    ("groups", "kind", "expected"),
    [(4, "reward", 100), (4, "prompt", 100), (4, "engine", 100), (4, "task", 100), (50, "reward", 152)],
)
def test_a_run_whose_attempts_all_fail_is_given_up(groups: int, kind: FailureKind, expected: int) -> None:
    """After 100 failures, or 3 batches; those dispatched together end together."""
    ledger = Ledger(1000, groups, max_staleness=2, shuffle=False)
    assert fail_until_given_up(ledger, kind=kind) == expected
    assert ledger.view.outcome() == "failed" and ledger.batches.take(0) is None and ledger.ask("a", 0, 9, 0.0) == []
    first, *lines = reasons.ended(ledger).splitlines()
    assert first.startswith("the run was given up after version 0: ")
    assert lines[0] == f"  {expected} attempts failed: {kind}: ValueError: no"
    assert all(line.startswith("  for example row ") for line in lines[1:4])
    assert len({line for line in lines[1:4]}) == 3 and all(f"{kind}: ValueError: no" in line for line in lines[1:4])


def test_reasons_are_listed_by_how_often_attempts_failed_for_them() -> None:
    ledger = Ledger(1000, 4, max_staleness=2, shuffle=False)
    assert fail_until_given_up(ledger, reason="KeyError: rare", room=1, most=1) == 1
    assert fail_until_given_up(ledger, reason="ValueError: often", room=1) == 99
    _, *lines = reasons.ended(ledger).splitlines()
    assert lines[:2] == [
        "  99 attempts failed: reward: ValueError: often",
        "  1 attempts failed: reward: KeyError: rare",
    ]


def test_failures_of_the_infrastructure_do_not_count() -> None:
    ledger = Ledger(1000, 4, max_staleness=2, shuffle=False)
    assert fail_until_given_up(ledger, kind="infrastructure") >= 1000
    assert ledger.view.outcome() is None


def test_a_share_of_1_never_gives_up() -> None:
    assert fail_until_given_up(Ledger(1000, 4, 2, max_failed_share=1.0), kind="prompt", reason=LONG) >= 1000


@pytest.mark.parametrize("group", [GROUP, FLAT])
def test_any_group_shows_that_the_run_can_go_on(group: Sequence[SampleStats]) -> None:
    """Also one that `batch.skip_zero_variance` leaves out: nothing failed."""
    ledger = Ledger(1000, 4, max_staleness=10, skip_zero_variance=True)
    for _ in range(4):
        assert fail_until_given_up(ledger, room=1, most=90) == 90
        (it,) = ledger.ask("a", 0, 1, 0.0)
        assert ledger.put("a", it.item, it.lease, group, 0.0) is None
    assert ledger.view.outcome() is None and ledger.view.counts()["dropped"] > 0


def test_fast_failures_do_not_end_a_run_whose_groups_take_long() -> None:
    """A tenth of the prompts is too long, and fails long before the first of 1200 groups under way is made."""
    ledger, under_way = Ledger(1000, 400, max_staleness=2, shuffle=False), 0
    for _ in range(133):
        work = ledger.ask("a", 0, 10, 0.0)
        fail(ledger, work[:1], LONG, "prompt")
        under_way += len(work) - 1
    assert under_way == 1197 and sum(ledger.view.failed().values()) > 100 and ledger.view.outcome() is None


def test_groups_under_way_that_hang_do_not_hold_up_the_end() -> None:
    ledger = Ledger(1000, 40, max_staleness=4, shuffle=False)
    assert len(ledger.ask("b", 0, 150, 0.0)) == 150
    assert fail_until_given_up(ledger, room=1) == 151


def test_a_restarted_buffer_counts_on_and_keeps_its_verdict() -> None:
    store = Store(None)
    ledger = Ledger(1000, 4, max_staleness=2, shuffle=False)
    assert fail_until_given_up(ledger, room=1, most=99) == 99
    ledger = reopened(ledger, store)
    assert ledger.view.outcome() is None and len(ledger.state.trend.examples) == 3
    assert fail_until_given_up(ledger, room=1) == 1
    ledger = reopened(ledger, store)
    assert ledger.view.outcome() == "failed" and reasons.ended(ledger).count("for example row") == 3


def test_a_restarted_learner_gets_all_attempts_again() -> None:
    ledger = Ledger(1000, 4, max_staleness=2, shuffle=False)
    fail_until_given_up(ledger)
    ledger.batches.rewind(0)
    assert ledger.view.outcome() is None and fail_until_given_up(ledger) == 100


def test_data_that_end_with_nothing_trained_end_the_run_as_failed() -> None:
    ledger = Ledger(20, 4, max_staleness=2, versions=8, epochs=1)
    assert fail_until_given_up(ledger, most=10**6) == 60
    assert ledger.view.outcome() == "failed"
    first, *lines = reasons.ended(ledger).splitlines()
    counts = "0 trained, 20 dropped (reward: ValueError: no), 20 rows left out"
    assert first == f"the data ended after version 0 of 8: 1 epoch of 20 problems, {counts}"
    assert lines[0] == "  60 attempts failed: reward: ValueError: no" and len(lines) == 5


def test_data_that_end_after_some_versions_say_what_became_of_them() -> None:
    ledger = Ledger(20, 4, max_staleness=2, versions=8, epochs=1, attempts=1)
    fail(ledger, ledger.ask("a", 0, 5, 0.0))
    fail(ledger, ledger.ask("a", 0, 1, 0.0), LONG, "prompt")
    for version in range(4):
        while (batch := ledger.batches.take(version)) is None:
            for it in ledger.ask("a", version, 1, 0.0):
                assert ledger.put("a", it.item, it.lease, GROUP, 0.0) is None
        assert len(batch.items) == (4 if version < 3 else 2)
        ledger.batches.trained(version)
    assert ledger.view.outcome() == "data"
    counts = "14 trained, 6 dropped (most often reward: ValueError: no), 6 rows left out"
    assert reasons.ended(ledger) == f"the data ended after version 4 of 8: 1 epoch of 20 problems, {counts}"


def test_data_all_left_out_for_equal_rewards_have_not_failed() -> None:
    ledger = Ledger(4, 4, max_staleness=0, epochs=1, skip_zero_variance=True)
    for it in ledger.ask("a", 0, 4, 0.0):
        ledger.put("a", it.item, it.lease, FLAT, 0.0)
    assert ledger.view.outcome() == "data" and "4 dropped (zero variance)" in reasons.ended(ledger)


@given(st.lists(st.sampled_from(["group", "reward", "prompt", "engine", "infrastructure", "restart"]), max_size=60))
def test_the_verdict_follows_from_what_ended_since_the_last_group(ends: list[str]) -> None:
    """Each end stands for 10 of its kind, one after the other; nothing else is under way."""
    ledger, store, failures = Ledger(1000, 2, max_staleness=10**4, shuffle=False), Store(None), 0
    for end in ends:
        if end == "restart":
            ledger = reopened(ledger, store)
            continue
        for _ in range(10):
            if not (work := ledger.ask("a", 0, 1, 0.0)):
                break
            if end == "group":
                ledger.put("a", work[0].item, work[0].lease, GROUP, 0.0)
                failures = 0
            else:
                fail(ledger, work, kind=end)  # type: ignore[arg-type]
                failures += end != "infrastructure"
        assert (ledger.view.outcome() == "failed") is (failures >= 100)
        assert failures <= 100


def leave_out(ledger: Ledger, most: int, room: int = 4) -> int:
    """Deliver groups without variance until the run is given up; returns how many, or `most`."""
    made = 0
    while made < most and (work := ledger.ask("a", ledger.state.version, min(room, most - made), 0.0)):
        for it in work:
            assert ledger.put("a", it.item, it.lease, FLAT, 0.0) is None
        made += len(work)
    return made


@pytest.mark.parametrize(("groups", "expected"), [(4, 1000), (1, 1000), (200, 2000)])
def test_a_run_whose_groups_all_lack_variance_is_given_up(groups: int, expected: int) -> None:
    ledger = Ledger(50, groups, max_staleness=2, versions=200, skip_zero_variance=True)
    assert leave_out(ledger, 10**4, room=1) == expected
    assert ledger.view.outcome() == "failed" and ledger.batches.take(0) is None and ledger.ask("a", 0, 9, 0.0) == []
    first, remedy = reasons.ended(ledger).splitlines()
    assert first == (
        f"the run was given up after version 0 of 200: {expected} groups in a row had no variance "
        "(batch.skip_zero_variance leaves such groups out)"
    )
    assert "raise batch.samples" in remedy and "another run.name" in remedy
    assert reasons.for_batch(ledger) == reasons.for_work(ledger, "a") == first


def test_a_group_with_variance_or_a_start_of_the_learner_resets_the_count() -> None:
    ledger = Ledger(50, 4, max_staleness=2, skip_zero_variance=True)
    assert leave_out(ledger, 999) == 999
    (it,) = ledger.ask("a", 0, 1, 0.0)
    assert ledger.put("a", it.item, it.lease, GROUP, 0.0) is None
    assert leave_out(ledger, 999) == 999 and ledger.view.outcome() is None
    ledger.batches.rewind(0)
    assert leave_out(ledger, 10**4) == 1000 and ledger.view.outcome() == "failed"
    ledger.batches.rewind(0)
    assert ledger.view.outcome() is None and leave_out(ledger, 10**4) == 1000


def test_failures_in_between_do_not_reset_the_count() -> None:
    ledger, made = Ledger(50, 4, max_staleness=2, skip_zero_variance=True, attempts=10**6), 0
    while work := ledger.ask("a", 0, 2, 0.0):
        ledger.fail("a", work[0].item, work[0].lease, "ValueError: no", 0.0, kind="reward")
        for it in work[1:]:
            ledger.put("a", it.item, it.lease, FLAT, 0.0)
            made += 1
    assert made == 1000 and "had no variance" in reasons.ended(ledger)


def test_without_the_filter_such_groups_are_trained() -> None:
    ledger = Ledger(5000, 4, max_staleness=10**4)
    assert leave_out(ledger, 3000) == 3000 and ledger.view.outcome() is None and ledger.view.ready()


def test_a_restarted_buffer_keeps_the_count() -> None:
    store = Store(None)
    ledger = Ledger(1000, 4, max_staleness=2, shuffle=False, skip_zero_variance=True)
    leave_out(ledger, 700)
    ledger = reopened(ledger, store, skip_zero_variance=True)
    assert leave_out(ledger, 10**4) == 300 and ledger.view.outcome() == "failed"
    ledger = reopened(ledger, store, skip_zero_variance=True)
    assert ledger.view.outcome() == "failed" and "1000 groups in a row had no variance" in reasons.ended(ledger)


def test_waits_say_how_many_groups_were_left_out_and_what_to_do() -> None:
    ledger = Ledger(50, 2, max_staleness=2, skip_zero_variance=True)
    assert "variance" not in reasons.for_batch(ledger)
    leave_out(ledger, 9, room=1)
    (it,) = ledger.ask("a", 0, 1, 0.0)
    ledger.put("a", it.item, it.lease, GROUP, 0.0)
    leave_out(ledger, 2, room=1)
    said = reasons.for_batch(ledger)
    assert "batch 0 has 1 of 2 groups" in said and "\n" not in said
    assert "11 of 12 groups since the start had no variance and were left out (2 in a row; 1000 end the run)" in said
    assert "raise batch.samples" in said
    (it,) = ledger.ask("a", 0, 1, 0.0)
    ledger.put("a", it.item, it.lease, GROUP, 0.0)
    assert ledger.batches.take(0) is not None
    assert "variance" not in reasons.for_batch(ledger), "the next batch has no such groups yet"
