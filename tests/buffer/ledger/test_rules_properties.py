"""The ledger's promises together, in any order of events: completions, failures, lagging and dying servers, lost and
repeated messages, buffer restarts through the store, learner rewinds.

However it goes, no batch holds a group or a token older than `max_staleness`, nothing is dropped for its age (but what
went back with the learner), every open item can still be trained in time, a batch once formed never changes, and when
servers do their work the learner gets through: in the end each problem of each epoch was batched exactly once or
dropped with a reason.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer.ledger import reasons
from buffer.ledger.difficulty import Shares
from buffer.ledger.rules import Ledger
from buffer.ledger.types import NO_CHANGES, FormedBatch, Lease, SampleStats, Transaction
from buffer.store.sqlite import Store

LEASE_S = 10.0
HOLD_S = 2.0
NAMES = ("a", "b", "c")
REASONS = {
    "zero variance",
    "engine died",
    "prompt too long",
    "left",
    "its server ended",
    "lost: its server does not know of it",
} | {f"its server was not heard of for {LEASE_S:g} s"}
TOO_OLD = "sampled under version"
names = st.sampled_from(NAMES)


@dataclass
class Rollout:
    """A server as it sees itself."""

    version: int = 0
    requests: int = 0
    work: dict[int, Lease] = field(default_factory=dict)
    """By lease; what it may not know to be over."""
    old: list[Lease] = field(default_factory=list)
    """Leases that it delivered, or that the ledger said are over."""
    sampled: dict[int, int] = field(default_factory=dict)
    """By lease: the oldest version that it has had since it began."""

    def swaps(self, version: int) -> None:
        self.version = version
        self.sampled = {lease: min(oldest, version) for lease, oldest in self.sampled.items()}


class Run(RuleBasedStateMachine):
    """A run in which everything that can go wrong does."""

    difficulty: Shares | None = None

    @initialize(
        problems=st.integers(1, 9),
        groups=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        tighter=st.none() | st.integers(0, 3),
        epochs=st.integers(1, 3),
        versions=st.none() | st.integers(1, 6),
        attempts=st.integers(1, 3),
        skip=st.booleans(),
        seed=st.integers(0, 3),
    )
    def start(
        self,
        problems: int,
        groups: int,
        max_staleness: int,
        tighter: int | None,
        epochs: int,
        versions: int | None,
        attempts: int,
        skip: bool,
        seed: int,
    ) -> None:
        self.settings = dict(
            target_staleness=tighter, versions=versions, epochs=epochs, attempts=attempts, skip_zero_variance=skip
        )
        self.sizes = problems, groups, max_staleness
        self.seed, self.now, self.learner, self.kept = seed, 0.0, 0, 0
        self.store = Store(None)
        self.ledger = self.new()
        self.rollouts = {name: Rollout() for name in NAMES}
        self.batches: dict[int, FormedBatch] = {}
        self.rows: dict[int, tuple[int, int]] = {}
        self.leases: set[int] = set()
        self.oldest: dict[int, int] = {}
        """By item: version of the oldest token of its accepted group."""
        self.failed: dict[int, tuple[str, float]] = {}
        """By item that failed while another server was alive: at which server, and when."""
        self.held: dict[int, float] = {}
        """When an item was given back that nobody may have for a while."""
        self.heard: dict[str, float] = {}
        self.asked: dict[str, tuple[int, int, int]] = {}
        """By server with a parked Ask: its number and version, and the revision at which it got nothing."""
        self.left_out: set[int] = set()
        """Rows that were left out at some time."""
        self.took: int | None = None
        """Revision at which the learner's Take was parked."""

    def new(self) -> Ledger:
        known: dict[str, Any] = dict(
            seed=self.seed, lease_s=LEASE_S, recall=self.store.closed, difficulty=self.difficulty
        )
        return Ledger(*self.sizes, **known | self.settings)

    def commit(self) -> None:
        self.store.commit(Transaction(self.ledger.drain()))

    # servers

    @rule(name=names, room=st.integers(1, 12), lost=st.booleans(), repeated=st.booleans())
    def ask(self, name: str, room: int, lost: bool, repeated: bool) -> None:
        rollout = self.rollouts[name]
        rollout.requests += 1
        self.heard[name] = self.now
        work = self.ledger.ask(name, rollout.version, room, self.now, rollout.requests)
        self.commit()
        self.asked.pop(name, None)
        if not work:
            self.asked[name] = rollout.requests, rollout.version, self.ledger.state.revision
        for it in work:
            where, when = self.failed.pop(it.item, ("", 0.0))
            assert name != where or self.now >= when + LEASE_S, "an attempt that failed is repeated elsewhere"
            assert self.now >= self.held.pop(it.item, -HOLD_S) + HOLD_S, "an item that is held back goes to nobody"
        if repeated:
            assert self.ledger.ask(name, rollout.version, room, self.now, rollout.requests) == work
        assert len(work) <= room
        for it in work:
            assert it.lease not in self.leases, "lease numbers never come back"
            self.leases.add(it.lease)
            assert self.rows.setdefault(it.item, (it.epoch, it.index)) == (it.epoch, it.index)
            assert it.version <= min(rollout.version, self.learner)
            if not lost:
                rollout.work[it.lease] = it
                rollout.sampled[it.lease] = rollout.version

    @rule(name=names, which=st.integers(0, 99), flat=st.booleans(), repeats=st.integers(0, 2))
    def deliver(self, name: str, which: int, flat: bool, repeats: int) -> None:
        rollout = self.rollouts[name]
        if not rollout.work:
            return
        it = rollout.work.pop(sorted(rollout.work)[which % len(rollout.work)])
        rollout.old.append(it)
        oldest = rollout.sampled[it.lease]
        newest = self.learner
        second = SampleStats(9, 6, 0.0 if flat else 1.0, oldest=newest, newest=newest)
        stats = (SampleStats(8, 5, 0.0, oldest=oldest, newest=oldest), second)
        answer = self.ledger.put(name, it.item, it.lease, stats, self.now)
        if answer is None:
            self.oldest[it.item] = oldest
        self.commit()
        for _ in range(repeats):
            assert self.ledger.put(name, it.item, it.lease, stats, self.now) == answer

    def alive(self, name: str) -> bool:
        return self.now < self.heard.get(name, -LEASE_S) + LEASE_S

    @rule(name=names, which=st.integers(0, 99), how=st.sampled_from(["once", "for good", "returned", "held"]))
    def fail(self, name: str, which: int, how: str) -> None:
        rollout = self.rollouts[name]
        if not rollout.work:
            return
        it = rollout.work.pop(sorted(rollout.work)[which % len(rollout.work)])
        reason = "prompt too long" if how == "for good" else "engine died"
        known, before = self.ledger.state.items.get(it.item), sum(self.ledger.view.failed().values())
        mine = known is not None and (known.server, known.lease, known.state) == (name, it.lease, "leased")
        permanent, returned, hold_s = how == "for good", how in ("returned", "held"), HOLD_S * (how == "held")
        self.ledger.fail(name, it.item, it.lease, reason, self.now, permanent, returned, "reward", hold_s)
        if mine and hold_s:
            self.held[it.item] = self.now
        counted = sum(self.ledger.view.failed().values()) - before
        assert counted == (mine and not returned)
        if counted and any(self.alive(other) for other in NAMES if other != name):
            self.failed[it.item] = name, self.now
        self.commit()

    @rule(name=names, which=st.integers(0, 99), how=st.sampled_from(["put", "fail"]))
    def old_message(self, name: str, which: int, how: str) -> None:
        """A repetition of something long over changes nothing."""
        rollout = self.rollouts[name]
        if not rollout.old:
            return
        it = rollout.old[which % len(rollout.old)]
        before = self.ledger.view.counts()
        if how == "put":
            self.ledger.put(name, it.item, it.lease, (SampleStats(1, 1, 0.5),), self.now)
        else:
            self.ledger.fail(name, it.item, it.lease, "engine died", self.now, True)
        assert self.ledger.view.counts() == before and self.ledger.drain() == NO_CHANGES

    @rule(name=names, forgets=st.booleans())
    def heartbeat(self, name: str, forgets: bool) -> None:
        rollout = self.rollouts[name]
        held = set(rollout.work) if not forgets else set()
        self.heard[name] = self.now
        for lease in self.ledger.heartbeat(name, rollout.version, sorted(held), self.now):
            rollout.old.append(rollout.work.pop(lease))
        self.commit()

    @rule(name=names, data=st.data())
    def swap(self, name: str, data: st.DataObject) -> None:
        """The server gets a newer policy, which may be an old one if its network is slow."""
        rollout = self.rollouts[name]
        rollout.swaps(data.draw(st.integers(rollout.version, self.learner)))

    @rule(name=names)
    def die(self, name: str) -> None:
        self.ledger.leave(name, "left", self.now)
        self.commit()
        self.rollouts[name] = Rollout()
        self.heard.pop(name, None)
        self.asked.pop(name, None)

    @rule(name=names)
    def lose(self, name: str) -> None:
        """It broke off and does not know: it still has its work, and may come back with it."""
        self.ledger.lose(name, "its server ended", self.now)
        self.commit()
        self.heard.pop(name, None)

    @rule(seconds=st.floats(0.1, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.ledger.expire(self.now)
        assert due is None or due > self.now
        self.commit()

    # learner

    @rule()
    def train(self) -> None:
        batch = self.ledger.batches.take(self.learner)
        self.commit()
        self.took = self.ledger.state.revision if batch is None else None
        if batch is None:
            return
        assert self.batches.setdefault(self.learner, batch) == batch, "a batch once formed never changes"
        self.ledger.batches.trained(self.learner)
        self.commit()
        self.learner += 1

    @rule(back=st.integers(0, 3))
    def checkpoint(self, back: int) -> None:
        self.kept = max(self.kept, self.learner - back)
        oldest = self.ledger.batches.prune(self.kept)
        self.store.commit(Transaction(self.ledger.drain(), void_before=oldest))
        for version, batch in self.batches.items():
            if version < self.kept:
                assert not set(batch.items) & set(self.ledger.state.items)

    @rule(data=st.data())
    def learner_dies(self, data: st.DataObject) -> None:
        to = data.draw(st.integers(self.kept, self.learner))
        assert self.ledger.batches.rewind(to) == self.ledger.state.version - to
        self.commit()
        self.learner, self.took = to, None
        for rollout in self.rollouts.values():
            rollout.swaps(min(rollout.version, to))

    @rule(which=st.integers(0, 99))
    def quarantine(self, which: int) -> None:
        """A group cannot be trained. Its batch is served without it; if it was the last one, that batch and those after
        it are formed anew."""
        ledger = self.ledger
        may_be = [
            item
            for item in ledger.state.items.values()
            if item.state == "stored" or (item.state == "batched" and item.batch > ledger.state.last_trained)
        ]
        if not may_be:
            return
        item = may_be[which % len(may_be)]
        before, version = ledger.view.counts(), item.batch if item.state == "batched" else None
        assert ledger.batches.quarantine(item.number, "cannot be trained") and not ledger.batches.quarantine(
            item.number, "again"
        )
        self.commit()
        assert ledger.view.counts()["quarantined"] == before.get("quarantined", 0) + 1
        if version in self.batches:
            pairs = zip(self.batches[version].items, self.batches[version].dispatched, strict=True)
            left = [(number, d) for number, d in pairs if number != item.number]
            self.batches[version] = FormedBatch(version, tuple(n for n, _ in left), tuple(d for _, d in left))
            if not left:
                self.batches = {known: batch for known, batch in self.batches.items() if known < version}

    # buffer

    @rule(name=names, unacknowledged=st.booleans())
    def buffer_dies(self, name: str, unacknowledged: bool) -> None:
        """What was not committed was not answered either."""
        if unacknowledged:
            self.ledger.ask(name, self.rollouts[name].version, 3, self.now)
        before = self.ledger.view.counts() if not unacknowledged else None
        self.ledger.drain()
        self.ledger = self.new()
        self.ledger.restore(self.store.load(), self.now)
        self.failed, self.held, self.asked, self.took = {}, {}, {}, None  # no wait of an item outlives the buffer
        self.heard = {name: self.now for name in self.ledger.state.servers}
        assert before in (None, self.ledger.view.counts())

    # promises

    @invariant()
    def open_items_can_be_trained_in_time(self) -> None:
        _, groups, staleness = self.sizes
        items = self.ledger.state.items.values()
        opened = sorted(item.version for item in items if item.state in ("leased", "stored"))
        assert all(d + staleness >= self.ledger.state.version + i // groups for i, d in enumerate(opened))
        assert Counter(opened) == self.ledger.state.pool.open

    @invariant()
    def batches_are_young_and_apart(self) -> None:
        _, groups, staleness = self.sizes
        for batch in self.batches.values():
            assert all(0 <= batch.version - d <= staleness for d in batch.dispatched)
            assert len(batch.items) <= groups
        trained = [item for batch in self.batches.values() for item in batch.items]
        assert len(trained) == len(set(trained))
        assert set(self.ledger.view.ages()) <= set(range(staleness + 1))
        for batch in self.batches.values():
            assert all(batch.version - self.oldest.get(item, batch.version) <= staleness for item in batch.items)

    @invariant()
    def every_item_is_somewhere(self) -> None:
        self.left_out |= set(self.ledger.view.left_out())
        made = sum(record.drawn for record in self.ledger.state.rows.records.values())
        assert sum(self.ledger.view.counts().values()) == made <= self.ledger.state.next_item
        assert {reason for reason in self.ledger.view.dropped() if not reason.startswith(TOO_OLD)} <= REASONS
        assert not any(reason.startswith("engine: sampled under") for reason in self.ledger.view.failed())
        assert reasons.for_batch(self.ledger) and reasons.for_work(self.ledger, "a")

    @invariant()
    def what_a_parked_request_waits_for_moves_the_revision(self) -> None:
        if self.took == self.ledger.state.revision:
            assert not self.ledger.view.ready()
        for name, (request, version, revision) in self.asked.items():
            if revision == self.ledger.state.revision:
                assert self.ledger.ask(name, version, 1, self.now, request) == []

    @invariant()
    def what_is_dropped_is_not_in_memory(self) -> None:
        assert all(item.state != "dropped" for item in self.ledger.state.items.values())
        assert sum(self.ledger.view.failed().values()) >= sum(
            number for reason, number in self.ledger.view.dropped().items() if reason != "zero variance"
        )

    @precondition(lambda self: self.sizes[2] == 0)
    @invariant()
    def synchronous_when_the_bound_is_0(self) -> None:
        items = self.ledger.state.items.values()
        opened = [item for item in items if item.state in ("leased", "stored")]
        assert {item.version for item in opened} <= {self.ledger.state.version}
        assert len(opened) <= self.sizes[1]

    def teardown(self) -> None:
        """Servers that are up to date and do their work bring the learner to the end."""
        if not hasattr(self, "ledger"):
            return
        steps = 0
        while not (self.ledger.view.finished() and self.learner == self.ledger.state.version):
            steps += 1
            assert steps < 300, reasons.for_batch(self.ledger)
            self.now += LEASE_S
            self.ledger.expire(self.now)
            self.now += LEASE_S
            for name in NAMES:
                self.swap_to_latest(name)
            self.train()
        problems, _, _ = self.sizes
        if self.ledger.view.outcome() == "failed" and self.ledger.state.trend.given_up:
            assert len(self.ledger.view.left_out()) == problems
        elif self.settings["versions"] is None:
            self.everything_is_accounted_for(problems * self.settings["epochs"])  # type: ignore[operator]
        self.store.close()

    def swap_to_latest(self, name: str) -> None:
        rollout = self.rollouts[name]
        rollout.version, rollout.requests = self.learner, rollout.requests + 1
        self.ledger.heartbeat(name, self.learner, [], self.now)
        for it in self.ledger.ask(name, self.learner, 5, self.now, rollout.requests):
            self.rows[it.item] = it.epoch, it.index
            self.ledger.put(name, it.item, it.lease, (SampleStats(8, 5, 0.0), SampleStats(9, 6, 1.0)), self.now)
            self.oldest.pop(it.item, None)

    def everything_is_accounted_for(self, number: int) -> None:
        self.commit()
        states = dict(self.store._db.execute("SELECT item, state FROM items"))
        batched = [item for batch in self.batches.values() for item in batch.items]
        assert set(states) == set(self.rows) <= set(range(number))
        assert sorted(batched) == sorted(item for item, state in states.items() if state == "trained")
        closed = "SELECT item FROM items WHERE state IN ('dropped', 'quarantined') AND reason <> ''"
        assert {item for item, state in states.items() if state != "trained"} == {
            item for (item,) in self.store._db.execute(closed)
        }
        self.rows_come_in_turn(number)

    def rows_come_in_turn(self, number: int) -> None:
        problems, _, _ = self.sizes
        every = {(epoch, row) for epoch in range(number // problems) for row in range(problems)}
        assert len(set(self.rows.values())) == len(self.rows)
        assert {row for _, row in every - set(self.rows.values())} <= self.left_out


class RunByDifficulty(Run):
    """The same with `data.difficulty`: all promises hold, but that each epoch has each row once."""

    difficulty = Shares({"unseen": 0.3, "unsolved": 0.1, "between": 0.5, "solved": 0.1}, rest=1, return_after=2)

    def rows_come_in_turn(self, number: int) -> None:
        assert len(self.rows) == number
        assert {row for _, row in self.rows.values()} <= set(range(self.sizes[0]))


TestRun = Run.TestCase
TestRun.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestRunByDifficulty = RunByDifficulty.TestCase
TestRunByDifficulty.settings = settings(TestRun.settings, max_examples=20)
