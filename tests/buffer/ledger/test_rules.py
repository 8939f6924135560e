"""The ledger's promises, one by one. That they hold together in any order of events is in test_rules_properties.py."""

import pickle
import time
from collections import Counter

import pytest

from buffer.ledger import reasons
from buffer.ledger.rules import Ledger
from buffer.ledger.types import FormedBatch, Lease, LedgerError, Lengths, SampleStats, Transaction
from buffer.store.sqlite import Store

GROUP = (SampleStats(10, 6, 0.0), SampleStats(12, 8, 1.0, True))
FLAT = (SampleStats(10, 6, 1.0), SampleStats(12, 8, 1.0))


def put(ledger: Ledger, server: str, *leased: Lease) -> None:
    for it in leased:
        assert ledger.put(server, it.item, it.lease, GROUP, 0.0) is None


def items(leased: list[Lease]) -> list[int]:
    return [it.item for it in leased]


def reopened(ledger: Ledger, store: Store, now: float = 0.0, **changes: int) -> Ledger:
    """What a restarted buffer has after `ledger` was written to `store`."""
    store.commit(Transaction(ledger.drain()))
    fields = ("problems", "groups", "max_staleness", "versions", "epochs", "attempts", "lease_s")
    again = Ledger(**{name: getattr(ledger.terms, name) for name in fields} | changes, recall=store.closed)
    again.restore(store.load(), now)
    return again


def train(ledger: Ledger, version: int, server: str = "a") -> FormedBatch:
    """One synchronous step by a server that is up to date."""
    while (batch := ledger.batches.take(version)) is None:
        put(ledger, server, *ledger.ask(server, version, 1, 0.0))
    ledger.batches.trained(version)
    return batch


# schedule


def test_max_staleness_0_is_the_synchronous_schedule() -> None:
    ledger = Ledger(100, groups=3, max_staleness=0)
    for version in range(5):
        assert ledger.ask("late", version - 1, 9, 0.0) == []
        work = ledger.ask("a", version, 9, 0.0)
        assert [it.version for it in work] == [version] * 3
        put(ledger, "a", *work[:2])
        assert ledger.batches.take(version) is None
        assert ledger.ask("a", version, 9, 0.0) == []
        put(ledger, "a", work[2])
        assert ledger.batches.take(version) == FormedBatch(version, tuple(items(work)), (version,) * 3)
        ledger.batches.trained(version)
    assert ledger.view.ages() == {0: 15}


def test_admission_lets_max_staleness_batches_ahead_and_no_more() -> None:
    ledger = Ledger(100, groups=2, max_staleness=3)
    assert len(ledger.ask("a", 0, 100, 0.0)) == 8
    assert ledger.ask("a", 0, 1, 0.0) == []


def test_target_staleness_holds_admission_tighter() -> None:
    ledger = Ledger(100, groups=2, max_staleness=3, target_staleness=1)
    assert len(ledger.ask("a", 0, 100, 0.0)) == 4
    loose = Ledger(100, groups=2, max_staleness=1, target_staleness=9)
    assert len(loose.ask("a", 0, 100, 0.0)) == 4


def test_a_straggler_beyond_the_target_does_not_close_admission() -> None:
    ledger = Ledger(100, groups=2, max_staleness=3, target_staleness=1)
    slow, *rest = ledger.ask("slow", 0, 4, 0.0)
    put(ledger, "slow", *rest)
    assert ledger.batches.take(0)
    put(ledger, "b", *ledger.ask("b", 1, 9, 0.0))
    assert ledger.batches.take(1)
    assert slow.version + ledger.terms.target_staleness < ledger.state.version
    assert len(ledger.ask("b", 2, 9, 0.0)) == 2


def test_a_batch_waits_for_the_straggler_that_would_get_too_old() -> None:
    ledger = Ledger(100, groups=2, max_staleness=1)
    slow, *rest = ledger.ask("slow", 0, 4, 0.0)
    put(ledger, "slow", *rest)
    first = ledger.batches.take(0)
    assert first and first.items == (1, 2), "nothing forces batch 0 to wait: item 0 may go into batch 1"
    put(ledger, "b", *ledger.ask("b", 1, 9, 0.0))
    assert ledger.batches.take(1) is None
    assert "item 0 (version 0) at slow" in reasons.for_batch(ledger)
    put(ledger, "slow", slow)
    second = ledger.batches.take(1)
    assert second and second.items == (0, 3)


def test_a_failed_straggler_is_dispatched_anew_and_holds_nobody_up() -> None:
    ledger = Ledger(100, groups=2, max_staleness=1)
    slow, *rest = ledger.ask("slow", 0, 4, 0.0)
    put(ledger, "slow", *rest)
    ledger.batches.take(0)
    put(ledger, "b", *ledger.ask("b", 1, 9, 0.0))
    assert ledger.batches.take(1) is None
    ledger.leave("slow", "slow was restarted", 0.0)
    assert ledger.batches.take(1) is not None
    again = ledger.ask("b", 1, 9, 0.0)
    assert again[0].item == slow.item and again[0].version == 1 and again[0].lease > slow.lease


