"""Groups that cannot be trained: what becomes of them and of their batches, and how one is found that ends the learner.
That it holds in any order of events is in test_rules_properties.py."""

import pytest

from buffer.ledger import reasons
from buffer.ledger.rules import Ledger
from buffer.ledger.training import LEAST_QUARANTINED
from buffer.ledger.types import LedgerError, SampleStats, Transaction
from buffer.store.sqlite import Store
from tests.buffer.ledger.test_rules import GROUP, items, put, reopened, train


def formed(batches: int, groups: int = 2) -> tuple[Ledger, Store]:
    """A ledger with so many batches that no learner has trained, and two more groups that are stored."""
    store = Store(None)
    ledger = Ledger(100, groups=groups, max_staleness=9, recall=store.closed)
    put(ledger, "a", *ledger.ask("a", 0, batches * groups + 2, 0.0))
    for version in range(batches):
        ledger.batches.take(version)
        ledger.batches.trained(version)
    ledger.batches.rewind(0)
    return ledger, store


def test_a_batch_is_served_without_the_group_and_no_other_batch_changes() -> None:
    ledger, store = formed(3)
    before = [ledger.batches.take(version) for version in range(3)]
    assert ledger.batches.quarantine(2, "tokens: 99") is True
    assert ledger.batches.quarantine(2, "again") is False, "also before it is written"
    for again in (ledger, reopened(ledger, store)):
        assert [again.batches.take(version).items for version in range(3)] == [(0, 1), (3,), (4, 5)]
        assert again.batches.take(0) == before[0] and again.batches.take(2) == before[2] and again.state.version == 3
        assert again.view.counts()["quarantined"] == 1 and again.batches.quarantine(2, "again") is False
        assert again.view.ages() == {0: 2, 1: 1, 2: 2}
    assert ledger.put("a", 2, 3, GROUP, 0.0) is None, "its server repeats the Put, and it was accepted"
    assert "its group was put into quarantine: tokens: 99" in str(ledger.put("b", 2, 99, GROUP, 0.0))
    row = store._db.execute("SELECT state, reason, batch FROM items WHERE item = 2").fetchone()
    assert row == ("quarantined", "tokens: 99", 1)


def test_a_batch_that_loses_its_last_group_is_formed_anew_with_those_after_it() -> None:
    ledger, store = formed(2)
    store.commit(Transaction(ledger.drain()))
    ledger.batches.take(0)
    assert ledger.batches.quarantine(0, "bad") and ledger.batches.quarantine(1, "bad")
    assert ledger.state.version == 0 and ledger.state.ceiling == 0
    restarted = reopened(ledger, store)
    assert store._db.execute("SELECT * FROM batches").fetchall() == []
    for again in (restarted, ledger):
        assert again.batches.take(0).items == (2, 3) and again.batches.take(1).items == (4, 5)
        assert again.view.counts()["batched"] == 4 and again.view.counts()["stored"] == 0
    ledger.batches.trained(0)
    with pytest.raises(LedgerError, match="item 2 was trained in batch 0"):
        ledger.batches.quarantine(2, "too late")


def test_groups_of_later_policies_go_back_when_a_batch_is_formed_anew() -> None:
    store = Store(None)
    ledger = Ledger(100, groups=1, max_staleness=1, shuffle=False, recall=store.closed)
    for version in range(3):
        train(ledger, version)
    ledger.batches.rewind(0)
    assert ledger.batches.quarantine(0, "bad")
    assert ledger.view.counts()["waiting"] == 2 and ledger.batches.take(0) is None, (
        "items 1 and 2 are of versions 1 and 2"
    )
    assert items(ledger.ask("a", 0, 9, 0.0)) == [1, 2]


def test_a_stored_group_is_never_batched_and_the_next_one_takes_its_place() -> None:
    ledger, _ = formed(0)
    assert ledger.batches.quarantine(1, "bad") and ledger.batches.take(0) is None
    put(ledger, "a", *ledger.ask("a", 0, 1, 0.0))
    assert ledger.batches.take(0).items == (0, 2)


def test_what_has_no_group_cannot_go_into_quarantine() -> None:
    ledger = Ledger(9, groups=1, max_staleness=3, shuffle=False, attempts=1)
    leased, failed = ledger.ask("a", 0, 2, 0.0)
    ledger.fail("a", failed.item, failed.lease, "broken", 0.0)
    for item, state in ((leased.item, "leased"), (failed.item, "dropped"), (7, "not known here")):
        with pytest.raises(LedgerError, match=f"item {item} is {state}"):
            ledger.batches.quarantine(item, "bad")


def test_the_samples_are_kept_when_their_batch_is_pruned() -> None:
    ledger, store = formed(2)
    payloads = {number: [b"one", b"two"] for number in ledger.state.items}
    store.commit(Transaction(ledger.drain(), payloads))
    ledger.batches.take(0)
    ledger.batches.quarantine(1, "bad")
    for version in range(2):
        ledger.batches.take(version)
        ledger.batches.trained(version)
    store.commit(Transaction(ledger.drain(), void_before=ledger.batches.prune(2)))
    assert store.group(0) == [] and store.group(1) == [b"one", b"two"]


