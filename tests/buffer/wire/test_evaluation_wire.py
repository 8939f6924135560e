"""Evaluations over the wire: claimed, taken over, handed in, and sent to the learner, also by a buffer that died."""

import asyncio
from pathlib import Path

import pytest

from buffer.wire.client import LearnerClient, RolloutClient
from buffer.wire.protocol import EvaluationResult, SetResult, State, Status
from tests.harness.buffer_process import buffer, client, group, in_loop, make_requests, rollout
from tests.harness.keys import client_keys
from tests.harness.pace import paced

SETS = {"few": SetResult(figures={"mean@2": 0.5}, examples=[{"problem": {"problem": "?"}, "answer": "!", "reward": 1}])}


async def learner(address: str, known: list[int]) -> LearnerClient:
    """Rank 0, which follows the results but for those `known`."""

    def connect() -> LearnerClient:
        made = LearnerClient(address, "learner-0", "f" * 16, 0, 1, keys=client_keys("learner"))
        made.rewind(0)
        made.follow_evaluations(known)
        return made

    return await asyncio.to_thread(connect)


async def results(of: LearnerClient, number: int) -> list[EvaluationResult]:
    """Wait for `number` results."""
    found: list[EvaluationResult] = []
    async with asyncio.timeout(120):
        while len(found) < number:
            found += of.evaluations()
            await asyncio.sleep(0.01)
    return found


async def train_all(samples: RolloutClient, by: LearnerClient, versions: int) -> None:
    """Make and train `versions` batches of two groups."""
    made = 0
    while made < 2 * versions:
        for item in await samples.ask(2) or []:
            await samples.put(item, group(item.item, item.version))
            made += 1
    for version in range(versions):
        await asyncio.to_thread(by.take, version)
        await asyncio.to_thread(by.trained, version, 0)


@in_loop
async def test_an_evaluation_from_claim_to_learner():
    requests = make_requests(eval_every=2, versions=2)
    async with buffer(requests) as it, rollout(it.address) as one, rollout(it.address, "rollout-1") as two:
        by = await learner(it.address, [])
        assert await one.claim(0) == 0 and one.evaluating == 0
        assert await two.claim(0) is None and two.evaluating is None
        await two.beat({})
        assert not two.evaluation_due.is_set()
        async with client(it.address, "status", "observer") as observer:
            state = await observer.expect(Status(), State)
        assert state.evaluation == "rollout-0 evaluates version 0" and state.waiters == []
        assert (await one.evaluated(0, 0, SETS)).accepted and one.evaluating is None
        (first,) = await results(by, 1)
        assert (first.due, first.version, first.server) == (0, 0, "rollout-0")
        assert first.figures == {"few": {"mean@2": 0.5}}
        await train_all(one, by, 2)
        waiting = asyncio.create_task(asyncio.to_thread(by.last_evaluations))
        await asyncio.sleep(0.1)
        async with client(it.address, "status", "observer") as observer:
            state = await observer.expect(Status(), State)
        assert [(w.kind, w.why) for w in state.waiters] == [
            ("Results", "no rollout server has loaded version 2 yet, which is to be evaluated")
        ]
        two._version = lambda: 2
        await two.beat({})
        assert two.evaluation_due.is_set() and await two.claim(2) == 2
        assert not waiting.done()
        await two.evaluated(2, 2, SETS)
        assert [result.due for result in await asyncio.wait_for(waiting, 120)] == [2]
        await asyncio.to_thread(by.close)


@in_loop
async def test_a_stopped_learner_waits_for_no_result():
    async with buffer(make_requests(eval_every=2)) as it, rollout(it.address) as one:
        by = await learner(it.address, [])
        assert await one.claim(0) == 0
        waiting = asyncio.create_task(asyncio.to_thread(by.last_evaluations))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        by.stop()
        assert await asyncio.wait_for(waiting, 120) == []
        await one.evaluated(0, 0, SETS)
        assert [result.due for result in await results(by, 1)] == [0], "what comes later is still fetched"
        assert await asyncio.to_thread(by.last_evaluations) == []
        await asyncio.to_thread(by.close)


@in_loop
async def test_a_restarted_learner_gets_what_it_has_not_recorded():
    async with buffer(make_requests(eval_every=2)) as it, rollout(it.address) as one:
        await one.claim(0)
        await one.evaluated(0, 0, SETS)
        for known, wanted in (([], [0]), ([0], [])):
            by = await learner(it.address, known)
            found = await results(by, len(wanted))
            await asyncio.sleep(0.05)
            assert [result.due for result in found + by.evaluations()] == wanted
            await asyncio.to_thread(by.close)


@in_loop
async def test_a_run_without_evaluations_waits_for_none():
    async with buffer() as it, rollout(it.address) as one:
        by = await learner(it.address, [])
        assert await one.claim(0) is None
        assert await asyncio.wait_for(asyncio.to_thread(by.last_evaluations), 120) == []
        await asyncio.to_thread(by.close)


@in_loop
async def test_a_server_learns_that_its_evaluation_is_another_s():
    lease_s = paced(0.2)
    async with buffer(make_requests(eval_every=2, lease_s=lease_s)) as it, rollout(it.address) as one:
        assert await one.claim(0) == 0
        await asyncio.sleep(1.5 * lease_s)
        async with rollout(it.address, "rollout-1") as two:
            await two.beat({})
            assert two.evaluation_due.is_set() and await two.claim(0) == 0
            await one.beat({})
            assert one.evaluation_over.is_set()
            assert (await two.evaluated(0, 0, SETS)).accepted
            late = await one.evaluated(0, 0, SETS)
            assert not late.accepted and late.reason == "evaluation 0 is done"


@pytest.mark.parametrize("moment", ["claimed", "evaluated"])
def test_a_buffer_that_dies_forgets_nothing(tmp_path: Path, moment: str):
    file = tmp_path / "buffer.sqlite"

    @in_loop
    async def before():
        async with buffer(make_requests(file, eval_every=2)) as it, rollout(it.address) as one:
            assert await one.claim(0) == 0
            if moment == "evaluated":
                await one.evaluated(0, 0, SETS)

    @in_loop
    async def after():
        async with buffer(make_requests(file, eval_every=2)) as it, rollout(it.address, "rollout-1") as two:
            assert await two.claim(0) is None
            by = await learner(it.address, [])
            if moment == "evaluated":
                assert [one.figures for one in await results(by, 1)] == [{"few": {"mean@2": 0.5}}]
            else:
                async with rollout(it.address, "rollout-0") as again:
                    assert await again.claim(0) == 0, "the same name under a new token"
            await asyncio.to_thread(by.close)

    before()
    after()


def test_only_samples_of_the_first_and_the_newest_are_kept(tmp_path: Path):
    requests = make_requests(tmp_path / "buffer.sqlite", eval_every=1)
    ledger, store = requests.handlers.ledger, requests.handlers.store
    for version in range(30):
        ledger.state.ceiling = max(ledger.state.ceiling, version)
        assert ledger.evaluations.claim("s#1", version, ledger.view.reach, 0.0) == version
        ledger.evaluations.finish("s#1", version, version, "{}", '{"few": []}', ledger.view.reach)
        transaction = requests.handlers.changes()
        assert transaction
        requests.handlers.store.commit(transaction)
    kept = [due for (due,) in store._db.execute("SELECT due FROM evaluations WHERE samples <> '' ORDER BY due")]
    assert kept == [0, *range(10, 30)]
    assert [row.due for row in store.load().evaluations] == list(range(30))
    store.close()
