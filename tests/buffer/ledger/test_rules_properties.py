"""The ledger's promises together, in any order of events: completions, failures, lagging and dying servers, lost and
repeated messages, buffer restarts through the store, learner rewinds.

However it goes, no batch holds a group or a token older than `max_staleness`, nothing is dropped for its age (but what
went back with the learner), every open item can still be trained in time, a batch once formed never changes, and when
servers do their work the learner gets through: in the end each problem of each epoch was batched exactly once or
dropped with a reason.
"""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer.ledger.rules import FormedBatch, Lease, Ledger, SampleStats
from buffer.store.sqlite import Store

LEASE_S = 10.0
NAMES = ("a", "b", "c")
REASONS = {"zero variance", "engine died", "prompt too long", "left", "lost: its server does not know of it"} | {
    f"its server was not heard of for {LEASE_S:g} s"
}
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
    """What it has delivered or was told to be over."""
    sampled: dict[int, int] = field(default_factory=dict)
    """By lease: the oldest version that it has had since it began."""

    def swaps(self, version: int) -> None:
        self.version = version
        self.sampled = {lease: min(oldest, version) for lease, oldest in self.sampled.items()}


class Run(RuleBasedStateMachine):
    """A run in which everything that can go wrong does."""

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

    def new(self) -> Ledger:
        return Ledger(*self.sizes, seed=self.seed, lease_s=LEASE_S, **self.settings)  # type: ignore[arg-type]

    def commit(self) -> None:
        self.store.commit(self.ledger.drain())

    # servers

    @rule(name=names, room=st.integers(1, 12), lost=st.booleans(), repeated=st.booleans())
    def ask(self, name: str, room: int, lost: bool, repeated: bool) -> None:
        rollout = self.rollouts[name]
        rollout.requests += 1
        work = self.ledger.ask(name, rollout.version, room, self.now, rollout.requests)
        self.commit()
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
        facts = (SampleStats(8, 5, 0.0, oldest=oldest), SampleStats(9, 6, 0.0 if flat else 1.0, oldest=self.learner))
        answer = self.ledger.put(name, it.item, it.lease, facts, self.now)
        if answer is None:
            self.oldest[it.item] = oldest
        self.commit()
        for _ in range(repeats):
            assert self.ledger.put(name, it.item, it.lease, facts, self.now) == answer

    @rule(name=names, which=st.integers(0, 99), permanent=st.booleans())
    def fail(self, name: str, which: int, permanent: bool) -> None:
        rollout = self.rollouts[name]
        if rollout.work:
            it = rollout.work.pop(sorted(rollout.work)[which % len(rollout.work)])
            reason = "prompt too long" if permanent else "engine died"
            self.ledger.fail(name, it.item, it.lease, reason, self.now, permanent)
            self.commit()

    @rule(name=names, which=st.integers(0, 99), how=st.sampled_from(["put", "fail"]))
    def old_message(self, name: str, which: int, how: str) -> None:
        """A repetition of something long over changes nothing."""
        rollout = self.rollouts[name]
        if not rollout.old:
            return
        it = rollout.old[which % len(rollout.old)]
        before = self.ledger.counts()
        if how == "put":
            self.ledger.put(name, it.item, it.lease, (SampleStats(1, 1, 0.5),), self.now)
        else:
            self.ledger.fail(name, it.item, it.lease, "engine died", self.now, True)
        assert self.ledger.counts() == before and not self.ledger.drain()

    @rule(name=names, forgets=st.booleans())
    def heartbeat(self, name: str, forgets: bool) -> None:
        rollout = self.rollouts[name]
        held = set(rollout.work) if not forgets else set()
        for lease in self.ledger.heartbeat(name, rollout.version, sorted(held), self.now):
            rollout.old.append(rollout.work.pop(lease))
        self.commit()

    @rule(name=names, data=st.data())
    def swap(self, name: str, data: st.DataObject) -> None:
        """The server gets a policy, which may be an old one if its network is slow."""
        self.rollouts[name].swaps(data.draw(st.integers(0, self.learner)))

    @rule(name=names)
    def die(self, name: str) -> None:
        self.ledger.leave(name, "left", self.now)
        self.commit()
        self.rollouts[name] = Rollout()

    @rule(seconds=st.floats(0.1, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.ledger.expire(self.now)
        assert due is None or due > self.now
        self.commit()

    # learner

    @rule()
    def train(self) -> None:
        batch = self.ledger.take(self.learner)
        self.commit()
        if batch is None:
            return
        assert self.batches.setdefault(self.learner, batch) == batch, "a batch once formed never changes"
        self.ledger.trained(self.learner)
        self.commit()
        self.learner += 1

    @rule(back=st.integers(0, 3))
    def checkpoint(self, back: int) -> None:
        self.kept = max(self.kept, self.learner - back)
        gone = self.ledger.prune(self.kept)
        self.store.commit(self.ledger.drain(), {}, gone)
        for version, batch in self.batches.items():
            if version < self.kept:
                assert not set(batch.items) & set(self.ledger.entries)

    @rule(data=st.data())
    def learner_dies(self, data: st.DataObject) -> None:
        to = data.draw(st.integers(self.kept, self.learner))
        assert self.ledger.rewind(to) == self.ledger.version - to
        self.commit()
        self.learner = to
        for rollout in self.rollouts.values():
            rollout.swaps(min(rollout.version, to))

    # buffer

    @rule(name=names, unacknowledged=st.booleans())
    def buffer_dies(self, name: str, unacknowledged: bool) -> None:
        """What was not committed was not answered either."""
        if unacknowledged:
            self.ledger.ask(name, self.rollouts[name].version, 3, self.now)
        before = self.ledger.counts() if not unacknowledged else None
        self.ledger.drain()
        self.ledger = self.new()
        self.ledger.restore(self.store.load(), self.now)
        assert before in (None, self.ledger.counts())

    # promises

    @invariant()
    def open_items_can_be_trained_in_time(self) -> None:
        _, groups, staleness = self.sizes
        entries = self.ledger.entries.values()
        opened = sorted(entry.version for entry in entries if entry.state in ("leased", "stored"))
        assert all(d + staleness >= self.ledger.version + i // groups for i, d in enumerate(opened))
        assert Counter(opened) == self.ledger.book.pool.open

    @invariant()
    def batches_are_young_and_apart(self) -> None:
        _, groups, staleness = self.sizes
        for batch in self.batches.values():
            assert all(0 <= batch.version - d <= staleness for d in batch.dispatched)
            assert len(batch.items) <= groups
        trained = [item for batch in self.batches.values() for item in batch.items]
        assert len(trained) == len(set(trained))
        assert set(self.ledger.ages()) <= set(range(staleness + 1))
        for batch in self.batches.values():
            assert all(batch.version - self.oldest.get(item, batch.version) <= staleness for item in batch.items)

    @invariant()
    def every_item_is_somewhere(self) -> None:
        assert sum(self.ledger.counts().values()) == self.ledger.book.next_item
        assert {reason for reason in self.ledger.dropped() if not reason.startswith(TOO_OLD)} <= REASONS
        assert self.ledger.waiting_reason() and self.ledger.dispatch_reason("a")

    @precondition(lambda self: self.sizes[2] == 0)
    @invariant()
    def synchronous_when_the_bound_is_0(self) -> None:
        entries = self.ledger.entries.values()
        opened = [entry for entry in entries if entry.state in ("leased", "stored")]
        assert {entry.version for entry in opened} <= {self.ledger.version}
        assert len(opened) <= self.sizes[1]

    def teardown(self) -> None:
        """Servers that are up to date and do their work bring the learner to the end."""
        if not hasattr(self, "ledger"):
            return
        steps = 0
        while not (self.ledger.finished() and self.learner == self.ledger.version):
            steps += 1
            assert steps < 300, self.ledger.waiting_reason()
            self.now += LEASE_S
            self.ledger.expire(self.now)
            self.now += LEASE_S
            for name in NAMES:
                self.swap_to_latest(name)
            self.train()
        problems, _, _ = self.sizes
        if self.settings["versions"] is None:
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
        assert sorted(states) == list(range(number))
        assert sorted(batched) == sorted(item for item, state in states.items() if state == "trained")
        assert {item for item, state in states.items() if state != "trained"} == {
            item
            for (item,) in self.store._db.execute("SELECT item FROM items WHERE state = 'dropped' AND reason <> ''")
        }
        problems, _, _ = self.sizes
        assert sorted(self.rows.values()) == [
            (epoch, row) for epoch in range(number // problems) for row in range(problems)
        ]


TestRun = Run.TestCase
TestRun.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
