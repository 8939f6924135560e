"""`roll` and `follow` against stand-ins for buffer, engine and learner."""

import asyncio

import pytest

from buffer.wire.client import RolloutClient, heartbeats
from buffer.wire.protocol import WorkItem
from rollout.concurrency import Places
from rollout.episodes.episode import Episodes, Group
from rollout.errors import EngineDead
from rollout.loop import PolicyUpdates, follow, roll
from rollout.tasks.trajectory import single_turn
from tests.harness.buffer_process import buffer, client, group, make_requests, rollout
from tests.harness.fakes import (
    FakeBuffer,
    FakeEngine,
    FakePrompts,
    FakeRewards,
    FakeWeights,
    fake_evaluator,
    fake_sampler,
    until,
)

STOP = ord(".")


def items(*problems: str) -> list[WorkItem]:
    return [
        WorkItem(item=index, lease=100 + index, version=0, problem={"problem": problem, "answer": "ok."})
        for index, problem in enumerate(problems)
    ]


def parts(answer: str = "ok.") -> tuple[FakeEngine, Episodes]:
    engine = FakeEngine(lambda prompt: [ord(character) for character in answer])
    return engine, episodes_of(engine)


def episodes_of(engine: FakeEngine) -> Episodes:
    return Episodes(FakePrompts(), single_turn, fake_sampler(engine), FakeRewards(), 3)


async def test_every_item_becomes_a_group_until_the_buffer_has_no_more():
    buffer = FakeBuffer(items("a", "b", "c", "d", "e"))
    buffer.end()
    _, episodes = parts()
    await asyncio.wait_for(roll(buffer.ask, buffer, episodes, Places(6, 3)), 120)
    assert sorted(buffer.put_groups) == [0, 1, 2, 3, 4]
    assert all(len(group) == 3 for group in buffer.put_groups.values())
    assert max(buffer.rooms) == 2 and buffer.failures == {}


async def test_no_more_groups_are_made_at_a_time_than_there_are_places_for():
    buffer = FakeBuffer(items("a", "b", "c", "d", "e"))
    engine, episodes = parts()
    engine.gate.clear()
    rolling = asyncio.create_task(roll(buffer.ask, buffer, episodes, Places(6, 3)))
    await until(lambda: engine.running == 2 * 3)
    assert engine.running == 2 * 3 and len(buffer.items) == 3
    engine.gate.set()
    buffer.end()
    await asyncio.wait_for(rolling, 120)
    assert sorted(buffer.put_groups) == [0, 1, 2, 3, 4]


async def test_it_asks_for_as_many_items_as_there_is_room_for():
    buffer = FakeBuffer(items("a"))
    _, episodes = parts()
    rolling = asyncio.create_task(roll(buffer.ask, buffer, episodes, Places(12, 3)))
    await until(lambda: len(buffer.rooms) >= 2 and buffer.put_groups)
    assert buffer.rooms[:2] == [4, 3]
    buffer.add(*items("b"))
    buffer.end()
    await asyncio.wait_for(rolling, 120)
    assert buffer.rooms[-1] in (3, 4)


async def test_a_permanent_failure_is_reported_and_the_rest_goes_on():
    buffer = FakeBuffer(items("a", "x" * 21, "b"))
    buffer.end()
    _, episodes = parts()
    await asyncio.wait_for(roll(buffer.ask, buffer, episodes, Places(9, 3)), 120)
    assert buffer.failures == {1: ("prompt", "prompt of 21 tokens", True)}
    assert sorted(buffer.put_groups) == [0, 2]


async def test_a_group_too_large_for_a_message_fails_and_the_rest_goes_on():
    async with buffer(make_requests(max_message=2**16)) as it, rollout(it.address) as samples:
        large, small = await samples.ask(1), await samples.ask(1)
        await Group(group(large[0].item, tokens=8000)).deliver(samples, large[0])
        await Group(group(small[0].item)).deliver(samples, small[0])
        ledger = it.requests.handlers.ledger
        assert ledger.state.items[small[0].item].state == "stored"
        assert ledger.state.items[large[0].item].state == "waiting"
        assert any("buffer.max_message_mib" in reason for reason in ledger.state.totals.by("failed"))


async def test_a_group_that_the_buffer_cannot_take_is_logged_and_the_rest_goes_on(caplog):
    """Its values cannot be trained; or its Put is refused, whatever for."""
    async with buffer(make_requests(attempts=1)) as it, rollout(it.address) as samples:
        wrong, refused, right = await samples.ask(3)
        broken = group(wrong.item)[1].model_copy(update={"reward": 1e9})
        await Group([group(wrong.item)[0], broken]).deliver(samples, wrong)
        line = f"item {wrong.item}, sample 1: reward: 1e+09; a reward is -1e+06 to 1e+06: scale it down"
        assert [record.getMessage() for record in caplog.records if "rollout" in record.name] == [
            f"an attempt failed, kind task: {line}"
        ]
        await Group([one.model_copy(update={"answer": "x" * 2**21}) for one in group(refused.item)]).deliver(
            samples, refused
        )
        await Group(group(right.item)).deliver(samples, right)
        ledger = it.requests.handlers.ledger
        assert ledger.state.items[right.item].state == "stored" and ledger.view.counts()["dropped"] == 2
        assert any(reason.startswith(f"reward: {line}") for reason in ledger.view.failed())


async def test_a_dead_engine_ends_the_loop_with_its_cause():
    def die(prompt: list[int]) -> list[int]:
        raise EngineDead("vLLM died")

    episodes = episodes_of(FakeEngine(die))
    buffer = FakeBuffer(items("a"))
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(roll(buffer.ask, buffer, episodes, Places(3, 3)), 120)
    assert caught.group_contains(EngineDead, match="vLLM died")
    assert buffer.failures == {} and buffer.put_groups == {}


async def test_follow_loads_each_policy_and_pauses_nothing():
    engine, _ = parts()
    weights = FakeWeights([0, 1, 4])
    following = asyncio.create_task(follow(PolicyUpdates(weights, 9, lambda: None), engine, fake_evaluator(engine)))
    await until(lambda: engine.version == 4 and len(weights.trail) == 6)
    following.cancel()
    assert weights.trail == ["load 0", "loaded 0", "load 1", "loaded 1", "load 4", "loaded 4"]
    assert engine.version == 4  # and the engine has no `paused` to call


async def test_a_parked_ask_gets_its_items_as_soon_as_the_new_policy_is_in_use():
    """With fresh samples only, a server asks for the next batch before the policy that may make it has come."""
    engine, _ = parts()
    engine.version = 0
    async with buffer(make_requests(max_staleness=0, groups=1)) as it, client(it.address) as connection:
        samples, batches = RolloutClient(connection, lambda: engine.version), it.requests.handlers.ledger.batches
        beating = asyncio.create_task(heartbeats(samples, 3600.0, dict, lambda revoked: None))
        (first,) = await samples.ask(2) or []
        await samples.put(first, group(first.item))
        asking = asyncio.create_task(samples.ask(2))
        assert batches.take(0)
        batches.trained(0)
        await asyncio.sleep(0.2)
        assert not asking.done(), "the buffer takes the server for one with version 0"
        updates = PolicyUpdates(FakeWeights([1]), 9, samples.nudged.set)
        following = asyncio.create_task(follow(updates, engine, fake_evaluator(engine)))
        (second,) = await asyncio.wait_for(asking, 60) or []
        assert second.version == 1
        following.cancel()
        beating.cancel()