def test_nothing_is_dispatched_that_could_never_be_trained() -> None:
    ledger = Ledger(100, groups=2, max_staleness=4, versions=3)
    assert len(ledger.ask("a", 0, 100, 0.0)) == 6
    assert "run.versions 3" in reasons.for_work(ledger, "a")
    put(ledger, "a", *[Lease(it.number, it.lease, it.row, it.epoch, it.version) for it in ledger.view.leased()])
    for version in range(3):
        assert not ledger.view.finished()
        assert ledger.batches.take(version)
    assert ledger.view.finished() and ledger.batches.take(3) is None
    assert ledger.batches.take(2), "batches formed are served to the end"


def test_the_last_batch_takes_what_is_left() -> None:
    ledger = Ledger(5, groups=2, max_staleness=9, epochs=1)
    work = ledger.ask("a", 0, 100, 0.0)
    assert sorted(it.index for it in work) == list(range(5))
    put(ledger, "a", *work[:3])
    assert ledger.batches.take(0) and ledger.batches.take(1) is None
    put(ledger, "a", work[3])
    ledger.fail("a", 4, work[4].lease, "no", 0.0)
    assert ledger.batches.take(1) and ledger.batches.take(2) is None and not ledger.view.finished(), (
        "item 4 is to be tried again"
    )
    put(ledger, "a", *ledger.ask("a", 2, 100, 0.0))
    last = ledger.batches.take(2)
    assert last and last.items == (4,)
    assert ledger.view.finished() and ledger.batches.take(3) is None
    assert "the data ended after version 3: 1 epoch of 5 problems, 5 trained" in reasons.for_batch(ledger)


def test_epochs_have_orders_of_their_own_and_items_keep_their_numbers() -> None:
    ledger = Ledger(20, groups=40, max_staleness=0, epochs=2, seed=3)
    work = ledger.ask("a", 0, 100, 0.0)
    assert items(work) == list(range(40)) and [it.epoch for it in work] == [0] * 20 + [1] * 20
    first, second = [[it.index for it in work if it.epoch == epoch] for epoch in (0, 1)]
    assert sorted(first) == sorted(second) == list(range(20)) and first != second


def test_zero_variance_groups_make_room_for_others() -> None:
    ledger = Ledger(100, groups=2, max_staleness=0, skip_zero_variance=True)
    work = ledger.ask("a", 0, 9, 0.0)
    assert ledger.put("a", 0, work[0].lease, FLAT, 0.0) is None
    assert ledger.put("a", 0, work[0].lease, FLAT, 0.0) is None
    assert ledger.view.dropped() == {"zero variance": 1}
    assert items(ledger.ask("a", 0, 9, 0.0)) == [2]
    assert ledger.view.lengths()["dropped: zero variance"] == ledger.view.lengths()["generated"] == (1, 2, 22, 14, 0)


# leases


def test_a_repeated_request_gets_the_same_leases_and_never_more() -> None:
    ledger = Ledger(100, groups=8, max_staleness=0)
    work = ledger.ask("a", 0, 3, 0.0, request=7)
    assert ledger.ask("a", 0, 3, 1.0, request=7) == work
    assert ledger.ask("b", 0, 3, 1.0, request=7) != work
    put(ledger, "a", work[0])
    assert ledger.ask("a", 0, 3, 1.0, request=7) == work[1:]
    put(ledger, "a", *work[1:])
    assert ledger.ask("a", 0, 3, 1.0, request=7) == []
    assert len(ledger.ask("a", 0, 3, 1.0, request=8)) == 2


def test_a_parked_ask_goes_by_the_version_last_heard() -> None:
    ledger = Ledger(100, groups=2, max_staleness=0)
    put(ledger, "a", *ledger.ask("a", 0, 9, 0.0, request=1))
    assert ledger.ask("a", 0, 9, 0.0, request=2) == []
    assert ledger.batches.take(0)
    assert ledger.ask("a", 0, 9, 0.0, request=2) == []
    ledger.heartbeat("a", 1, [], 0.0)
    assert [it.version for it in ledger.ask("a", 0, 9, 0.0, request=2)] == [1, 1]


def test_a_parked_ask_of_a_dead_server_gets_nothing() -> None:
    ledger = Ledger(100, groups=2, max_staleness=0, lease_s=10.0)
    put(ledger, "b", *ledger.ask("b", 0, 9, 0.0))
    assert ledger.ask("a", 0, 9, 0.0, request=1) == []
    ledger.batches.take(0)
    ledger.heartbeat("a", 1, [], 5.0)
    assert ledger.ask("a", 0, 9, 15.0, request=1) == []
    ledger.heartbeat("a", 1, [], 16.0)
    assert len(ledger.ask("a", 0, 9, 16.0, request=1)) == 2


