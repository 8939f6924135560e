"""`python -m rollout`: the command line, refusals, the wait for a first policy, draining, and signals."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from buffer.wire.protocol import WorkItem
from examples.countdown.make_model import make_tokenizer
from rollout.__main__ import PolicyUpdates, either, main, option
from rollout.drain import REASON, Drain, Signals
from rollout.episodes.episode import Episodes, Group, sampler
from rollout.loop import follow, roll
from rollout.places import Places
from rollout.tasks import single_turn
from tests.harness.fakes import FakeBuffer, FakeEngine, FakePrompts, FakeRewards, FakeWeights

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples/countdown/quickstart.yaml"


def item(number: int) -> WorkItem:
    return WorkItem(item=number, lease=number, version=0, problem={"problem": "1+1=", "answer": "2."})


def parts() -> tuple[FakeEngine, Episodes]:
    engine = FakeEngine(lambda prompt: [ord("2"), ord(".")])
    return engine, Episodes(FakePrompts(), single_turn, sampler(engine, 8, 1.0, [ord(".")]), FakeRewards(), 2)


def test_the_name_is_taken_out_of_the_line():
    assert option(["a.yaml", "--name", "rollout-3", "--run.seed=1"], "--name", "x") == (
        "rollout-3",
        ["a.yaml", "--run.seed=1"],
    )
    assert option(["--name=b", "a.yaml"], "--name", "x") == ("b", ["a.yaml"])
    assert option(["a.yaml"], "--name", "rollout-0") == ("rollout-0", ["a.yaml"])


async def test_arrivals_tell_of_the_first_policy_once_it_is_in_place_and_of_the_last():
    weights = FakeWeights([0, 1, 2])
    arrivals = PolicyUpdates(weights, versions=2)
    firsts: list[tuple[bool, bool]] = []

    class Engine(FakeEngine):
        def paused(self):  # type: ignore[override]
            firsts.append((arrivals.first.is_set(), arrivals.last.is_set()))
            return super().paused()

    following = asyncio.create_task(follow(arrivals, Engine(list)))
    await asyncio.wait_for(arrivals.last.wait(), 5)
    following.cancel()
    assert firsts == [(False, False), (True, False), (True, False)]


async def test_either_event_is_enough():
    one, two = asyncio.Event(), asyncio.Event()
    waiting = asyncio.create_task(either(one, two))
    await asyncio.sleep(0)
    assert not waiting.done()
    two.set()
    await asyncio.wait_for(waiting, 5)


async def test_draining_finishes_what_is_in_flight_and_returns_what_still_comes():
    buffer = FakeBuffer([item(1)])
    engine, episodes = parts()
    engine.gate.clear()
    drain = Drain(buffer, episodes, force=lambda: None)
    rolling = asyncio.create_task(roll(drain, episodes, Places(4)))
    await asyncio.sleep(0.02)
    drain.begin()
    await asyncio.sleep(0.02)
    buffer.add(item(2))  # the answer to the question that was open when the drain began
    await asyncio.sleep(0.02)
    assert buffer.failures == {2: (REASON, False)} and buffer.returned == {2} and not rolling.done()
    engine.gate.set()
    await asyncio.wait_for(rolling, 5)
    assert list(buffer.put_groups) == [1]
    assert await drain.ask(1) is None
    await drain.close()


async def test_what_outlasts_the_drain_is_given_back():
    buffer = FakeBuffer([item(1)])
    engine, episodes = parts()
    engine.gate.clear()
    drain = Drain(buffer, episodes, force=lambda: None, drain_s=0.05)
    rolling = asyncio.create_task(roll(drain, episodes, Places(1)))
    await asyncio.sleep(0.02)
    drain.begin()
    await asyncio.wait_for(rolling, 5)
    assert (
        buffer.failures == {1: (REASON, False)}
        and buffer.returned == {1}
        and buffer.put_groups == {}
        and engine.aborted == 2
    )


async def test_a_finished_buffer_ends_without_a_drain():
    buffer = FakeBuffer([item(1)])
    buffer.end()
    _, episodes = parts()
    drain = Drain(buffer, episodes, force=lambda: None)
    await asyncio.wait_for(roll(drain, episodes, Places(1)), 5)
    await drain.close()
    assert list(buffer.put_groups) == [1]
    assert isinstance(await episodes.run(item(2)), Group)


async def test_the_first_signal_is_gentle_and_the_second_forces():
    heard: list[str] = []

    async def serve() -> None:
        with Signals() as interrupts:
            interrupts.gently = lambda: heard.append("drain")
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            heard.append("still here")
            interrupts.now = lambda: heard.append("force")  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)

    await asyncio.wait_for(asyncio.create_task(serve()), 5)
    assert heard == ["drain", "still here", "force"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is enough to get past the refusals."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 112, "hidden_size": 64}')
    return folder


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--reward.function=countdwon", "reward.function"),
        ("--reward.kwargs.format_scroe=0", "reward.kwargs.format_scroe: countdown takes no such argument"),
        ("--sampling.stop=[the end]", "sampling.stop: 'the end' is 7 tokens"),
        ("--rollout.taks=single_turn", "rollout.taks: no such key"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line_with_exit_code_2(
    model: Path, override: str, words: str, capsys: pytest.CaptureFixture[str]
):
    try:
        code = main([str(RUN), f"--model.path={model}", override])
    except SystemExit as left:
        code = left.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0]


def test_a_signal_while_it_waits_for_the_buffer_ends_the_process(model: Path):
    line = [sys.executable, "-m", "rollout", str(RUN), f"--model.path={model}", "--buffer.address=tcp://127.0.0.1:9"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stderr is not None
        waits = next((text for text in server.stderr if "rollout-0 asks the buffer" in text), None)
        server.send_signal(signal.SIGINT)
        rest = server.stderr.read()
        assert waits and "SIGINT: draining" in rest
        assert server.wait(60) == 0
