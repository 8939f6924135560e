"""Drawing by difficulty: shares hold, rests and returns are kept, and a buffer that is killed draws the same rows."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.ledger.counts import BANDS, Marks
from buffer.ledger.difficulty import Shares, Turns
from buffer.ledger.rules import Ledger
from buffer.ledger.types import Lease, SampleStats, Transaction
from buffer.store.sqlite import Store

EVEN = dict.fromkeys(BANDS, 1.0)
USUAL = {"unseen": 0.3, "unsolved": 0.1, "between": 0.5, "solved": 0.1}
REWARDS = {"none": (0.0, 0.0), "some": (1.0, 0.0), "all": (1.0, 1.0)}


def group(rewards: tuple[float, ...]) -> list[SampleStats]:
    return [SampleStats(4, 2, reward) for reward in rewards]


def ledger_of(problems: int, groups: int = 4, staleness: int = 2, **more: Any) -> Ledger:
    shares = more.pop("shares_of", Shares(USUAL, rest=2, return_after=5))
    return Ledger(problems, groups, staleness, difficulty=shares, **more)


class Played:
    """A ledger with a learner and one server that answers each group by `rewards` of its row."""

    def __init__(self, ledger: Ledger, rewards: Mapping[int, str] | None = None) -> None:
        self.ledger, self.rewards, self.rows, self.requests = ledger, rewards or {}, list[int](), 0

    def play(self, versions: int) -> list[list[int]]:
        """Draw, make and train so many batches; the rows that were drawn for each."""
        found = []
        for _ in range(versions):
            self.requests += 1
            work = self.ledger.ask("s#1", self.ledger.state.version, 10**6, 0.0, self.requests)
            for it in work:
                made = group(REWARDS[self.rewards.get(it.index, "some")])
                assert self.ledger.put("s#1", it.item, it.lease, made, 0.0) is None
            found.append([it.index for it in work])
            self.rows += found[-1]
            batch = self.ledger.batches.take(self.ledger.state.version)
            if batch is not None:
                self.ledger.batches.trained(batch.version)
        return found


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 100), min_size=1),
    st.lists(st.integers(0, 15), min_size=1, max_size=200),
)
def test_turns_keep_the_weights_in_any_stretch_in_which_the_same_are_ready(
    weights: dict[str, float], before: list[int]
) -> None:
    turns, names = Turns(weights), list(weights)
    for mask in before:  # any history
        if ready := [name for bit, name in enumerate(names) if mask >> bit & 1]:
            assert turns.next(ready) in ready
    total = sum(weights.values())
    found = Counter(turns.next(names) for _ in range(300))
    for name, weight in weights.items():
        assert abs(found[name] - 300 * weight / total) <= 2 * len(names), "no debt of turns is paid at once"


def test_each_band_gets_its_share_once_all_are_known() -> None:
    kinds = {row: ("none", "some", "all")[row % 3] for row in range(3000)}
    shares = Shares({"unseen": 0.2, "unsolved": 0.1, "between": 0.6, "solved": 0.1}, rest=0, return_after=1)
    played = Played(ledger_of(3000, groups=30, staleness=0, shares_of=shares), kinds)
    known = {row for drawn in played.play(40) for row in drawn}
    for drawn in played.play(20):
        old = Counter(kinds[row] for row in drawn if row in known)
        assert len(drawn) == 30 and abs(old.total() - 24) <= 2, "the other 6 are new"
        assert abs(old["some"] - 18) <= 2 and abs(old["none"] - 3) <= 2 and abs(old["all"] - 3) <= 2
        known.update(drawn)


def test_all_rows_are_seen_before_any_repeats_when_nothing_may_be_drawn_again() -> None:
    shares = Shares(USUAL, rest=1000, return_after=1000)
    played = Played(ledger_of(40, groups=4, staleness=0, shuffle=False, shares_of=shares))
    played.play(10)
    assert played.rows == list(range(40)), "the order of the first epoch"
    played.play(10)
    assert played.rows[40:] == list(range(40)), "the rest that ends first"


def test_a_problem_that_is_always_solved_retires_and_returns() -> None:
    kinds = {row: "all" if row < 20 else "some" for row in range(40)}
    shares = Shares(EVEN, rest=1, return_after=8)
    played = Played(ledger_of(40, groups=4, staleness=0, shares_of=shares), kinds)
    versions = {row: list[int]() for row in kinds}
    for version, drawn in enumerate(played.play(150)):
        for row in drawn:
            versions[row].append(version)
    for row in range(20):
        gaps = [later - earlier for earlier, later in zip(versions[row][1:], versions[row][2:], strict=False)]
        assert gaps and min(gaps) >= 9, "after the second group in a row it rests for rest + return_after"
    assert all(len(versions[row]) > 2 for row in kinds), "every problem comes again"
    easy = sum(len(versions[row]) for row in range(20))
    assert easy < 150 * 4 / 2, "although they are half of all"
    ledger = played.ledger
    resting = {row for row in range(20) if ledger.state.version - versions[row][-1] <= 9}
    assert 0 < ledger.order.counts(ledger.state)["retired"] <= len(resting)


def test_a_problem_that_becomes_solvable_is_in_between_again_and_one_that_is_forgotten_too() -> None:
    ledger = ledger_of(1, groups=1, staleness=0)
    played, records = Played(ledger), ledger.state.rows
    bands = []
    for kind in ("none", "some", "none", "none", "all", "all", "some"):
        played.rewards = {0: kind}
        played.play(1)
        bands.append(records.records[0].band(records.marks.streak))
        assert records.bands[bands[-1]] == 1 and sum(records.bands.values()) == 1
    assert bands == ["unsolved", "between", "between", "unsolved", "between", "solved", "between"]
    assert records.records[0].groups == len(bands)


def test_samples_are_solved_from_the_reward_that_the_run_file_names() -> None:
    ledger = ledger_of(2, groups=1, staleness=0, marks=Marks(solved_at=0.5, streak=3))
    (it,) = ledger.ask("s#1", 0, 1, 0.0, 1)
    ledger.put("s#1", it.item, it.lease, group((0.5, 0.4999)), 0.0)
    record = ledger.state.rows.records[it.index]
    assert (record.samples, record.solved, record.streak) == (2, 1, 0)


def test_sources_keep_their_weights_and_bands_their_shares_in_each() -> None:
    kinds = {row: "some" if row % 2 else "none" for row in range(2000)}
    played = Played(ledger_of(2000, groups=50, staleness=0, shares=[(500, 0.2), (1500, 0.8)]), kinds)
    for drawn in played.play(30):
        assert len(drawn) == 50 and abs(sum(row < 500 for row in drawn) - 10) <= 2
    later = [row for drawn in played.play(20) for row in drawn]
    for source in (range(500), range(500, 2000)):
        own = [row for row in later if row in source]
        assert sum(kinds[row] == "some" for row in own) > 0.55 * len(own)


def test_few_problems_are_drawn_again_although_all_of_them_are_open() -> None:
    ledger = ledger_of(3, groups=4, staleness=4)
    work = ledger.ask("s#1", 0, 100, 0.0, 1)
    assert len(work) == 20 and sorted(Counter(it.index for it in work).values()) == [6, 7, 7]


def test_epochs_bound_the_number_of_draws() -> None:
    played = Played(ledger_of(6, groups=2, staleness=0, epochs=3))
    played.play(20)
    assert len(played.rows) == 18 and played.ledger.view.outcome() == "data"


def test_admission_and_the_bound_on_age_are_as_without_difficulty() -> None:
    by_difficulty = Played(ledger_of(50, groups=4, staleness=3, versions=30, max_failed_share=1.0))
    uniform = Played(Ledger(50, 4, 3, versions=30, max_failed_share=1.0))
    assert list(map(len, by_difficulty.play(40))) == list(map(len, uniform.play(40)))
    assert by_difficulty.ledger.view.ages() == uniform.ledger.view.ages()


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 9), st.integers(0, 20)),
    st.tuples(st.just("put"), st.integers(0, 99), st.sampled_from(list(REWARDS))),
    st.tuples(st.just("fail"), st.integers(0, 99), st.sampled_from(["reward", "task", "infrastructure", "returned"])),
    st.tuples(st.just("permanent"), st.integers(0, 99), st.just("prompt")),
    st.tuples(st.just("take"), st.just(0), st.just("")),
    st.tuples(st.just("rewind"), st.integers(0, 5), st.just("")),
    st.tuples(st.just("quarantine"), st.integers(0, 99), st.just("")),
    st.tuples(st.just("prune"), st.integers(0, 99), st.just("")),
)


class Twin:
    """One ledger with its store: `kill` goes on with what was committed."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.store = settings, Store(None)
        self.ledger = self.new()

    def new(self) -> Ledger:
        return ledger_of(recall=self.store.closed, **self.settings)

    def kill(self) -> None:
        self.ledger = self.new()
        self.ledger.restore(self.store.load(), 0.0)

    def commit(self) -> None:
        self.store.commit(Transaction(self.ledger.drain()))

    def act(self, step: tuple[str, int, Any], leases: list[Lease], request: int) -> list[Lease]:
        """Do one step; what was drawn."""
        verb, number, more = step
        ledger, work = self.ledger, list[Lease]()
        if verb == "ask":
            upcoming = list(ledger.upcoming(more))
            again = list(ledger.upcoming(more))
            assert len(upcoming) <= more
            before = ledger.state.next_item
            work = ledger.ask("s#1", ledger.state.version, number, 0.0, request)
            new = [it.index for it in work if it.item >= before]
            assert upcoming == again and new[: len(upcoming)] == upcoming[: len(new)], "foreseen as it then is drawn"
        elif verb in ("put", "fail", "permanent") and leases:
            it = leases[number % len(leases)]
            if verb == "put":
                ledger.put("s#1", it.item, it.lease, group(REWARDS[more]), 0.0)
            elif more == "returned":
                ledger.fail("s#1", it.item, it.lease, "drained", 0.0, returned=True)
            else:
                ledger.fail("s#1", it.item, it.lease, "no", 0.0, verb == "permanent", kind=more)
        elif verb == "take" and ledger.view.ready():
            ledger.batches.take(ledger.state.version)
            ledger.batches.trained(ledger.state.version - 1)
        elif verb == "rewind":
            ledger.batches.rewind(max(ledger.state.oldest, ledger.state.version - number))
        elif verb == "prune":
            ledger.batches.prune(max(0, ledger.state.version - 2))
        elif verb == "quarantine":
            stored = [item for item in ledger.state.items.values() if item.state == "stored"]
            if stored:
                ledger.batches.quarantine(stored[number % len(stored)].number, "damaged")
        self.commit()
        return work


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(STEPS, st.booleans()), max_size=70),
    problems=st.integers(1, 12),
    staleness=st.integers(0, 4),
    skip=st.booleans(),
    epochs=st.none() | st.integers(1, 4),
    mixed=st.booleans(),
    attempts=st.integers(1, 3),
    rest=st.integers(0, 3),
    by_difficulty=st.booleans(),
)
def test_killed_at_any_point_it_draws_the_same_problems(
    steps: list[tuple[tuple[str, int, Any], bool]],
    problems: int,
    staleness: int,
    skip: bool,
    epochs: int | None,
    mixed: bool,
    attempts: int,
    rest: int,
    by_difficulty: bool,
) -> None:
    shares = [(1, 0.3), (problems, 0.7)] if mixed else []
    known: dict[str, Any] = dict(
        problems=problems + mixed, groups=2, staleness=staleness, skip_zero_variance=skip, epochs=epochs
    )
    known |= dict(shares=shares, attempts=attempts, max_failed_share=1.0)
    known["shares_of"] = Shares(USUAL, rest, return_after=3) if by_difficulty else None
    lives, dies = Twin(**known), Twin(**known)
    leases = list[Lease]()
    for request, (step, killed) in enumerate(steps, 1):
        if killed:
            dies.kill()
        work = lives.act(step, leases, request)
        assert dies.act(step, leases, request) == work
        rows = dies.ledger.state.rows
        assert all(it.item in dies.ledger.state.items or it.index in rows.left_out for it in work)
        leases += work
        assert lives.ledger.view.left_out() == rows.left_out
        assert lives.ledger.view.problems_by_state() == dies.ledger.view.problems_by_state()


@pytest.mark.parametrize("problems", [5, 200])
def test_the_ledger_s_file_holds_all_that_the_next_draws_need(problems: int, tmp_path: Any) -> None:
    """Through a real file, a restart before every draw."""
    kinds = {row: ("none", "some", "all")[row % 3] for row in range(problems)}
    whole = Played(ledger_of(problems, groups=3, staleness=1), kinds)
    expected = whole.play(30)
    found = []
    for number in range(30):
        with Store(tmp_path / "buffer.sqlite", fsync=False) as store:
            ledger = ledger_of(problems, groups=3, staleness=1)
            ledger.restore(store.load(), 0.0)
            played = Played(ledger, kinds)
            played.requests = number
            found += played.play(1)
            store.commit(Transaction(ledger.drain()))
    assert found == expected