def test_a_server_that_broke_off_gets_nothing_until_it_is_heard_of_again() -> None:
    ledger = Ledger(100, groups=4, max_staleness=0, lease_s=10.0)
    first, second = ledger.ask("a", 0, 2, 0.0, request=1)
    put(ledger, "a", first)
    ledger.lose("a", "its server ended", 2.5)
    ledger.lose("nobody", "its server ended", 2.5)
    assert +Counter(ledger.view.counts()) == {"waiting": 1, "stored": 1} and ledger.expire(3.0) is None
    assert ledger.ask("a", 0, 2, 3.0, request=2) != [], "a new Ask is a sign of life"
    ledger.lose("a", "its server ended", 4.0)
    assert ledger.put("a", second.item, second.lease, (SampleStats(8, 5, 1.0),), 4.0), "the lease is over"
    assert ledger.put("a", first.item, first.lease, (SampleStats(8, 5, 1.0),), 4.0) is None, "a repetition is known"
    assert items(ledger.ask("b", 0, 1, 4.0)) == [second.item]


def test_leases_end_when_heartbeats_do() -> None:
    ledger = Ledger(100, groups=4, max_staleness=0, lease_s=10.0)
    mine, theirs = ledger.ask("a", 0, 2, 0.0), ledger.ask("b", 0, 2, 3.0)
    assert ledger.expire(9.9) == 10.0
    assert ledger.heartbeat("a", 0, [it.lease for it in mine], 9.9) == []
    assert ledger.expire(13.0) == 19.9
    again = ledger.ask("c", 0, 9, 13.0)
    assert items(again) == items(theirs)
    assert ledger.heartbeat("b", 0, [it.lease for it in theirs], 14.0) == [it.lease for it in theirs]
    assert ledger.expire(100.0) is None
    assert ledger.view.counts()["waiting"] == 4


def test_a_lease_that_its_server_does_not_know_of_ends() -> None:
    ledger = Ledger(100, groups=4, max_staleness=0, lease_s=10.0)
    one, two = ledger.ask("a", 0, 2, 0.0)
    assert ledger.heartbeat("a", 0, [one.lease], 9.0) == []
    assert ledger.view.counts()["leased"] == 2, "the answer may still be on its way"
    assert ledger.heartbeat("a", 0, [one.lease], 10.0) == []
    assert ledger.view.counts()["leased"] == 1 and ledger.ask("b", 0, 1, 10.0)[0].item == two.item


def test_a_lease_that_just_ended_well_is_not_held_in_vain() -> None:
    ledger = Ledger(100, groups=4, max_staleness=0)
    (it,) = ledger.ask("a", 0, 1, 0.0)
    put(ledger, "a", it)
    assert ledger.heartbeat("a", 0, [it.lease, 999], 0.0) == [999]


def test_a_late_group_is_answered_not_trusted() -> None:
    ledger = Ledger(100, groups=1, max_staleness=2, lease_s=10.0)
    late, other = ledger.ask("a", 0, 2, 0.0)
    ledger.expire(10.0)
    answer = ledger.put("a", late.item, late.lease, GROUP, 10.0)
    assert answer and "waits to be dispatched again" in answer
    again, _ = ledger.ask("b", 0, 2, 10.0)
    assert again.item == late.item
    answer = ledger.put("a", late.item, late.lease, GROUP, 10.0)
    assert answer and "is with b under lease" in answer
    put(ledger, "b", again, again)
    answer = ledger.put("a", late.item, late.lease, GROUP, 10.0)
    assert answer and "delivered by b" in answer
    assert ledger.batches.take(0)
    put(ledger, "b", again)
    ledger.batches.trained(0)
    put(ledger, "b", again)
    assert ledger.put("b", late.item, again.lease + 5, GROUP, 10.0)
    assert ledger.view.lengths()["trained"].groups == ledger.view.lengths()["generated"].groups == 1
    ledger.batches.prune(1)
    assert "not known here" in str(ledger.put("b", again.item, again.lease, GROUP, 10.0))
    assert "not known here" in str(ledger.put("b", 12345, 1, GROUP, 10.0))
    with pytest.raises(LedgerError, match="without samples"):
        ledger.put("b", other.item, other.lease, (), 10.0)


def test_an_item_is_dropped_with_its_last_reason_after_all_attempts() -> None:
    ledger = Ledger(100, groups=1, max_staleness=0, attempts=2)
    for reason in ("first\nand more", "second\nand more"):
        (it,) = ledger.ask("a", 0, 1, 0.0)
        assert it.item == 0
        ledger.fail("a", it.item, it.lease, reason, 0.0)
        ledger.fail("a", it.item, it.lease, reason, 0.0)
    assert ledger.view.dropped() == {"second": 1} and ledger.view.counts()["dropped"] == 1
    assert "dropped: second" in str(ledger.put("a", 0, it.lease, GROUP, 0.0))
    (it,) = ledger.ask("a", 0, 1, 0.0)
    assert it.item == 1
    ledger.fail("a", it.item, it.lease, "prompt too long", 0.0, permanent=True)
    assert ledger.view.dropped() == {"second": 1, "prompt too long": 1}


