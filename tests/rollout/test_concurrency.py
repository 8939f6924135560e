"""Places, counted while groups are made with all that can happen to them, and the rule of `auto`, by scenarios."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.wire.protocol import WorkItem
from configs.load import load
from rollout.concurrency import LULL_S, Auto, Fixed, Places, SparePlaces, start
from rollout.episodes.episode import Episodes, Failure
from rollout.loop import roll
from rollout.tasks import Generate, Problem, Trajectory
from rollout.tasks.trajectory import single_turn
from tests.harness.fakes import FakeBuffer, FakeEngine, FakePrompts, FakeRewards, fake_sampler, until

PROBLEMS = {"fine": "1", "long": "x" * 21, "dead": "dead", "crash": "crash"}
NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]


class Watched(Places):
    """Notes the largest number of places taken."""

    most = 0

    def take(self):
        held = super().take()
        self.most = max(self.most, self.taken)
        return held


def item(number: int, kind: str) -> WorkItem:
    return WorkItem(item=number, lease=100 + number, version=0, problem={"problem": PROBLEMS[kind], "answer": "ok."})


def made_by(play: Callable[[Problem, Generate], Awaitable[Trajectory]], samples: int) -> Episodes:
    engine = FakeEngine(lambda prompt: [ord(c) for c in ("crash" if chr(prompt[0]) == "c" else "ok.")])
    return Episodes(FakePrompts(), play, fake_sampler(engine), FakeRewards(), samples)


async def play(problem: Problem, generate: Generate) -> Trajectory:
    """Samples of a group end one after the other; one of a dead problem raises."""
    for _ in range(id(asyncio.current_task()) % 5):
        await asyncio.sleep(0)
    if problem.row["problem"] == "dead":
        raise ValueError("gives up")
    return await single_turn(problem, generate)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(PROBLEMS)), max_size=12),
    limit=st.integers(1, 12),
    samples=st.integers(1, 5),
    abandoned=st.sets(st.integers(0, 11)),
    new_limit=st.integers(1, 12),
    cancelled_after=st.one_of(st.none(), st.integers(0, 30)),
)
def test_places_are_bounded_and_all_free_at_the_end(kinds, limit, samples, abandoned, new_limit, cancelled_after):
    async def scenario() -> None:
        places, buffer = Watched(limit, samples), FakeBuffer(item(n, kind) for n, kind in enumerate(kinds))
        buffer.end()
        episodes = made_by(play, samples)

        async def ask(room: int) -> list[WorkItem] | None:
            assert (room - 1) * samples < places.limit - places.taken <= room * samples
            return await buffer.ask(room)

        rolling = asyncio.create_task(roll(ask, buffer, episodes, places))
        await asyncio.sleep(0)
        episodes.abandon([100 + number for number in abandoned], Failure("revoked"))
        for _ in range(cancelled_after or 2):
            await asyncio.sleep(0)
        places.limit = new_limit
        if cancelled_after is not None:
            rolling.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(rolling, 120)
        for _ in range(8):  # what was cancelled ends
            await asyncio.sleep(0)
        assert places.taken == 0
        assert places.most <= max(limit, new_limit) + samples - 1
        if cancelled_after is None:
            assert len(buffer.put_groups) + len(buffer.failures) == len(kinds)

    asyncio.run(scenario())


async def test_a_group_that_waits_for_its_longest_sample_or_its_reward_makes_room_for_others():
    ends, scored, begun = asyncio.Event(), asyncio.Event(), list[str]()

    async def one_is_long(problem: Problem, generate: Generate) -> Trajectory:
        begun.append(problem.row["problem"])
        if problem.row["problem"] == "1" and begun.count("1") == 1:
            await ends.wait()
        return await single_turn(problem, generate)

    class SlowRewards(FakeRewards):
        async def score(self, answers):
            await scored.wait()
            return await super().score(answers)

    episodes, places = made_by(one_is_long, 3), Places(4, 3)
    episodes.rewards = SlowRewards()
    buffer = FakeBuffer([item(0, "fine"), item(1, "fine"), item(2, "fine")])
    buffer.items[1].problem["problem"] = buffer.items[2].problem["problem"] = "2"
    buffer.end()
    rolling = asyncio.create_task(roll(buffer.ask, buffer, episodes, places))
    await until(lambda: begun.count("2") == 6 and places.taken == 1)
    assert begun.count("2") == 6 and places.taken == 1  # no group is stored, and all that remains is the long sample
    ends.set()
    await until(lambda: places.taken == 0)
    assert places.taken == 0 and not buffer.put_groups
    scored.set()
    await asyncio.wait_for(rolling, 120)
    assert sorted(buffer.put_groups) == [0, 1, 2]


async def test_a_higher_limit_wakes_who_waits_for_a_place():
    places = Places(2, 4)
    held = places.take()
    waiting = asyncio.create_task(places.room())
    await asyncio.sleep(0)
    places.limit = 9
    assert await asyncio.wait_for(waiting, 120) == 2
    held.free_all(waiting)
    held.free_all(waiting)
    assert places.taken == 0 and await places.room() == 3


async def test_the_mean_length_is_that_of_samples_that_finished():
    places, episodes = Places(64, 3, mean_tokens=20.0), made_by(play, 3)
    buffer = FakeBuffer([*(item(number, "fine") for number in range(20)), item(20, "dead")])
    buffer.end()
    await asyncio.wait_for(roll(buffer.ask, buffer, episodes, places), 60)
    assert places.mean_tokens == pytest.approx(4 + 16 * (1 - 1 / 512) ** 60)


# the rule of `auto`: one call each heartbeat


def beat(rule: Auto, places: Places, seconds: float, taken: float = 1.0, waits: bool = True, **engine: float):
    """Heartbeats every two seconds; `taken` is the share of the places that are."""
    for _ in range(int(seconds / 2)):
        rule.seen = getattr(rule, "seen", 0.0) + 2.0
        places.taken = int(places.limit * taken)
        rule.adapt(rule.seen, places, {"running": float(places.taken), "preempted": 0.0} | engine, waits)
    return places.limit


def begun(wanted: int = 256, max_num_seqs: int = 512, kv_tokens: int = 10**9) -> tuple[Auto, Places]:
    rule = Auto(wanted, max_num_seqs, lambda mean: int(kv_tokens / mean))
    places = Places(1, 16, mean_tokens=1000.0)
    places.limit = min(rule.limits(places).values())
    beat(rule, places, 2, waits=False)
    return rule, places


def test_auto_fills_512_within_about_a_minute_of_waiting_and_not_without_waiting():
    rule, places = begun(16)
    assert beat(rule, places, 600, waits=False) == 16
    assert beat(rule, places, 600, taken=0.5) == 16  # the bound on age or the data hold it, not the places
    assert 64 < beat(rule, places, 30) < 256
    assert beat(rule, places, 32) == 512
    assert beat(rule, places, 600) == 512
    assert beat(rule, places, 600, waits=False) == 512


def test_auto_grows_for_groups_and_not_for_an_evaluation_that_fills_a_lull():
    rule, places = begun(16)
    places.lull = True
    assert beat(rule, places, 60) == 16
    places.lull = False
    assert beat(rule, places, 60) > 16


def test_auto_has_no_more_places_than_the_kv_cache_holds():
    rule, places = begun(kv_tokens=100_000)
    assert beat(rule, places, 60) == 100
    places.mean_tokens = 200.0  # answers are shorter than was expected
    assert beat(rule, places, 2, waits=False) == 256
    assert beat(rule, places, 60) == 500
    places.mean_tokens = 10**9
    assert beat(rule, places, 2) == 16, "one group at least"


def test_auto_is_cut_by_preemptions_and_comes_back_slowly():
    rule, places = begun()
    beat(rule, places, 60)
    assert beat(rule, places, 2, preempted=3.0, running=40.0) == 509, "as many fewer, also in the tail of a batch"
    assert beat(rule, places, 2, preempted=64.0) == 448
    assert beat(rule, places, 60, preempted=64.0) == 448 + 16
    assert rule.limits(places)["limit_preempted"] == 464
    assert beat(rule, places, 2, preempted=900.0) == 464 * 7 / 8, "at most an eighth at a time"
    for _ in range(60):
        beat(rule, places, 2, preempted=900.0 + _)
        beat(rule, places, 2, preempted=9000.0 + 100 * _)
    assert places.limit == 16, "one group at least"


def test_a_cut_has_to_work_before_the_next_one():
    """Long answers keep their places for minutes: those that are preempted meanwhile say nothing of the new limit."""
    rule, places = begun()
    places.taken = places.limit
    for beats in range(1, 31):
        rule.adapt(2.0 + 2 * beats, places, {"preempted": 40.0 * beats}, True)
        assert places.limit == 256 * 7 / 8
    places.taken = places.limit
    rule.adapt(70.0, places, {"preempted": 1201.0}, True)
    assert places.limit == 256 * 7 / 8 - 1


def test_a_number_is_what_the_run_file_says():
    rule, places = Fixed(40), Places(40, 16)
    rule.adapt(2.0, places, {"running": 7.0, "preempted": 7.0}, True)
    assert places.limit == 40 and rule.limits(places) == {"limit_sequences": 40}


@pytest.mark.parametrize(
    ("keys", "cpu", "limits"),
    [
        ([], False, {"limit_learner": 256, "limit_graphs": 512, "limit_kv": 100}),
        (
            ["batch.groups=300", "rollout.servers=4"],
            False,
            {"limit_learner": 600, "limit_graphs": 608, "limit_kv": 100},
        ),
        (["batch.groups=1"], True, {"limit_learner": 8, "limit_graphs": 256, "limit_kv": 100}),
        (["rollout.engine.max_num_seqs=300"], False, {"limit_learner": 256, "limit_graphs": 300, "limit_kv": 100}),
        (["rollout.sequences=77"], False, {"limit_sequences": 77}),
    ],
)
def test_a_server_begins_with_its_share_of_a_batch_or_with_the_number(keys, cpu, limits):
    config = load([*NEEDED, *(f"--{key}" for key in keys)])
    expected = list[float]()

    def by_kv(mean: float) -> int:
        expected.append(mean)
        return 100

    places, rule = start(config, cpu, by_kv)
    assert rule.limits(places) == limits and places.limit == min(limits.values())
    assert set(expected) <= {512.0}  # a quarter of prompt and answer
    assert places.samples == 8


async def test_single_samples_get_their_share_beside_the_groups_and_all_that_is_free_in_a_lull():
    places = Places(8, 4)
    spare = SparePlaces(places, 0.25)
    held = [places.take(), places.take()]
    taking = asyncio.create_task(take_all(spare, 20))
    await until(lambda: spare.taken == 2)
    assert (spare.taken, places.taken) == (2, 10), "a quarter, although all are taken"
    assert held
    places.free(4)
    await asyncio.sleep(0.01)
    assert spare.taken == 2, "what groups give back is for groups"
    places.begin_lull()
    await until(lambda: spare.taken == 4)
    assert (spare.taken, places.taken) == (4, 8), "unless none is admitted"
    with places.asking():  # the next Ask finds groups
        pass
    for _ in range(3):
        spare.free(taking)
    await asyncio.sleep(0.01)
    assert spare.taken == 2, "its share again"
    taking.cancel()


async def take_all(spare: SparePlaces, number: int) -> None:
    for _ in range(number):
        await spare.take()


async def test_an_ask_that_is_not_answered_for_long_is_a_lull():
    places = Places(8, 4)
    with places.asking():
        assert not places.lull
        await until(lambda: places.lull)
        assert places.lull
    assert not places.lull
    with places.asking():
        pass
    await asyncio.sleep(LULL_S + 0.1)
    assert not places.lull, "it was answered at once"


async def test_the_end_of_the_groups_is_a_lull_for_good():
    buffer, places = FakeBuffer(), Places(8, 4)
    buffer.end()
    await asyncio.wait_for(roll(buffer.ask, buffer, made_by(single_turn, 4), places), 120)
    assert places.lull and SparePlaces(places, 0.25)


def test_places_are_parked_while_they_are_free_and_nothing_is_admitted() -> None:
    async def story() -> None:
        places = Places(10, samples=4)
        held = places.take()
        assert places.parked == 0
        places.begin_lull()
        assert places.parked == 6
        places.take(), places.take()
        assert places.parked == 0  # more are taken than there are
        assert held
        with places.asking():
            pass
        assert not places.lull

    asyncio.run(story())
