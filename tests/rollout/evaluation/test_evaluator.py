"""A server that is to evaluate holds newer policies back until it has, and makes groups all the while."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from configs.schema import EvalSet
from rollout.concurrency import Places
from rollout.evaluation.players import ProblemSet
from rollout.loop import PolicyUpdates, follow, until_last
from tests.harness.fakes import FakeEngine, FakeEvaluations, FakePolicy, fake_evaluator, until
from tests.harness.pace import paced

ROWS = [{"problem": name, "answer": "ok."} for name in "abc"]
SETS = [
    ProblemSet("one", EvalSet(path="p"), ROWS),
    ProblemSet("many", EvalSet(path="p", samples=4, k=[4], max_tokens=2), ROWS),
]


class GivenPolicies:
    """Stands for `Receiver`: yields what the test puts into `queue`."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.trail: list[str] = []

    async def policies(self) -> AsyncGenerator[FakePolicy, None]:
        while True:
            yield FakePolicy(await self.queue.get(), self.trail)


class Server:
    """`follow` and `take_over` around fakes."""

    def __init__(self, *due: int, busy: bool = False, timeout_s: float = 600.0) -> None:
        self.engine = FakeEngine(lambda prompt: [ord(character) for character in "ok."])
        self.buffer, self.weights, self.places = FakeEvaluations(due, busy), GivenPolicies(), Places(8, 1)
        self.weights.trail = self.buffer.trail
        self.evaluator = fake_evaluator(self.engine, self.buffer, SETS, self.places, timeout_s)
        self.updates = PolicyUpdates(self.weights, 99, lambda: None)  # type: ignore[arg-type]

    async def __aenter__(self) -> "Server":
        following = follow(self.updates, self.engine, self.evaluator)  # type: ignore[arg-type]
        self.tasks = [asyncio.create_task(following), asyncio.create_task(self.evaluator.take_over())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)

    def publish(self, *versions: int) -> None:
        for version in versions:
            self.weights.queue.put_nowait(version)


async def test_a_version_is_held_until_it_is_evaluated():
    async with Server(3) as server:
        server.engine.gate.clear()
        server.publish(3, 4, 5)
        await until(lambda: server.engine.running == 4 and len(server.buffer.trail) == 4)
        assert server.engine.version == 3 and server.engine.running == 4, "half of the places"
        assert server.buffer.trail == ["load 3", "claim 3", "hold", "loaded 3"], "held before the learner may send 4"
        assert server.updates.first.is_set(), "groups are made meanwhile"
        server.engine.gate.set()
        await until(lambda: server.buffer.trail[-1] == "loaded 5")
        rest = ["release", "evaluated 3 at 3", *(f"{what} {v}" for v in (4, 5) for what in ("load", "claim", "loaded"))]
        assert server.buffer.trail[4:] == rest and server.engine.version == 5
    one, many = (server.buffer.results[3][name] for name in ("one", "many"))
    assert one.figures["mean@1"] == 1.0 and one.examples[0]["answer"] == "ok."
    assert many.figures["mean@4"] == many.figures["pass@4"] == 0.0 and many.figures["truncated"] == 1.0, "cut at 2"
    assert server.engine.temperatures == {0.0, 1.0} and server.places.taken == 0


async def test_groups_come_first_and_a_lull_gives_all_places():
    async with Server(0) as server:
        server.engine.gate.clear()
        server.places.taken = 8
        server.publish(0)
        await until(lambda: server.engine.running == 4)
        assert server.engine.running == 4 and server.places.taken == 12, "its share, beside the groups that there are"
        server.places.taken -= 8
        server.places.begin_lull()
        await until(lambda: server.engine.running == 8)
        assert server.engine.running == 8
        server.engine.gate.set()
        await until(lambda: 0 in server.buffer.results)
        assert 0 in server.buffer.results


async def test_an_evaluation_that_is_left_undone_is_taken_over():
    async with Server() as server:
        server.buffer.evaluation_due.set()
        await asyncio.sleep(0.02)
        assert server.buffer.trail == [], "before the first policy there is nothing to evaluate"
        server.publish(6)
        await until(lambda: len(server.buffer.trail) == 3)
        server.buffer.due.add(6)
        server.buffer.evaluation_due.set()
        await until(lambda: len(server.buffer.trail) == 7)
        assert server.buffer.trail[3:] == ["hold", "claim 6", "release", "evaluated 6 at 6"]
        server.buffer.evaluation_due.set()
        server.buffer.due.clear()
        await until(lambda: len(server.buffer.trail) == 10)
        assert server.buffer.trail[7:] == ["hold", "claim 6", "release"], "another server was faster"