def test_reasons_are_bounded_in_number() -> None:
    ledger = Ledger(1000, groups=1, max_staleness=0, attempts=1)
    for number in range(200):
        (it,) = ledger.ask("a", 0, 1, 0.0)
        ledger.fail("a", it.item, it.lease, f"no {number}", 0.0)
    assert len(ledger.view.dropped()) == 65 and sum(ledger.view.dropped().values()) == 200


# failures


def test_failures_are_counted_by_kind_and_reason_and_named_while_they_last() -> None:
    ledger = Ledger(100, groups=1, max_staleness=0, attempts=2)
    for _ in range(3):
        (it,) = ledger.ask("a", 0, 1, 0.0)
        ledger.fail("a", it.item, it.lease, "ZeroDivisionError: no\ntraceback", 0.0, kind="reward")
    (it,) = ledger.ask("a", 0, 1, 0.0)
    ledger.fail("a", it.item, it.lease, "draining", 0.0, returned=True)
    assert ledger.view.failed() == {"reward: ZeroDivisionError: no": 3} and ledger.view.counts()["dropped"] == 1
    sentence = "; 3 attempts failed since the start, most often reward: ZeroDivisionError: no"
    assert reasons.for_batch(ledger).endswith(sentence) and reasons.for_work(ledger, "a").endswith(sentence)
    assert ledger.view.finished() is False and "dropped" in str(ledger.put("a", 0, it.lease - 2, GROUP, 0.0))
    put(ledger, "a", *ledger.ask("a", 0, 1, 0.0))
    ledger.batches.take(0)
    assert "failed" not in reasons.for_batch(ledger), "the sentence names a living problem, not the whole run"
    (it,) = ledger.ask("a", 1, 1, 0.0)
    ledger.leave("a", "its server was restarted", 0.0)
    assert reasons.for_batch(ledger).endswith(
        "; 1 attempts failed since the last batch, most often infrastructure: its server was restarted"
    )
    assert ledger.view.failed()["infrastructure: its server was restarted"] == 1


def test_every_end_of_a_lease_but_a_return_is_a_failed_attempt() -> None:
    ledger = Ledger(100, groups=4, max_staleness=0, lease_s=10.0)
    ledger.ask("silent", 0, 1, 0.0)
    (lost,) = ledger.ask("forgetful", 0, 1, 5.0)
    ledger.expire(10.0)
    ledger.heartbeat("forgetful", 0, [], 15.0)
    assert ledger.view.failed() == {
        "infrastructure: its server was not heard of for 10 s": 1,
        "infrastructure: lost: its server does not know of it": 1,
    }
    assert ledger.state.items[lost.item].state == "waiting"


def test_an_attempt_that_failed_is_repeated_by_another_server() -> None:
    ledger = Ledger(100, groups=4, max_staleness=0, lease_s=10.0)
    one, *_ = ledger.ask("a#1", 0, 2, 0.0)
    ledger.heartbeat("b#1", 0, [], 0.0)
    ledger.fail("a#1", one.item, one.lease, "broke", 1.0)
    assert items(ledger.ask("a#1", 0, 1, 1.0)) == [2], "a gets other work"
    assert items(ledger.ask("a#2", 0, 1, 1.0)) == [3], "also after a restart"
    assert items(ledger.ask("b#1", 0, 1, 1.0)) == [one.item]


def test_with_one_server_the_attempt_is_repeated_there() -> None:
    ledger = Ledger(100, groups=4, max_staleness=0, lease_s=10.0)
    ledger.heartbeat("gone", 0, [], 0.0)
    one, *_ = ledger.ask("a", 0, 2, 20.0)
    ledger.fail("a", one.item, one.lease, "broke", 20.0)
    assert items(ledger.ask("a", 0, 1, 20.0)) == [one.item], "`gone` was not heard of for longer than a lease"


def test_an_item_waits_for_another_server_no_longer_than_a_lease() -> None:
    ledger = Ledger(1, groups=1, max_staleness=0, lease_s=10.0, epochs=1)
    (one,) = ledger.ask("a", 0, 1, 0.0)
    ledger.heartbeat("b", 0, [], 5.0)  # alive, but it never asks
    ledger.fail("a", one.item, one.lease, "broke", 5.0)
    assert ledger.ask("a", 0, 1, 6.0, request=1) == [] and not ledger.view.finished()
    assert "1 items failed here and go to another server, if one asks within 10 s" in reasons.for_work(ledger, "a")
    ledger.heartbeat("a", 0, [], 14.0)
    assert ledger.expire(14.0) == 15.0, "the parked Ask is woken by the clock"
    before = ledger.state.revision
    assert ledger.expire(15.0) is None and ledger.state.revision > before
    assert items(ledger.ask("a", 0, 1, 15.0, request=1)) == [one.item]


