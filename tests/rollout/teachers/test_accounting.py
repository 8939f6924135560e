"""SIGKILL to a teacher's server while groups are made: each item becomes one group with its teacher's numbers, and no
attempt is lost."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from buffer.wire.sample import Sample
from buffer.wire.values import Bounds
from configs.schema import TeacherConfig
from rollout.concurrency import Places
from rollout.episodes.episode import Episodes
from rollout.loop import roll
from rollout.tasks.trajectory import single_turn
from rollout.teachers.scoring import Teachers
from tests.harness.buffer_process import buffer, in_loop, make_requests, rollout, samples_of
from tests.harness.fakes import FakeEngine, FakePrompts, FakeRewards, fake_sampler, until
from tests.harness.keys import give_keys
from tests.harness.ports import free_port
from tests.harness.teaching import by_context
from tests.harness.toy import ROOT

ITEMS = 30


def server(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.harness.teaching", str(port)], cwd=ROOT)


@pytest.mark.long
@in_loop
async def test_a_killed_teacher_costs_time_and_no_group(tmp_path: Path) -> None:
    problems = [{"problem": f"{row}+{row}=", "answer": "ok."} for row in range(100)]
    requests = make_requests(
        problems=problems, groups=ITEMS // 3, max_staleness=2, bounds=Bounds(teachers=frozenset({""})), attempts=1
    )
    port, engine = free_port(), FakeEngine(lambda prompt: [ord(letter) for letter in "ok."])
    config = TeacherConfig(model="big", servers=1, port=port)
    stored = lambda: requests.handlers.ledger.view.counts().get("stored", 0)  # noqa: E731
    running = server(port)
    try:
        async with (
            buffer(requests) as it,
            rollout(it.address) as client,
            Teachers(config, give_keys(tmp_path / "run")) as teachers,
        ):
            made = Episodes(FakePrompts(), single_turn, fake_sampler(engine), FakeRewards(), 2, teachers=teachers)  # type: ignore[arg-type]
            rolling = asyncio.create_task(roll(client.ask, client, made, Places(8, 2)))
            for number in (5, 15):
                await until(lambda number=number: stored() >= number)  # type: ignore[misc]
                running.kill()
                running.wait()
                running = server(port)
            await until(lambda: stored() == ITEMS)
            assert requests.handlers.ledger.view.counts()["stored"] == ITEMS and not rolling.done()
            rolling.cancel()
            await asyncio.gather(rolling, return_exceptions=True)
            assert requests.handlers.ledger.view.failed() == {}
            for item in range(ITEMS):
                for data in samples_of(requests.handlers.store, item):
                    sample = Sample.unpack(data)
                    tokens, sampled = sample.tokens.numpy().tolist(), sample.sampled.numpy() != 0
                    assert "".join(map(chr, tokens)) == f"{item}+{item}=ok." and sample.teacher_logprobs is not None
                    own = [by_context(tokens, place) for place in np.flatnonzero(sampled).tolist()]
                    assert sample.teacher_logprobs.numpy()[sampled].tolist() == own and 0 not in own
    finally:
        running.kill()
        running.wait()
