"""How many servers are wanted, and what became of those that were drained: over a real socket, and over restarts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from buffer.store.past import history
from buffer.store.sqlite import reading
from buffer.wire.client import RolloutClient
from buffer.wire.connection import Connection, RefusedError
from buffer.wire.protocol import Ack, Kept, Scale, State, Status
from tests.harness.buffer_process import buffer, client, in_loop, make_requests, rollout


def kept(*servers: str, left: tuple[str, ...] = (), **changes: Any) -> Kept:
    fields = dict(servers=dict.fromkeys(servers, "started"), left=list(left), wanted=len(servers), least=1, most=4)
    return Kept(**{**fields, "bound": "there are GPUs for 4 of them"} | changes)


async def state(observer: Connection) -> State:
    return await observer.expect(Status(), State)


def observer(address: str) -> Connection:
    return client(address, "scale", "launcher", fingerprint="")


@in_loop
async def test_a_number_is_refused_without_a_launcher_and_beyond_what_it_can_keep() -> None:
    async with buffer() as it, observer(it.address) as person:
        assert (await state(person)).wanted_servers is None
        with pytest.raises(RefusedError, match="no launcher keeps this run's servers"):
            await person.expect(Scale(servers=2), Ack)
        await person.expect(kept("rollout-0"), Ack)
        assert ((now := await state(person)).wanted_servers, now.wanted_by_person) == (1, False)
        with pytest.raises(RefusedError, match="5 servers: the run may have 1 to 4; there are GPUs for 4 of them"):
            await person.expect(Scale(servers=5), Ack)
        await person.expect(Scale(servers=3), Ack)
        assert ((now := await state(person)).wanted_servers, now.wanted_by_person) == (3, True)
        async with client(it.address) as server:
            with pytest.raises(RefusedError, match="Scale is a request of the launcher"):
                await server.expect(Scale(servers=1), Ack)


@in_loop
async def test_the_rule_may_not_change_what_a_person_said_until_auto() -> None:
    async with buffer() as it, observer(it.address) as person:
        await person.expect(kept("rollout-0"), Ack)
        await person.expect(Scale(servers=2), Ack)
        await person.expect(Scale(servers=4, by="rule"), Ack)
        assert (await state(person)).wanted_servers == 2
        await person.expect(Scale(servers=None), Ack)
        assert not (await state(person)).wanted_by_person
        await person.expect(Scale(servers=4, by="rule", why="the learner waited"), Ack)
        now = await state(person)
        assert (now.wanted_servers, now.wanted_by_person) == (1, False), "the launcher says what it works towards"
        assert it.requests.handlers.ledger.wanted.wanted_servers == 4


def test_the_number_outlives_the_buffer_and_the_file_says_why(tmp_path: Path) -> None:
    file = tmp_path / "buffer.sqlite"

    @in_loop
    async def scaled() -> None:
        async with buffer(make_requests(file)) as it, observer(it.address) as person:
            await person.expect(kept("rollout-0"), Ack)
            await person.expect(Scale(servers=3), Ack)
            await person.expect(Scale(servers=3), Ack)  # no news

    @in_loop
    async def again() -> None:
        async with buffer(make_requests(file)) as it, observer(it.address) as person:
            now = await state(person)
            assert (now.wanted_servers, now.wanted_by_person, now.kept) == (3, True, None)

    scaled()
    again()
    db = reading(file)
    assert [str(change) for _, change in history(db)] == ['rollout.servers: 1 -> "3 (asked for by hand)"']
    db.close()


@in_loop
async def test_what_a_drained_server_had_goes_to_others_at_once_and_counts_no_attempt() -> None:
    """Also one that was killed in the middle of its drain; others keep theirs."""
    async with (
        buffer(make_requests(lease_s=1000.0)) as it,
        observer(it.address) as launcher,
        rollout(it.address, "rollout-0") as stays,
        rollout(it.address, "rollout-1") as leaves,
    ):
        mine, its = await stays.ask(2), await leaves.ask(2)
        assert mine and its
        await launcher.expect(kept("rollout-0", left=("rollout-1",)), Ack)
        now = await state(launcher)
        assert list(now.servers) == ["rollout-0"] and (now.counts["leased"], now.counts["waiting"]) == (2, 2)
        assert now.failed == {}
        again = await stays.ask(2)
        assert again and {work.item for work in again} == {work.item for work in its}
        assert [it.requests.handlers.ledger.state.items[work.item].attempts for work in again] == [1, 1]


@in_loop
async def test_a_server_that_leaves_hands_on_also_what_a_parked_ask_would_bring() -> None:
    async with (
        buffer(make_requests(lease_s=1000.0, max_staleness=0)) as it,
        observer(it.address) as person,
        rollout(it.address, "rollout-0") as stays,
        client(it.address, "rollout-1") as connection,
    ):
        leaves = RolloutClient(connection, lambda: 0)
        work = await stays.ask(2)  # the whole batch: nothing more is admitted
        parked = asyncio.create_task(leaves.ask(2))
        while not (await state(person)).waiters:
            await asyncio.sleep(0.01)
        await leaves.leave()
        assert work and list((await state(person)).servers) == ["rollout-0"]
        await stays.fail(work[0], "given back", returned=True)
        now = await state(person)
        assert (now.counts["leased"], now.counts["waiting"], now.waiters) == (1, 1, [])
        again = await stays.ask(1)
        assert again and again[0].item == work[0].item
        await leaves.leave()  # a repetition: it is let in, and leaves again
        assert list((await state(person)).servers) == ["rollout-0"]
        parked.cancel()


@in_loop
async def test_a_launcher_that_ended_is_told_until_the_next_one_comes() -> None:
    async with buffer() as it, observer(it.address) as person:
        async with client(it.address, "launcher", "launcher", fingerprint="") as launcher:
            await launcher.expect(kept("rollout-0"), Ack)
            assert (await state(person)).launcher_gone_s is None
        while (await state(person)).launcher_gone_s is None:
            await asyncio.sleep(0.02)
        for peer in it.requests.handlers.peers.known.values():
            peer.heard -= 1000.0
        async with observer(it.address):  # for which those are forgotten that nobody has heard of
            assert (await state(person)).launcher_gone_s is not None
        async with client(it.address, "launcher", "launcher", fingerprint="") as launcher:
            await launcher.expect(kept("rollout-0"), Ack)
            assert (await state(person)).launcher_gone_s is None