def test_an_item_that_was_returned_goes_to_any_server() -> None:
    ledger = Ledger(100, groups=2, max_staleness=0)
    one, _ = ledger.ask("a", 0, 2, 0.0)
    ledger.heartbeat("b", 0, [], 0.0)
    ledger.fail("a", one.item, one.lease, "draining", 0.0, returned=True)
    assert items(ledger.ask("a", 0, 1, 0.0)) == [one.item]


def test_an_item_that_is_held_back_goes_to_nobody_and_keeps_its_place() -> None:
    ledger = Ledger(100, groups=2, max_staleness=0, versions=1, attempts=1)
    one, two = ledger.ask("a", 0, 2, 0.0)
    ledger.heartbeat("b", 0, [], 0.0)
    ledger.fail("a", one.item, one.lease, "its images are away", 0.0, returned=True, hold_s=2.0)
    assert ledger.ask("a", 0, 1, 0.0) == ledger.ask("b", 0, 1, 0.0) == [], "the last batch has a place for it alone"
    assert "1 item waits because" in reasons.for_work(ledger, "a") and ledger.batches.take(0) is None
    assert ledger.expire(1.0) == 2.0
    before = ledger.state.revision
    ledger.expire(2.0)
    assert ledger.state.revision > before and items(ledger.ask("b", 0, 1, 2.0)) == [one.item]
    assert not ledger.view.failed()
    put(ledger, "a", two)


@pytest.mark.parametrize("returned", [True, False])
def test_only_the_attempts_of_a_server_that_was_drained_do_not_count(returned: bool) -> None:
    ledger = Ledger(100, groups=2, max_staleness=0, attempts=1)
    leased = ledger.ask("a", 0, 2, 0.0)
    ledger.leave("a", "drained", 0.0, returned)
    assert (items(ledger.ask("b", 0, 2, 0.0)) == items(leased)) is returned
    assert ledger.view.counts()["dropped"] == (0 if returned else 2)


def test_an_item_stays_held_back_when_others_are_taken_back() -> None:
    ledger = Ledger(100, groups=2, max_staleness=0)
    held, old = ledger.ask("a", 0, 2, 0.0)
    ledger.heartbeat("b", 0, [], 0.0)
    ledger.fail("a", held.item, held.lease, "its images are away", 0.0, returned=True, hold_s=2.0)
    ledger.batches.rewind(7)  # the other item is too old for version 7
    assert ledger.view.counts()["waiting"] == 2
    assert items(ledger.ask("b", 7, 1, 0.0)) == [old.item]
    assert held.item not in items(ledger.ask("b", 7, 9, 1.0)), "no server gets it before its time"
    ledger.expire(2.0)
    assert ledger.state.pool.num_held == 0


def test_a_dropped_item_is_answered_from_the_store_also_after_a_restart() -> None:
    with Store(None) as store:
        ledger = Ledger(100, groups=2, max_staleness=0, skip_zero_variance=True, recall=store.closed)
        flat, bad = ledger.ask("a", 0, 2, 0.0)

        def answers(now: Ledger) -> None:
            assert now.put("a", flat.item, flat.lease, FLAT, 0.0) is None, "it was accepted, and left out"
            assert "lease" in str(now.put("b", flat.item, flat.lease, FLAT, 0.0)), "another server's is not"
            assert "dropped: prompt too long" in str(now.put("a", bad.item, bad.lease, GROUP, 0.0))
            now.fail("a", bad.item, bad.lease, "again", 0.0)
            assert now.view.counts()["dropped"] == 2 and not now.state.items

        assert ledger.put("a", flat.item, flat.lease, FLAT, 0.0) is None
        ledger.fail("a", bad.item, bad.lease, "prompt too long", 0.0, permanent=True)
        answers(ledger)
        store.commit(Transaction(ledger.drain()))
        answers(ledger)
        answers(reopened(ledger, store))


def test_drops_cost_no_memory() -> None:
    """Beside a record for each row of the data set."""
    ledger = Ledger(1000, groups=4, max_staleness=0, attempts=1, shuffle=False, max_failed_share=1.0)

    def size_after(number: int) -> int:
        for _ in range(number):
            (it,) = ledger.ask("a", 0, 1, 0.0, request=ledger.state.next_item + 1)
            ledger.fail("a", it.item, it.lease, f"no {it.item}", 0.0, kind="engine")
            ledger.drain()
        return len(pickle.dumps(ledger.state))

    before = size_after(5_000)
    assert size_after(100_000) - before < 10_000, "bytes of everything the ledger holds"
    assert not ledger.state.items and ledger.view.counts()["dropped"] == 105_000


# learner


def test_the_learner_is_served_the_same_batches_after_a_rewind() -> None:
    ledger = Ledger(100, groups=2, max_staleness=2)
    before = [train(ledger, version) for version in range(5)]
    assert ledger.state.last_trained == 4 and ledger.view.counts()["trained"] == 10
    assert ledger.batches.rewind(2) == 3
    assert (
        ledger.state.last_trained == 1 and ledger.view.counts()["trained"] == 4 and ledger.view.counts()["batched"] == 6
    )
    assert [ledger.batches.take(version) for version in range(2, 5)] == before[2:]
    ledger.batches.trained(2)
    assert ledger.view.lengths()["trained"] == (6, 12, 132, 84, 6)
    assert ledger.batches.rewind(5) == 0 and ledger.state.last_trained == 4, (
        "a checkpoint of version 5 has trained batch 4"
    )


