"""The buffer does its work once, however many ranks ask, however much is stored and however long it waits."""

from collections.abc import Sequence
from typing import Any

import pytest

from buffer.problems import Problems
from buffer.wire import requests as pending
from buffer.wire import sample
from buffer.wire.handlers import revision_of
from buffer.wire.message import MOST_HELD
from buffer.wire.protocol import Ack, Ask, Heartbeat, Later, Part, Put, Rewind, Stored, Take, Trained, Work
from tests.buffer.wire.test_many import Clients, hello
from tests.harness.buffer_process import PROBLEMS, group, make_requests

RANKS = 8


class NotScanned(dict[Any, Any]):
    """A dict that allows access by key but no iteration."""

    def _scan(self, *_: Any) -> Any:
        raise AssertionError("it was gone through")

    __iter__ = items = values = keys = copy = __or__ = __ior__ = _scan  # type: ignore[assignment]


def stored(clients: Clients, number: int) -> dict[int, int]:
    """Put `number` groups; returns the bytes of each, by item."""
    sizes = {}
    for item in clients.work("a", number):
        clients.put("a", item)
        sizes[item.item] = sum(len(one.pack()) for one in group(item.item, item.version))
    clients.turn()
    return sizes


def test_trained_of_every_rank_costs_the_same_however_much_is_stored() -> None:
    clients = Clients(make_requests(groups=2, max_staleness=40), ranks=RANKS)
    handlers = clients.requests.handlers
    sizes = stored(clients, 60)
    for rank in range(RANKS):
        clients.say(f"l{rank}", Take(version=0, rank=rank, world=RANKS))
    clients.turn()
    handlers.ledger.state.items = NotScanned(handlers.ledger.state.items)
    groups = handlers.groups
    groups._bytes, groups._figures = NotScanned(groups._bytes), NotScanned(groups._figures)
    groups.cache.groups = NotScanned(groups.cache.groups)
    numbers, cuts, revisions = [], set(), set()
    for rank in range(RANKS):
        numbers.append(clients.say(f"l{rank}", Trained(version=0, oldest_kept=0)))
        clients.say(f"l{rank}", Take(version=1, rank=rank, world=RANKS))
        parts = {number: message for _, number, message in clients.turn()}
        assert parts[numbers[-1]] == Ack()
        cuts.add(id(groups._cut))
        revisions.add(revision_of(handlers))
    assert len(cuts) == 1, "the next batch is cut once, also if ranks send Trained after the first rank has taken it"
    assert len(revisions) == 1, "a repeated Trained must not retry parked requests"
    assert handlers.ledger.state.last_trained == 0 and len(groups._cut) == 2
    assert groups.bytes_stored == sum(sizes[item] for item in range(2, 60))
    assert len(groups._figures) == len(groups._bytes) == len(groups.cache.groups) == 58


def test_bytes_of_batches_that_a_rewind_brings_back_count_again() -> None:
    clients = Clients(make_requests(groups=2, max_staleness=4))
    handlers, sizes = clients.requests.handlers, stored(clients, 8)
    for version in range(3):
        clients.say("l0", Take(version=version, rank=0, world=1))
        clients.say("l0", Trained(version=version, oldest_kept=0))
        clients.turn()
    assert handlers.groups.bytes_stored == sum(sizes[item] for item in (6, 7))
    clients.say("l0", Rewind(version=1))
    clients.turn()
    clients.say("l0", Take(version=2, rank=0, world=1))
    (part,) = [message for *_, message in clients.turn() if isinstance(message, Part)]
    assert (part.restored, part.reached) == (1, 3)
    assert handlers.groups.bytes_stored == sum(sizes[item] for item in range(2, 8))


def test_bytes_of_groups_that_are_taken_back_count_no_longer() -> None:
    clients = Clients(make_requests(groups=2, max_staleness=0))
    stored(clients, 2)
    clients.say("l0", Rewind(version=7))  # no batch was formed, so the run begins there
    clients.turn()
    handlers = clients.requests.handlers
    assert handlers.ledger.view.counts()["waiting"] == 2
    assert handlers.groups.bytes_stored == 0 and not handlers.groups._figures and not handlers.groups.cache.groups