def test_a_run_whose_groups_all_go_into_quarantine_is_given_up_until_the_learner_starts() -> None:
    ledger, store = formed(LEAST_QUARANTINED // 2)
    for item in range(LEAST_QUARANTINED):
        assert not ledger.view.finished()
        ledger.batches.quarantine(item, "tokens: 99")
    assert ledger.view.outcome() == "failed" and ledger.batches.take(0) is None
    why = reasons.ended(ledger)
    assert f"{LEAST_QUARANTINED} groups were put into quarantine and none was trained" in why and "tokens: 99" in why
    assert "buffer quarantine" in why
    again = reopened(ledger, store)
    assert again.view.outcome() == "failed"
    again.batches.rewind(0)
    assert again.view.outcome() is None


def test_a_trained_batch_shows_that_the_run_can_go_on() -> None:
    ledger, _ = formed(7, groups=4)
    for version in range(7):
        for item in ledger.batches.take(version).items[:3]:
            ledger.batches.quarantine(item, "bad")
        ledger.batches.trained(version)
    assert ledger.view.outcome() is None and ledger.view.counts()["quarantined"] == 21 > 2 * LEAST_QUARANTINED


def start(ledger: Ledger, version: int, ranks: int = 2) -> None:
    """The ranks of a learner say that they have started, and take the batch."""
    for _ in range(ranks):
        ledger.batches.rewind(version)
    for _ in range(ranks):
        ledger.batches.take(version)


def test_a_batch_with_which_two_starts_ended_is_suspect_until_it_is_trained() -> None:
    ledger, store = formed(2)
    for ends in range(3):
        start(ledger, 0)
        assert ledger.batches.suspicion.is_suspect(0) is (ends == 2) and not ledger.batches.suspicion.is_suspect(1)
    again = reopened(ledger, store)
    assert again.batches.suspicion.is_suspect(0)
    again.batches.trained(0)
    assert not again.batches.suspicion.is_suspect(0)


def test_the_count_of_a_batch_goes_on_while_earlier_ones_are_trained_again() -> None:
    ledger, _ = formed(2)
    for _ in range(2):
        start(ledger, 0)
        ledger.batches.trained(0)
        ledger.batches.take(1)
    start(ledger, 0)
    assert ledger.batches.suspicion.is_suspect(1) and not ledger.batches.suspicion.is_suspect(0)


def test_the_group_with_which_two_starts_ended_goes_into_quarantine() -> None:
    ledger, store = formed(2)
    start(ledger, 0)
    ledger.batches.try_alone(0, 0)
    ledger.batches.try_alone(0, 1)
    ledger = reopened(ledger, store)
    start(ledger, 0)
    ledger.batches.try_alone(0, 0)
    ledger.batches.try_alone(0, 1)
    ledger = reopened(ledger, store)
    start(ledger, 0)
    assert (
        ledger.batches.take(0).items == (0,)
        and ledger.view.counts()["quarantined"] == 1
        and not ledger.batches.suspicion.is_suspect(0)
    )
    store.commit(Transaction(ledger.drain()))
    assert store.closed(1).reason == "the learner ended 2 times while it tried this group by itself"


def test_ends_with_other_groups_name_none() -> None:
    ledger, _ = formed(2)
    for item in (0, 1, 0, 1, None):
        start(ledger, 0)
        ledger.batches.try_alone(0, item)
    start(ledger, 0)
    assert "quarantined" not in ledger.view.counts()
    with pytest.raises(LedgerError, match="item 3 is not in batch 0"):
        ledger.batches.try_alone(0, 3)


@pytest.mark.parametrize(
    ("oldest", "newest", "words"),
    [
        (0, 0, "sampled under version 0, and its server had version 2 or a later one"),
        (2, 4, "sampled under version 4, and no policy above version 3 exists"),
        (2, 3, ""),
    ],
)
def test_tokens_of_policies_that_no_server_can_have_had_are_a_failed_attempt(oldest: int, newest: int, words: str):
    ledger = Ledger(100, groups=1, max_staleness=9, shuffle=False)
    for version in range(2):
        train(ledger, version)
    (it,) = ledger.ask("a", 2, 1, 0.0)
    put(ledger, "a", *ledger.ask("a", 2, 1, 0.0))
    ledger.batches.take(2)
    group = (SampleStats(8, 5, 0.0, oldest=oldest, newest=newest), SampleStats(8, 5, 1.0, oldest=3, newest=3))
    answer = ledger.put("a", it.item, it.lease, group, 0.0)
    assert words in (answer or "") and (answer is None) == (words == "")
    assert list(ledger.view.failed()) == ([f"engine: {words}"] if words else [])


def test_after_a_rewind_a_server_may_have_had_an_older_policy_and_one_that_was_undone() -> None:
    ledger = Ledger(100, groups=1, max_staleness=9, shuffle=False)
    for version in range(4):
        train(ledger, version)
    (it,) = ledger.ask("a", 4, 1, 0.0)
    ledger.batches.rewind(1)
    group = (SampleStats(8, 5, 0.0, oldest=1, newest=4), SampleStats(8, 5, 1.0, oldest=1, newest=1))
    assert ledger.put("a", it.item, it.lease, group, 0.0) is None
