"""What thousands of clients need: parts in turns and in frames, parked requests in groups, Puts that are put off."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.resources import OpenFiles
from buffer.wire import requests as pending
from buffer.wire.batches import LoopTurn
from buffer.wire.client import RefusedError
from buffer.wire.handlers import revision_of
from buffer.wire.message import FRAME_BYTES, pack, pack_frames, unpack
from buffer.wire.protocol import (
    ANSWERS,
    PROTOCOL,
    Ack,
    Again,
    Ask,
    Heartbeat,
    Hello,
    Later,
    Part,
    Put,
    Rewind,
    State,
    Status,
    Stored,
    Take,
    Trained,
    Work,
    WorkItem,
)
from buffer.wire.requests import PendingRequests
from tests.harness.buffer_process import buffer, client, committed, group, in_loop, make_requests, rollout

LARGE = FRAME_BYTES // 13 + 100
"""Tokens of a sample that travels as a frame."""


def hello(name: str, role: str = "rollout") -> Hello:
    return Hello(name=name, token=name, role=role, protocol=PROTOCOL, fingerprint="f" * 16)  # type: ignore[arg-type]


class Clients:
    """Requests, answers and numbers of processes that talk to `requests` without a socket."""

    def __init__(self, requests: PendingRequests, ranks: int = 1) -> None:
        self.requests, self.number = requests, 0
        self.roles = dict[str, str]()
        """The role that each client has said."""
        for name in ("a", "b", "c"):
            self.say(name, hello(name))
        for rank in range(ranks):
            self.say(f"l{rank}", hello(f"l{rank}", "learner"))

    def say(self, who: str, message: Any, number: int | None = None) -> int:
        self.number += 1
        if isinstance(message, Hello):
            self.roles[who] = message.role
        self.requests.receive([who.encode(), pack(number or self.number, message)], 0.0, self.roles.get(who, "rollout"))
        return number or self.number

    def turn(self, turn: LoopTurn | None = None) -> list[tuple[str, int, Any]]:
        """What the event loop does with what was said; returns the answers."""
        self.requests.retry(0.0)
        committed(self.requests)
        answers = [
            (bytes(who).decode(), *unpack(first, ANSWERS, [bytes(one) for one in large]))
            for who, first, *large in self.requests.out
        ]
        self.requests.out.clear()
        self.requests.handlers.groups.turn = turn or LoopTurn()
        return answers

    def put(self, who: str, item: WorkItem, tokens: int = 4) -> int:
        samples = [one.pack() for one in group(item.item, item.version, tokens=tokens)]
        return self.say(who, Put(item=item.item, lease=item.lease, samples=samples))

    def work(self, who: str, room: int) -> list[WorkItem]:
        self.say(who, Ask(request=self.number, version=0, room=room))
        (answer,) = [message for _, _, message in self.turn() if isinstance(message, Work)]
        return answer.items


# frames


@given(st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_a_part_is_the_same_in_frames_and_in_one(number, large):
    requests = make_requests(groups=2)
    clients = Clients(requests)
    for item in clients.work("a", 2):
        clients.put("a", item, LARGE if large else 4)
    clients.say("l0", Take(version=0, rank=0, world=1))
    (part,) = [message for _, _, message in clients.turn() if isinstance(message, Part)]
    frames = pack_frames(number, part)
    assert len(frames) == (5 if large else 1)
    first, *rest = frames
    assert (
        unpack(first, ANSWERS, [bytes(frame) for frame in rest])
        == (number, part)
        == unpack(pack(number, part), ANSWERS)
    )


def test_frames_that_belong_to_nothing_are_refused():
    with pytest.raises(ValueError, match="1 frames after a message that is whole"):
        unpack(pack(1, Ack()), ANSWERS, [b"x"])


@in_loop
async def test_large_parts_are_the_same_for_all_ranks_after_a_restart_of_everybody(tmp_path):
    path = tmp_path / "buffer.sqlite"
    async with buffer(make_requests(path, groups=3)) as it, rollout(it.address) as samples:
        for item in await samples.ask(3) or []:
            await samples.put(item, group(item.item, tokens=LARGE))
        before = await parts_of(it.address, 2)
    async with buffer(make_requests(path, groups=3)) as it:
        again, known = await parts_of(it.address, 2), [part.model_copy(update={"new_groups": 0}) for part in before]
        assert again == known == await parts_of(it.address, 2), "a restart forgets only how many groups were new"
    assert sorted(position for part in before for position in part.positions.numpy().tolist()) == list(range(6))


async def parts_of(address: str, world: int) -> list[Part]:
    async with client(address, "learner-0", "learner") as learner:
        takes = (Take(version=0, rank=rank, world=world) for rank in range(world))
        return list(await asyncio.gather(*(learner.expect(take, Part) for take in takes)))


# turns


def test_a_turn_makes_as_many_parts_as_it_has_room_for_and_the_next_ones_go_on():
    clients = Clients(make_requests(groups=4), ranks=4)
    for item in clients.work("a", 4):
        clients.put("a", item)
    clients.turn(LoopTurn(room=1))
    for rank in range(4):
        clients.say(f"l{rank}", Take(version=0, rank=rank, world=4))
    assert clients.requests.handlers.groups.turn.postponed
    served = []
    for _ in range(4):
        assert not clients.requests.handlers.groups.learner_waiting, "a batch that is formed waits for no groups"
        clients.say("a", Heartbeat(version=0, holding=[]))
        heard = clients.turn(LoopTurn(room=1))
        assert [who for who, _, message in heard if not isinstance(message, Part)] == ["a"], (
            "others are answered between"
        )
        served += [who for who, _, message in heard if isinstance(message, Part)]
    assert served == ["l0", "l1", "l2", "l3"]
    assert not clients.turn()


def test_who_waits_for_its_turn_is_told_so():
    clients = Clients(make_requests(groups=1))
    (item,) = clients.work("a", 1)
    clients.put("a", item)
    clients.turn(LoopTurn(seconds=0))
    clients.say("l0", Take(version=0, rank=0, world=1))
    clients.say("a", Status())
    (state,) = [message for _, _, message in clients.turn(LoopTurn(seconds=0)) if isinstance(message, State)]
    assert [waiter.why for waiter in state.waiters] == ["batch 0 is formed; parts are sent one after another"]


def test_figures_of_a_restarted_buffer_are_read_in_turns(tmp_path: Path):
    path = tmp_path / "buffer.sqlite"
    clients = Clients(make_requests(path, groups=3))
    for item in clients.work("a", 3):
        clients.put("a", item)
    clients.turn()
    clients.requests.handlers.store.close()
    clients = Clients(make_requests(path, groups=3))
    clients.turn(LoopTurn(seconds=1e-9))
    clients.say("l0", Take(version=0, rank=0, world=1))
    turns = 0
    while not any(isinstance(message, Part) for _, _, message in clients.turn(LoopTurn(seconds=1e-9))):
        turns += 1
    assert turns >= 3, "a group in each"
    clients.requests.handlers.store.close()


# parked requests


class TriesAll(PendingRequests):
    """Tries each parked request at every change: what is parked in groups must come to the same."""

    def retry(self, now):
        again = True
        while again or self._tried != revision_of(self.handlers):
            again, self._tried = False, revision_of(self.handlers)
            for request in list(self._parked):
                self._try(request, now)
        super().retry(now)

    def _retry_asks(self, waits, now):
        for _, request in self._parked.of(waits):
            self._try(request, now)


class Script:
    """A run of three servers and two ranks, chosen by numbers."""

    def __init__(self, kind: type[PendingRequests], sizes: dict[str, Any]) -> None:
        it = make_requests(**sizes)
        self.clients = Clients(kind(it.handlers, it.max_message), ranks=2)
        self.held: list[tuple[str, WorkItem]] = []
        self.asked, self.versions, self.taken = 0, dict.fromkeys("abc", 0), 0
        self.told: list[tuple[str, int, str]] = []

    def step(self, what: int, which: int) -> None:
        who, say = "abc"[which % 3], self.clients.say
        if what == 0:
            self.asked += 1
            say(who, Ask(request=self.asked, version=self.versions[who], room=1 + which % 4))
        elif what == 1 and self.held:
            who, item = self.held.pop(which % len(self.held))
            self.clients.put(who, item)
        elif what == 2:
            self.versions[who] = min(self.versions[who] + 1, self.taken)
            mine = [item.lease for server, item in self.held if server == who]
            say(who, Heartbeat(version=self.versions[who], holding=mine))
        elif what == 3:
            for rank in range(2):
                say(f"l{rank}", Take(version=self.taken, rank=rank, world=2))
        elif what == 4 and self.taken:
            say("l0", Trained(version=self.taken - 1, oldest_kept=self.taken - 1))
        elif what == 5:
            say(who, hello(who))
        elif what == 6:
            say("l0", Rewind(version=self.taken))
        for who, number, message in self.clients.turn():
            self.told.append((who, number, message.model_dump_json() if not isinstance(message, Part) else "part"))
            self.held += [(who, item) for item in message.items] if isinstance(message, Work) else []
            if isinstance(message, Part) and message.version == self.taken:
                self.taken += 1


@settings(deadline=None, max_examples=60)
@given(
    st.fixed_dictionaries(
        {
            "groups": st.integers(1, 4),
            "max_staleness": st.integers(0, 2),
            "versions": st.none() | st.integers(1, 4),
            "max_bytes": st.sampled_from([700, 2**30]),
        }
    ),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 11)), max_size=60),
)
def test_parked_in_groups_all_get_what_they_would_get_if_each_were_tried(sizes, steps):
    grouped, each = Script(PendingRequests, sizes), Script(TriesAll, sizes)
    for step in steps:
        grouped.step(*step)
        each.step(*step)
        assert grouped.told == each.told


def test_asks_of_two_thousand_servers_are_not_tried_while_admission_is_closed():
    requests = make_requests(groups=1, max_staleness=0)
    clients = Clients(requests)
    clients.work("a", 1)
    for number in range(2000):
        clients.say(f"s{number}", hello(f"s{number}"))
        clients.say(f"s{number}", Ask(request=1, version=0, room=1))
    tried: list[str] = []
    ask = requests.handlers.ledger.ask
    requests.handlers.ledger.ask = lambda *given: tried.append(given[0]) or ask(*given)  # type: ignore[assignment]
    for _ in range(3):
        clients.say("b", hello("b"))  # something changed
        clients.turn()
    assert tried == []


# a full buffer


def full_buffer(monkeypatch, parked: int) -> tuple[Clients, list[WorkItem]]:
    """One that has no room after a first group, and may hold so many parked ones."""
    one = sum(len(sample.pack()) for sample in group(0))
    monkeypatch.setattr(pending, "PARKED_BYTES", parked * (one + 8))
    clients = Clients(make_requests(groups=2, max_staleness=4, max_bytes=1))
    items = clients.work("a", 6)
    clients.put("a", items[0])
    assert [type(message) for *_, message in clients.turn()] == [Stored]
    return clients, items[1:]


def test_groups_beyond_what_may_be_parked_stay_with_their_servers_and_are_asked_for(monkeypatch):
    clients, items = full_buffer(monkeypatch, parked=2)
    numbers = [clients.put("a", item) for item in items]
    assert [(number, type(message)) for _, number, message in clients.turn()] == [(n, Later) for n in numbers[2:]]
    assert clients.requests.parked_bytes <= pending.PARKED_BYTES
    clients.say("b", Status())
    (state,) = [message for *_, message in clients.turn()]
    assert [waiter.kind for waiter in state.waiters] == ["Put"] * 5
    clients.say("l0", Take(version=0, rank=0, world=1))
    accepted, again = {}, set()
    for _ in range(6):
        for _, number, message in clients.turn():
            if isinstance(message, Again):
                again.add(number)
                samples = [one.pack() for one in group(items[numbers.index(number)].item)]
                item = items[numbers.index(number)]
                clients.say("a", Put(item=item.item, lease=item.lease, samples=samples), number)
            if isinstance(message, Stored):
                accepted[number] = message.accepted
        clients.say("l0", Trained(version=clients.requests.handlers.ledger.state.version - 1, oldest_kept=0))
        clients.say("l0", Take(version=clients.requests.handlers.ledger.state.version, rank=0, world=1))
    assert accepted == dict.fromkeys(numbers, True)
    assert again == set(numbers[2:])
    assert clients.requests.parked_bytes == 0


def test_what_a_replaced_server_was_to_repeat_is_forgotten(monkeypatch):
    clients, items = full_buffer(monkeypatch, parked=0)
    clients.put("a", items[0])
    assert [type(message) for *_, message in clients.turn()] == [Later]
    clients.requests.receive([b"a2", pack(1, hello("a").model_copy(update={"token": "a2"}))], 0.0, "rollout")
    clients.say("b", Status())
    (state,) = [message for *_, message in clients.turn() if isinstance(message, State)]
    assert not [waiter for waiter in state.waiters if waiter.kind == "Put"]


@in_loop
async def test_a_client_repeats_a_group_that_was_put_off_when_it_is_asked_to_and_not_before(monkeypatch):
    monkeypatch.setattr(pending, "PARKED_BYTES", 0)
    requests = make_requests(groups=1, max_staleness=4, max_bytes=1)
    async with buffer(requests) as it, rollout(it.address) as samples, client(it.address, "l", "learner") as learner:
        first, second = await samples.ask(2) or []
        await samples.put(first, group(first.item))
        putting = asyncio.create_task(samples.put(second, group(second.item)))
        while not any(pending.is_put_off for pending in samples.client._pending.values()):
            await asyncio.sleep(0.01)
        await learner.expect(Take(version=0, rank=0, world=1), Part)
        await learner.expect(Trained(version=0, oldest_kept=0), Ack)
        assert (await putting).accepted
        assert not any(pending.is_put_off for pending in samples.client._pending.values())


# open files


def test_a_process_that_there_is_no_file_for_is_refused_in_words_and_those_that_are_in_stay():
    clients = Clients(make_requests())
    clients.turn()
    clients.requests.handlers.peers.files = OpenFiles(limit=10)
    clients.say("d", hello("d"))
    clients.say("a", hello("a"))
    (_, _, refused), (_, _, welcome) = clients.turn()
    assert "d: the buffer may have 10 files open" in refused.reason and "ulimit -Hn" in refused.reason
    assert type(welcome).__name__ == "Welcome"


@in_loop
async def test_the_refusal_reaches_the_client():
    requests = make_requests()
    requests.handlers.peers.files = OpenFiles(limit=3)
    async with buffer(requests) as it:
        with pytest.raises(RefusedError, match="files open"):
            await client(it.address).__aenter__()