class CountedParses:
    """Counts how often a sample was parsed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, parse = 0, sample._parse_fast

        def counted(samples: Sequence[bytes], bounds: Any) -> Any:
            self.number += len(samples)
            return parse(samples, bounds)

        monkeypatch.setattr(sample, "_parse_fast", counted)


def test_a_parked_group_is_parsed_once_when_there_is_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients(make_requests(groups=2, max_staleness=4, max_bytes=1))
    first, *others = clients.work("a", 4)
    clients.put("a", first)
    clients.turn()
    parses = CountedParses(monkeypatch)
    numbers = [clients.put("a", item) for item in others]
    for version in range(50):
        clients.say("b", Heartbeat(version=version % 2, holding=[]))  # each one is a change
        clients.turn()
    assert parses.number == 0
    samples = [one.pack() for one in group(others[0].item)]
    clients.say("a", Put(item=others[0].item, lease=others[0].lease, samples=samples), numbers[0])  # repeated
    clients.turn()
    assert parses.number == 0
    clients.say("l0", Take(version=0, rank=0, world=1))
    answers = [message for *_, message in clients.turn()]
    assert sum(isinstance(message, Stored) and message.accepted for message in answers) == len(others)
    assert parses.number == 2 * len(others)


def test_parked_groups_are_judged_a_few_in_each_turn_until_the_batch_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB take a second or ten, and the learner gets no part before that."""
    monkeypatch.setattr(pending, "COMMIT_BYTES", 1)
    clients = Clients(make_requests(groups=4, max_staleness=4, max_bytes=1))
    first, *others = clients.work("a", 6)
    clients.put("a", first)
    clients.turn()
    for item in others:
        clients.put("a", item)
    clients.say("l0", Take(version=0, rank=0, world=1))
    kinds = []
    for _ in range(3):
        kinds.append(sorted(type(message).__name__ for *_, message in clients.turn()))
        assert clients.requests._postponed == (len(kinds) < 3)
    assert kinds == [["Stored"], ["Stored"], ["Part", "Stored"]] and clients.turn() == []
    assert len(list(clients.requests._parked)) == 2


def test_a_group_that_cannot_be_trained_is_refused_once_there_is_room_and_its_item_goes_on() -> None:
    clients = Clients(make_requests(groups=2, max_staleness=4, max_bytes=1))
    first, second, third = clients.work("a", 3)
    clients.put("a", first)
    clients.turn()
    samples = [one.pack()[:-1] for one in group(second.item)]
    clients.say("a", Put(item=second.item, lease=second.lease, samples=samples))
    clients.put("a", third)
    assert clients.turn() == [], "the buffer is full"
    clients.say("l0", Take(version=0, rank=0, world=1))
    stored = [message for *_, message in clients.turn() if isinstance(message, Stored)]
    assert [(one.accepted, one.unfit) for one in stored] == [(False, True), (True, False)]
    assert clients.requests.parked_bytes == 0 and clients.requests.handlers.ledger.view.counts()["waiting"] == 1


def test_a_group_with_a_wrong_number_of_samples_is_refused_though_the_buffer_is_full() -> None:
    """65,536 empty samples have no bytes that count, and take half a megabyte."""
    clients = Clients(make_requests(groups=2, max_staleness=4, max_bytes=1))
    first, second = clients.work("a", 2)
    clients.put("a", first)
    clients.turn()
    clients.say("a", Put(item=second.item, lease=second.lease, samples=[b""] * MOST_HELD))
    (stored,) = [message for *_, message in clients.turn()]
    assert stored.unfit and f"{MOST_HELD} samples, batch.samples is 2" in stored.reason
    assert not list(clients.requests._parked) and clients.requests.handlers.ledger.view.counts()["waiting"] == 1


def test_a_group_that_is_put_off_is_parsed_when_it_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "PARKED_BYTES", 0)
    clients = Clients(make_requests(groups=2, max_staleness=4, max_bytes=1))
    first, second = clients.work("a", 2)
    clients.put("a", first)
    clients.turn()
    parses = CountedParses(monkeypatch)
    clients.put("a", second)
    assert [type(message) for *_, message in clients.turn()] == [Later] and parses.number == 0


class SlowRows:
    """Rows of a set; only the rows below `made` are ready."""

    def __init__(self) -> None:
        self.made, self.looked_at = 0, 0

    def expect(self, rows: Any) -> None:
        self.looked_at += 1

    def is_ready(self, index: int) -> bool:
        return index < self.made


def test_asks_that_wait_for_a_row_are_not_tried_one_by_one_before_it_is_made() -> None:
    rows = SlowRows()
    problems = Problems(len(PROBLEMS), PROBLEMS.__getitem__, "", made=rows)  # type: ignore[arg-type]
    clients = Clients(make_requests(groups=10, problems=problems))
    for number in range(20):
        clients.say(f"s{number}", hello(f"s{number}"))
        clients.say(f"s{number}", Ask(request=1, version=0, room=1))
    clients.turn()
    before = rows.looked_at
    for _ in range(5):
        problems.num_made += 1  # of another set, or a later row
        clients.turn()
    assert rows.looked_at == before
    rows.made, problems.num_made = 2, problems.num_made + 1
    assert sum(isinstance(message, Work) for *_, message in clients.turn()) == 2