def test_words_of_a_replaced_learner_change_nothing() -> None:
    ledger = Ledger(100, groups=1, max_staleness=2)
    for version in range(4):
        train(ledger, version)
    ledger.batches.rewind(1)
    ledger.batches.trained(3)
    assert ledger.state.last_trained == 0
    ledger.batches.take(1)
    ledger.batches.trained(1)
    ledger.batches.trained(0)
    assert ledger.state.last_trained == 1


def sampled_under(version: int) -> tuple[SampleStats, SampleStats]:
    return SampleStats(10, 6, 0.0, oldest=version), SampleStats(12, 8, 1.0, oldest=version + 1)


def test_a_group_that_went_back_with_the_learner_counts_from_its_oldest_token() -> None:
    ledger = Ledger(100, groups=2, max_staleness=2)
    for version in range(3):
        train(ledger, version)
    (late,) = ledger.ask("slow", 3, 1, 0.0)
    assert late.version == 3
    ledger.batches.rewind(1)  # and with it the policy of the server, in the middle of the group
    assert ledger.put("slow", late.item, late.lease, sampled_under(1), 0.0) is None
    assert ledger.state.items[late.item].version == 1
    for version in range(1, 3):
        ledger.batches.take(version)
    assert late.item in train(ledger, 3).items and ledger.view.ages()[2] == 1


def test_an_item_that_was_returned_has_cost_no_attempt() -> None:
    ledger = Ledger(100, groups=1, max_staleness=0, attempts=1)
    for _ in range(3):
        (it,) = ledger.ask("a", 0, 1, 0.0)
        ledger.fail("a", it.item, it.lease, "draining", 0.0, returned=True)
    assert ledger.view.counts()["waiting"] == 1 and not ledger.view.dropped()
    (it,) = ledger.ask("a", 0, 1, 0.0)
    ledger.fail("a", it.item, it.lease, "broke", 0.0)
    assert ledger.view.dropped() == {"broke": 1}


def test_a_group_that_went_back_too_far_is_dispatched_again_as_after_any_failure() -> None:
    ledger = Ledger(100, groups=2, max_staleness=1, attempts=2)
    for version in range(3):
        train(ledger, version)
    (late,) = ledger.ask("slow", 3, 1, 0.0)
    ledger.batches.rewind(1)
    answer = ledger.put("slow", late.item, late.lease, sampled_under(1), 0.0)
    assert answer and "sampled under version 1" in answer
    assert ledger.put("slow", late.item, late.lease, sampled_under(1), 0.0) == answer
    assert ledger.view.counts()["waiting"] == 1 and not ledger.view.dropped()
    for version in range(1, 3):
        ledger.batches.take(version)
    (again,) = ledger.ask("a", 3, 1, 0.0)
    assert again.item == late.item
    assert ledger.put(
        "a", again.item, again.lease, sampled_under(0), 0.0
    )  # a server that always errs cannot stop the run
    assert [reason.split(",")[0] for reason in ledger.view.dropped()] == ["sampled under version 0"]


def test_versions_that_a_rewind_undid_are_known_also_after_a_restart_of_the_buffer() -> None:
    with Store(None) as store:
        ledger = Ledger(100, groups=1, max_staleness=20, recall=store.closed)

        def taken(to: int) -> tuple[int, int]:
            for version in range(ledger.state.version, to):
                for lease in ledger.ask("a", version, 1, 0.0):
                    put(ledger, "a", lease)
                ledger.batches.take(version)
            return ledger.state.undone.restored, ledger.state.undone.reached

        ledger.batches.rewind(0)
        assert taken(9) == (0, 0), "nothing was undone"
        ledger.batches.rewind(9)
        assert taken(9) == (0, 0), "a drained learner undid nothing"
        ledger.batches.rewind(5)
        assert taken(9) == (5, 9)
        ledger.batches.take(6)
        ledger.batches.rewind(6)
        assert taken(9) == (5, 9), "tokens of both policies may remain"
        store.commit(Transaction(ledger.drain()))
        ledger = Ledger(100, groups=1, max_staleness=20, recall=store.closed)
        ledger.restore(store.load(), 0.0)
        assert taken(12) == (5, 9)
        ledger.batches.rewind(10)
        assert taken(12) == (10, 12)


def test_after_a_rewind_no_version_counts_that_is_to_be_reached_again() -> None:
    ledger = Ledger(100, groups=1, max_staleness=1)
    for version in range(4):
        train(ledger, version)
    ledger.batches.rewind(2)
    assert ledger.ask("a", 4, 1, 0.0) == [], "its next policy will be version 2, too old for batch 4"
    ledger.batches.take(2)
    (it,) = ledger.ask("a", 4, 1, 0.0)
    assert it.version == 3