async def test_the_version_on_its_way_is_claimed_when_it_is_loaded():
    async with Server(6, 7, busy=True) as server:
        server.buffer.due.clear()
        server.publish(6)
        await until(lambda: len(server.buffer.trail) == 3)
        server.buffer.evaluation_due.set()
        await until(lambda: len(server.buffer.trail) == 4)
        assert server.buffer.trail[3:] == ["hold"]
        server.buffer.due.add(7)
        server.publish(7)
        await until(lambda: server.buffer.results)
        assert list(server.buffer.results) == [7]


async def test_an_evaluation_that_is_another_server_s_by_now_is_ended():
    async with Server(3) as server:
        server.engine.gate.clear()
        server.publish(3, 4)
        await until(lambda: server.engine.running == 4)
        server.buffer.due.clear()
        server.buffer.evaluation_over.set()
        await until(lambda: server.buffer.trail[-1] == "loaded 4" and server.engine.aborted == 4)
        assert server.engine.aborted == 4 and server.places.taken == 0
        assert server.engine.version == 4 and server.buffer.results == {} and server.buffer.evaluating is None
        assert server.buffer.trail[-4:] == ["release", "load 4", "claim 4", "loaded 4"]


async def test_results_that_come_too_late_change_nothing():
    async with Server(3) as server:
        server.buffer.accepted = False
        server.publish(3, 4)
        await until(lambda: server.engine.version == 4)
        assert server.engine.version == 4


async def test_a_server_leaves_once_the_last_version_is_evaluated_however_long_that_takes():
    async with Server(98, 99) as server:
        server.engine.gate.clear()
        server.publish(98)
        await until(lambda: server.engine.running == 4)
        leaving = asyncio.create_task(until_last(server.updates, server.evaluator, timeout_s=1.0))
        await asyncio.sleep(1.2)
        assert not leaving.done(), "it evaluates, and the last version comes after that"
        server.publish(99)
        await asyncio.sleep(0.05)
        assert not leaving.done()
        server.engine.gate.set()
        await asyncio.wait_for(leaving, 120)
        assert list(server.buffer.results) == [98, 99]


async def test_a_server_stays_while_the_buffer_has_not_said_whether_the_last_version_is_to_be_evaluated():
    async with Server(99, timeout_s=0.2) as server:
        server.buffer.answers.clear()
        server.publish(99)
        await asyncio.wait_for(server.updates.last.wait(), 120)
        await until(lambda: len(server.buffer.trail) == 3)
        assert server.buffer.trail == ["load 99", "claim 99", "loaded 99"]
        leaving = asyncio.create_task(until_last(server.updates, server.evaluator, timeout_s=0.05))
        await asyncio.sleep(0.2)
        assert not leaving.done(), "the learner waits for that evaluation"
        server.buffer.answers.set()
        await asyncio.wait_for(leaving, 120)
        assert list(server.buffer.results) == [99] and server.buffer.trail[-2:] == ["release", "evaluated 99 at 99"]


async def test_a_version_that_is_not_due_after_all_keeps_no_server():
    async with Server(timeout_s=0.2) as server:
        server.buffer.answers.clear()
        server.publish(99)
        await asyncio.wait_for(server.updates.last.wait(), 120)
        leaving = asyncio.create_task(until_last(server.updates, server.evaluator, timeout_s=0.05))
        await asyncio.sleep(0.1)
        server.buffer.answers.set()
        await asyncio.wait_for(leaving, 120)
        assert server.buffer.results == {} and server.buffer.trail[-1] == "release"


async def test_a_server_leaves_if_the_last_version_never_comes():
    async with Server() as server:
        server.publish(98)
        await until(lambda: server.updates.first.is_set())
        await asyncio.wait_for(until_last(server.updates, server.evaluator, timeout_s=0.05), 120)
        assert not server.updates.last.is_set()


async def test_a_server_that_was_stopped_still_waits_for_the_last_version():
    limit_s = paced(1.2)
    async with Server() as server:
        server.publish(98)
        await until(lambda: server.updates.first.is_set())
        leaving = asyncio.create_task(until_last(server.updates, server.evaluator, timeout_s=limit_s))
        await asyncio.sleep(0.05)
        time.sleep(limit_s + 0.3)  # the whole process stands still
        await asyncio.sleep(0.2)
        assert not leaving.done()
        server.publish(99)
        await asyncio.wait_for(leaving, 120)
        assert server.updates.last.is_set()


async def test_answers_that_no_message_has_room_for_are_left_out(caplog: pytest.LogCaptureFixture):
    async with Server(3) as server:
        server.buffer.most_examples = 0
        server.publish(3)
        await until(lambda: server.buffer.results)
        one = server.buffer.results[3]["one"]
        assert one.figures["mean@1"] == 1.0 and one.examples == []
        assert "exceeds buffer.max_message_mib (8)" in caplog.text


async def test_without_sets_nobody_is_asked():
    server = Server()
    server.evaluator.sets = []
    async with server:
        server.publish(0, 1)
        await until(lambda: len(server.buffer.trail) == 4)
        assert server.buffer.trail == ["load 0", "loaded 0", "load 1", "loaded 1"]
