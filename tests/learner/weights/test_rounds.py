"""The rounds at a server: what may follow what, in any order of messages, reports and the rollout loop's calls."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.wire.message import Message
from configs.schema import WeightsConfig
from learner.weights import protocol
from learner.weights.protocol import TO_SERVER, Go, unpack
from learner.weights.receiver.follow import Receiver
from learner.weights.receiver.reception import Reception
from learner.weights.receiver.rounds import TRANSITIONS, IllegalTransition, Rounds, State
from learner.weights.receiver.staged import StagedPolicy, WeightsError
from tests.harness.keys import client_keys

WORKERS = 2
COMPARISON: Any = None  # rounds compare nothing
EVENTS = {event for _, event in TRANSITIONS}


def a_go(round: int) -> Go:
    return Go(round=round, session="s", version=round, plan="p", timeout_s=1.0, source="/folder")


async def in_state(state: State, round: int = 1) -> tuple[Rounds, list[Message]]:
    """Rounds in `state`, and what it has said since."""
    said = list[Message]()
    rounds = Rounds(said.append)
    if state is not State.IDLE:
        rounds.offer(protocol.Offer(round=round))
    if state not in (State.IDLE, State.PLEDGED):
        assert rounds.go(Reception(a_go(round), 1, COMPARISON))
    if state is State.LOADING:
        rounds.verify()
    if state is State.CLEARING:
        rounds.give_up(0.0)
    assert rounds.state is state
    said.clear()
    return rounds, said


def test_each_state_can_be_reached_and_left() -> None:
    assert {state for state, _ in TRANSITIONS} == set(TRANSITIONS.values()) == set(State)


@pytest.mark.parametrize(
    ("state", "event"),
    [(state, event) for state, event in product(State, sorted(EVENTS)) if (state, event) not in TRANSITIONS],
)
def test_another_transition_is_refused_by_name(state: State, event: str) -> None:
    rounds, _ = asyncio.run(in_state(state))
    with pytest.raises(IllegalTransition, match=f"'{event}' in {state.name}"):
        rounds._enter(event)


@pytest.mark.parametrize(
    ("state", "call"),
    [
        *((state, "loaded") for state in State if state is not State.LOADING),
        *((state, "clear") for state in State if state is not State.CLEARING),
        *((state, "verify") for state in State if state is not State.RECEIVING),
    ],
)
def test_a_call_in_another_state_changes_nothing_and_says_nothing(state: State, call: str) -> None:
    rounds, said = asyncio.run(in_state(state))
    with pytest.raises(IllegalTransition):
        getattr(rounds, call)()
    assert rounds.state is state and not said


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("round", [1, 2])
def test_a_go_is_taken_only_after_ready_to_its_round(state: State, round: int) -> None:
    async def test() -> None:
        rounds, _ = await in_state(state)
        assert rounds.go(Reception(a_go(round), 1, COMPARISON)) is ((state, round) == (State.PLEDGED, 1))

    asyncio.run(test())


@pytest.mark.parametrize(
    ("state", "held", "answer"),
    [
        (State.IDLE, False, "Ready"),
        (State.PLEDGED, False, "Ready"),
        (State.LOADING, False, ""),
        (State.CLEARING, False, ""),
        (State.IDLE, True, "Hold"),
        (State.LOADING, True, ""),
        (State.CLEARING, True, "Hold"),
    ],
)
def test_the_answer_to_an_offer(state: State, held: bool, answer: str) -> None:
    """Where there is none it follows as soon as the buckets are free."""

    async def test() -> None:
        rounds, said = await in_state(state)
        assert not held or rounds.hold(loading=state is State.LOADING)
        said.clear()
        rounds.offer(protocol.Offer(round=2))
        assert [type(message).__name__ for message in said] == ([answer] if answer else [])
        if not answer:
            rounds.loaded() if state is State.LOADING else rounds.clear()
        assert said == [(protocol.Hold if held else protocol.Ready)(round=2)]

    asyncio.run(test())


class Engine:
    """Workers that write to their buckets from `rl_receive` until they stop; `stuck` ones do not stop when aborted."""

    def __init__(self) -> None:
        self.writing: set[tuple[int, int]] = set()
        """(round, worker)"""
        self.owed: set[tuple[int, int]] = set()
        """Reports that are still to come."""
        self.stuck: set[int] = set()
        self.begun = list[int]()

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        await asyncio.sleep(0)
        if method == "rl_receive":
            go = unpack(args[0], TO_SERVER)
            assert isinstance(go, Go) and not self.writing, "the buckets of another round are still written"
            self.begun.append(go.round)
            self.writing = {(go.round, worker) for worker in range(WORKERS)}
            self.owed |= self.writing
            return [None] * WORKERS
        if method == "rl_abort":
            self.writing = {(round, worker) for round, worker in self.writing if worker in self.stuck}
            return [not any(each == worker for _, each in self.writing) for worker in range(WORKERS)]
        assert method == "rl_load"
        return [None] * WORKERS

    async def probe(self, tokens: list[int], images: Any) -> list[float]:
        raise AssertionError("no probe is due")

    def paused(self) -> Any:
        raise AssertionError("nothing is received into place")


class Connection:
    """Stands for a LearnerConnection: checks what is said to the learner."""

    def __init__(self, orders: "MessageOrders") -> None:
        self.orders, self.joined, self.lost = orders, True, False

    def say(self, message: Message) -> None:
        self.orders.on_said(message)

    def leave(self, lost: bool) -> None:
        self.joined, self.lost = False, lost


class MessageOrders:
    """A Receiver that gets the learner's messages, its workers' reports and the rollout loop's calls in any order."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine, self.connection = Engine(), Connection(self)
        self.receiver = Receiver(
            *(None, self.engine, "rollout-0", WeightsConfig()),  # type: ignore[arg-type]
            keys=client_keys(server="learner"),
        )
        self.receiver._join = self.receiver._join.model_copy(update={"workers": WORKERS})
        self.receiver._connection = self.connection  # type: ignore[assignment]
        self.newest = self.pledged = 0
        """The last round offered, and the last one that Ready was said to."""
        self.answered, self.held = True, False
        self.good: dict[int, set[int]] = {}
        """Workers that have reported all buckets, by round."""
        self.summed: set[int] = set()
        self.policy: StagedPolicy | None = None

    def end(self) -> None:
        """Whatever has happened: once all workers have stopped and the loop has loaded what it got, an offer is
        answered with Ready, and its version arrives."""
        while self.engine.owed:
            self.report(min(self.engine.owed), "")
        while self.policy or not self.receiver._policies.empty():
            self.load() if not self.policy else self.loaded()
        if self.held:
            self.release()
        self.offer()
        assert self.pledged == self.newest
        self.go()
        self.checksums()
        for owed in sorted(self.engine.owed):
            self.report(owed, "")
        assert self.receiver._policies.get_nowait().version == self.newest  # type: ignore[union-attr]

    def close(self) -> None:
        self.loop.close()

    def on_said(self, message: Message) -> None:
        if isinstance(message, protocol.Ready | protocol.Hold) and message.round == self.newest:
            self.answered = True
        if isinstance(message, protocol.Ready):
            assert message.round == self.newest and not self.held
            assert not self.engine.writing and not self.policy and self.receiver._policies.empty()
            self.pledged = message.round
        elif isinstance(message, protocol.Received):
            assert len(self.good[message.round]) == WORKERS and message.round in self.summed

    def give(self, message: Message) -> None:
        """The learner's message arrives."""
        self.loop.run_until_complete(self.receiver._on_message(message, self.connection))  # type: ignore[arg-type]

    def offer(self) -> None:
        self.newest, self.answered = self.newest + 1, False
        self.give(protocol.Offer(round=self.newest))
        waits = self.receiver._rounds.state in (State.LOADING, State.CLEARING)
        assert self.answered or waits, "an offer is answered, or waits for buckets"

    def go(self, back: int = 0) -> None:
        round = max(self.newest - back, 0)
        begun, state = list(self.engine.begun), self.receiver._rounds.state
        self.give(a_go(round))
        taken = state is State.PLEDGED and round == self.pledged
        assert self.engine.begun == begun + [round] * taken and not (taken and self.held)

    def checksums(self, back: int = 0) -> None:
        round = max(self.newest - back, 0)
        if self.receiver._rounds.is_present(round):
            self.summed.add(round)
        self.give(protocol.Checksums(round=round, checksums=[7]))

    def cancel(self, back: int = 0) -> None:
        round = max(self.newest - back, 0)
        self.give(protocol.Cancel(round=round, reason="another server was lost"))

    def old_go(self) -> None:
        self.go(back=1)

    def old_checksums(self) -> None:
        self.checksums(back=1)

    def rejoin(self) -> None:
        self.answered = True
        self.give(protocol.Rejoin(reason="silent"))
        self.give(protocol.Joined())

    def another_learner(self) -> None:
        self.answered = True
        self.receiver._rounds.leave()
        self.loop.run_until_complete(self.receiver._abandon("the learner was lost"))
        self.give(protocol.Joined())

    def get_stuck(self) -> None:
        self.engine.stuck ^= {0}

    def report_oldest(self) -> None:
        self.report(min(self.engine.owed), "")

    def report_newest(self) -> None:
        self.report(max(self.engine.owed), "")

    def report_failure(self) -> None:
        self.report(max(self.engine.owed), "torn")

    def possible(self) -> list[Callable[[], None]]:
        """What may happen now; what moves a round on stands there twice."""
        found = [self.offer, self.go, self.go, self.old_go, self.checksums, self.checksums, self.old_checksums]
        found += [self.cancel, self.rejoin, self.another_learner, self.get_stuck]
        if self.engine.owed:
            found += [self.report_oldest, self.report_newest, self.report_newest, self.report_failure]
        if self.policy:
            found += [self.loaded]
        elif not self.receiver._policies.empty():
            found += [self.load] * 2
        return [*found, self.release if self.held else self.hold]

    def report(self, owed: tuple[int, int], reason: str) -> None:
        """A worker's thread ends and reports."""
        round, worker = owed
        self.engine.owed -= {owed}
        self.engine.writing -= {owed}
        if not reason:
            self.good.setdefault(round, set()).add(worker)
        self.receiver._rounds.report(protocol.Staged(round=round, checksums=[7], reason=reason))
        self.receiver._judge()

    def load(self) -> None:
        policy = self.receiver._policies.get_nowait()
        assert isinstance(policy, StagedPolicy) and len(self.good[policy.version]) == WORKERS
        self.loop.run_until_complete(policy.load())
        self.policy = policy

    def loaded(self) -> None:
        assert self.policy
        policy, self.policy = self.policy, None
        self.loop.run_until_complete(policy.loaded())
        assert self.answered, "the offer that waited is answered"

    def hold(self) -> None:
        self.held = self.receiver.hold(loading=self.policy is not None)
        assert self.held or self.receiver._rounds.state is not State.IDLE

    def release(self) -> None:
        self.held = False
        self.receiver.release()


@settings(max_examples=150)
@given(choices=st.lists(st.integers(0, 999), min_size=50, max_size=50))
def test_in_any_order_no_round_overwrites_another_and_none_is_forgotten(choices: list[int]) -> None:
    with closing(MessageOrders()) as orders:
        for choice in choices:
            possible = orders.possible()
            possible[choice % len(possible)]()
        orders.end()


@pytest.mark.parametrize("last", ["report", "checksums"])
def test_a_wrong_checksum_is_an_error_whichever_comes_last(last: str) -> None:
    wrong = protocol.Checksums(round=1, checksums=[8])
    with closing(MessageOrders()) as orders:
        orders.offer()
        orders.go()
        orders.report((1, 0), "")
        if last == "checksums":
            orders.report((1, 1), "")
        else:
            orders.give(wrong)
        with pytest.raises(WeightsError, match="bucket 0: checksum 7 here, 8 at the learner"):
            orders.give(wrong) if last == "checksums" else orders.report((1, 1), "")