def test_contradictions_of_the_learner_are_refused_with_a_remedy() -> None:
    ledger = Ledger(100, groups=1, max_staleness=2)
    with pytest.raises(LedgerError, match=r"Take\(1\): the next batch is 0; restart"):
        ledger.batches.take(1)
    with pytest.raises(LedgerError, match=r"Trained\(0\)"):
        ledger.batches.trained(0)
    for version in range(4):
        train(ledger, version)
    with pytest.raises(LedgerError, match=r"version 7, but the buffer's next batch is 4.*run\.name"):
        ledger.batches.rewind(7)
    assert ledger.batches.prune(3) == 3 and list(ledger.state.items) == [3]
    for refused in (lambda: ledger.batches.rewind(2), lambda: ledger.batches.take(2)):
        with pytest.raises(LedgerError, match="batch 2 is gone, the buffer keeps those from 3 on"):
            refused()
    assert ledger.batches.rewind(3) == 1 and ledger.batches.take(3)


def test_only_trained_batches_are_pruned() -> None:
    ledger = Ledger(100, groups=1, max_staleness=2)
    put(ledger, "a", *ledger.ask("a", 0, 3, 0.0))
    ledger.batches.take(0), ledger.batches.take(1)
    ledger.batches.trained(0)
    assert ledger.batches.prune(9) == 1 and ledger.batches.prune(9) == 1 and sorted(ledger.state.items) == [1, 2]
    assert ledger.batches.take(1)


def test_groups_that_were_not_made_at_the_first_attempt_are_counted() -> None:
    ledger = Ledger(100, groups=2, max_staleness=0)
    once, twice = ledger.ask("a", 0, 2, 0.0)
    ledger.fail("a", twice.item, twice.lease, "no", 0.0)
    put(ledger, "a", once, *ledger.ask("a", 0, 1, 0.0))
    assert ledger.state.totals.groups("retried") == 1 and ledger.state.totals.groups("generated") == 2


def test_a_group_whose_samples_were_discarded_is_dropped_without_samples() -> None:
    ledger = Ledger(100, groups=2, max_staleness=2, versions=50)
    old = ledger.ask("a", 40, 1, 0.0)
    put(ledger, "a", *old)
    ledger.batches.rewind(40)
    (again,) = ledger.ask("a", 40, 1, 0.0)
    assert again.item == old[0].item
    ledger.fail("a", again.item, again.lease, "no", 0.0, True)
    assert ledger.view.lengths()["dropped: no"] == Lengths(groups=1)


def test_a_new_ledger_takes_up_at_any_version() -> None:
    ledger = Ledger(100, groups=2, max_staleness=2, versions=50)
    work = ledger.ask("a", 40, 9, 0.0)
    assert {it.version for it in work} == {0}, "no policy above 0 can exist before the learner says so"
    put(ledger, "a", *work[:3])
    assert ledger.batches.rewind(40) == 0 and ledger.state.version == 40 and ledger.state.last_trained == 39
    assert ledger.view.counts() == dict(leased=0, stored=0, waiting=6, batched=0, trained=0, dropped=0)
    assert "lease 1 of item 0 is over" in str(ledger.put("a", 0, 1, GROUP, 0.0))
    again = ledger.ask("a", 40, 9, 0.0)
    assert items(again) == items(work) and {it.version for it in again} == {40}
    assert ledger.view.lengths()["discarded: could not be trained within 2 versions of 40"].groups == 3
    put(ledger, "a", *again)
    assert ledger.batches.rewind(30) == 0, "as long as no batch was formed"
    assert ledger.state.version == 30
    train(ledger, 30)
    with pytest.raises(LedgerError, match="batch 29 is gone"):
        ledger.batches.rewind(29)


def test_a_fast_forward_keeps_what_is_young_enough() -> None:
    ledger = Ledger(100, groups=2, max_staleness=2)
    put(ledger, "a", *ledger.ask("a", 0, 6, 0.0))
    ledger.batches.rewind(1)
    assert ledger.view.counts()["stored"] == 4
    assert ledger.batches.take(1) and ledger.batches.take(2)
    assert ledger.view.ages() == {1: 2, 2: 2}


# restart


def test_a_reopened_ledger_goes_on_where_it_was() -> None:
    with Store(None) as store:
        ledger = Ledger(100, groups=2, max_staleness=2, attempts=2, lease_s=10.0)
        batches = [train(ledger, version) for version in range(3)]
        one, two, three = ledger.ask("a", 3, 3, 0.0, request=5)
        put(ledger, "a", one)
        ledger.fail("a", two.item, two.lease, "no", 0.0)
        again = reopened(ledger, store, now=1000.0)
        assert (again.state.version, again.state.last_trained, again.view.counts()) == (3, 2, ledger.view.counts())
        assert again.view.lengths() == ledger.view.lengths() and again.view.ages() == ledger.view.ages()
        assert again.ask("a", 3, 3, 1000.0, request=5) == [three]
        assert again.expire(1000.0) == 1010.0, "leases go on"
        put(again, "a", three, one)
        assert [again.batches.take(version) for version in range(3)] == batches
        (retried,) = again.ask("b", 3, 1, 1000.0)
        assert retried.item == two.item and retried.lease > three.lease
        again.fail("b", retried.item, retried.lease, "again", 0.0)
        assert again.view.dropped() == {"again": 1}
        assert not reopened(again, store).drain().items


