"""Rows that fail all their attempts, over real sockets: the log, the state and a restart after kill -9 know them; and
what a part says of the problems."""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from buffer.ledger.difficulty import Shares
from buffer.wire.client import RolloutClient
from buffer.wire.protocol import Ack, Finished, Part, State, Status, Take, Trained
from configs.load import load
from configs.resume import fingerprint
from tests.harness.buffer_process import PROBLEMS, buffer, client, group, in_loop, make_requests, process, rollout

REASON = "score.py:score raised KeyError: 'unit'"


async def serve(samples: RolloutClient, room: int, bad: set[str]) -> int:
    """Make groups of up to `room` items; those whose answer is in `bad` fail. Returns how many failed."""
    failed = 0
    for item in await samples.ask(room) or []:
        if item.problem["answer"] in bad:
            failed += 1
            await samples.fail(item, REASON, kind="reward")
        else:
            await samples.put(item, group(item.item, item.version))
    return failed


async def play(address: str, version: int, print_: str) -> None:
    """A server and a learner make and train batch `version`, of four groups; row 2 fails."""
    async with (
        client(address, fingerprint=print_) as server,
        client(address, "learner-0", "learner", fingerprint=print_) as learner,
    ):
        missing = 4
        while missing:
            missing = await serve(RolloutClient(server, lambda: version), missing, {"2"})
        await learner.expect(Take(version=version, rank=0, world=1), Part)
        await learner.expect(Trained(version=version, oldest_kept=0), Ack)


async def state_of(address: str, print_: str = "") -> State:
    async with client(address, "status", "observer", fingerprint=print_) as observer:
        return await observer.expect(Status(), State)


@in_loop
async def test_the_log_and_the_state_name_them_and_a_part_counts_them(caplog: pytest.LogCaptureFixture) -> None:
    requests = make_requests(problems=PROBLEMS[:8], attempts=1, max_staleness=0, groups=2, max_failed_share=1.0)
    with caplog.at_level(logging.WARNING):
        async with buffer(requests) as it, rollout(it.address) as samples:
            assert await serve(samples, 2, {"1"}) == 1
            assert await serve(samples, 1, set()) == 0
            async with client(it.address, "learner-0", "learner") as learner:
                part = await learner.expect(Take(version=0, rank=0, world=1), Part)
            state = await state_of(it.address)
    expected = {"unseen": 5, "unsolved": 0, "between": 2, "solved": 0, "left_out": 1}
    assert part.problems == state.problems == expected
    assert (part.new_groups, part.flat_groups) == (2, 0)
    assert state.left_out == [f"row 1 of data.train: reward: {REASON}"]
    (line,) = [line for line in caplog.messages if "left out" in line]
    every = f"every attempt at it failed: reward: {REASON}"
    assert line == f"left out from now on, row 1 of data.train: {every}; 1 of 8 rows are left out"


@in_loop
async def test_a_run_without_a_row_left_ends_for_servers_and_learner() -> None:
    requests = make_requests(problems=PROBLEMS[:3], attempts=2, max_staleness=2, groups=2, max_failed_share=1.0)
    async with buffer(requests) as it, rollout(it.address) as samples:
        assert await serve(samples, 9, {"0", "1", "2"}) == 6, "two epochs of rows may be open"
        async with client(it.address, "learner-0", "learner") as learner:
            end = await learner.expect(Take(version=0, rank=0, world=1), Finished)
        assert await samples.ask(1) is None
    assert end.outcome == "failed"
    assert end.why.startswith("the run was given up after version 0: all 3 rows of data.train are left out, because")
    assert f"  for example row 0 of data.train: reward: {REASON}" in end.why.splitlines()


@in_loop
async def test_a_buffer_that_is_killed_leaves_them_out_still_and_draws_the_same(tmp_path: Path) -> None:
    """A real process, by difficulty, killed after each batch; against a ledger in this process that is not."""
    settings = {
        "data.difficulty": "{rest: 1}",
        "rollout.attempts": 1,
        "rollout.heartbeat_s": 60,
        "batch.max_staleness": 0,
    }
    shares = Shares({"unseen": 0.3, "unsolved": 0.1, "between": 0.5, "solved": 0.1}, rest=1)
    requests = make_requests(groups=4, attempts=1, max_staleness=0, difficulty=shares)
    async with buffer(requests) as it:
        for number in range(2):
            await play(it.address, number, "f" * 16)
        records = requests.handlers.ledger.state.rows.records.values()
        expected = [record.row for record in sorted(records, key=lambda record: record.last_item)]
    with process(tmp_path, **settings) as it:
        print_ = fingerprint(load(it.arguments()[3:]))
        for number in range(2):
            await play(it.address, number, print_)
            it.kill()
            it.start()
        assert (await state_of(it.address)).left_out == [f"{tmp_path}/train.jsonl line 3: reward: {REASON}"]
        it.kill()
        with closing(sqlite3.connect(it.run / "buffer.sqlite")) as db:
            drawn = [row for (row,) in db.execute("SELECT row FROM rows ORDER BY last_item")]
    assert drawn == expected and len(drawn) > 4