def test_a_reopened_ledger_has_forgotten_what_was_pruned() -> None:
    with Store(None) as store:
        ledger = Ledger(100, groups=2, max_staleness=2)
        last = [train(ledger, version) for version in range(5)][-1]
        ledger.batches.prune(4)
        again = reopened(ledger, store)
        assert again.batches.take(4) == last and len(again.state.items) == 2
        with pytest.raises(LedgerError, match="batch 3 is gone"):
            again.batches.take(3)
        assert again.view.counts() == ledger.view.counts()
        assert reopened(again, store).view.counts() == ledger.view.counts()


def test_changes_that_were_pruned_before_they_were_written_are_written() -> None:
    with Store(None) as store:
        ledger = Ledger(100, groups=1, max_staleness=2)
        train(ledger, 0)
        ledger.batches.prune(1)
        store.commit(Transaction(ledger.drain(), void_before=1))
        assert store._db.execute("SELECT item, state, batch FROM items").fetchall() == [(0, "trained", 0)]


def test_a_smaller_bound_after_a_restart_is_held() -> None:
    with Store(None) as store:
        ledger = Ledger(100, groups=2, max_staleness=4)
        put(ledger, "a", *ledger.ask("a", 0, 10, 0.0))
        assert ledger.view.counts()["stored"] == 10
        again = reopened(ledger, store, max_staleness=1)
        assert again.view.counts()["stored"] == 4 and again.view.counts()["waiting"] == 6
        assert reopened(again, store).view.counts() == again.view.counts()


def test_other_problems_after_a_restart_are_refused() -> None:
    with Store(None) as store:
        ledger = Ledger(100, groups=2, max_staleness=4)
        with pytest.raises(LedgerError, match=r"problems = 100, the run 99.*run\.name"):
            reopened(ledger, store, problems=99)


# size


@pytest.mark.parametrize("number", [1000, 100_000])
def test_a_call_costs_little_however_many_groups_are_open(number: int) -> None:
    """5 s for 4,000 calls is 50 times what they take; a scan of 100,000 items in each would take minutes."""
    ledger = Ledger(10**6, groups=100, max_staleness=number // 100, shuffle=False)
    for server in range(10):
        ledger.ask(f"full-{server}", 0, number // 10 - 100, 0.0)
    began = time.thread_time()
    for _ in range(1000):
        (it,) = ledger.ask("a", 0, 1, 0.0)
        put(ledger, "a", it)
        ledger.batches.take(0)
        ledger.drain()
    assert time.thread_time() - began < 5


def test_ten_thousand_open_groups_are_read_back_quickly() -> None:
    with Store(None) as store:
        ledger = Ledger(10**5, groups=100, max_staleness=99)
        for server in range(100):
            put(ledger, str(server), *ledger.ask(str(server), 0, 100, 0.0)[:50])
        store.commit(Transaction(ledger.drain()))
        began = time.thread_time()
        again = reopened(ledger, store)
        assert time.thread_time() - began < 2
        assert again.view.counts() == ledger.view.counts() and again.view.counts()["leased"] == 5000


def test_a_failed_item_keeps_its_place_among_the_last_of_the_run() -> None:
    """Its own server, which asks first, must not fill the last place with another problem."""
    ledger = Ledger(100, groups=2, max_staleness=1, versions=1)
    first, second = ledger.ask("a", 0, 2, 0.0)
    assert ledger.ask("b", 0, 1, 0.0) == []
    ledger.fail("a", first.item, first.lease, "no", 0.0)
    assert ledger.ask("a", 0, 1, 0.0) == []
    again = ledger.ask("b", 0, 1, 0.0)
    assert items(again) == [first.item]
    put(ledger, "a", second)
    put(ledger, "b", *again)
    assert ledger.batches.take(0) is not None and ledger.view.finished() and ledger.view.counts()["waiting"] == 0


def test_without_another_server_in_time_a_failed_item_goes_back_to_its_own() -> None:
    ledger = Ledger(100, groups=2, max_staleness=1, versions=1, lease_s=10.0)
    first, _ = ledger.ask("a", 0, 2, 0.0)
    ledger.ask("b", 0, 1, 0.0)
    ledger.fail("a", first.item, first.lease, "no", 0.0)
    assert ledger.ask("a", 0, 1, 9.0) == []
    ledger.expire(10.0)
    assert items(ledger.ask("a", 0, 1, 10.0)) == [first.item]
