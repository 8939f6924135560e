"""`python -m rollout`: the command line, refusals, the wait for a first policy, draining, and signals."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from buffer.wire.protocol import WorkItem
from configs.entrypoint import NOTICE, StopSignals
from examples.countdown.make_model import make_tokenizer
from learner.weights.receiver.staged import WeightsError
from rollout.__main__ import COMMANDS, explain_failure, main, unless_signalled
from rollout.concurrency import Places
from rollout.drain import RETURNED, Drain
from rollout.episodes.episode import Episodes, Group
from rollout.loop import PolicyUpdates, follow, roll
from rollout.tasks.trajectory import single_turn
from tests.harness.fakes import (
    FakeBuffer,
    FakeEngine,
    FakePrompts,
    FakeRewards,
    FakeWeights,
    fake_evaluator,
    fake_sampler,
)
from tests.harness.lanes import long_but
from tests.harness.launched import words

ROOT = Path(__file__).parents[2]
RUN = ROOT / "examples/countdown/quickstart.yaml"


def item(number: int) -> WorkItem:
    return WorkItem(item=number, lease=number, version=0, problem={"problem": "1+1=", "answer": "2."})


async def settle() -> None:
    """Let all that can go on now go on, however slow the machine is."""
    for _ in range(100):
        await asyncio.sleep(0)


def parts() -> tuple[FakeEngine, Episodes]:
    engine = FakeEngine(lambda prompt: [ord("2"), ord(".")])
    return engine, Episodes(FakePrompts(), single_turn, fake_sampler(engine), FakeRewards(), 2)


def draining(episodes: Episodes, drain_s: float = 30.0) -> Drain:
    drain = Drain(drain_s)
    drain.episodes = episodes
    return drain


def test_an_error_names_the_command_that_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    needed = [
        "--model.path=own/model",
        f"--data.train={tmp_path / 'rows.jsonl'}",
        "--reward.function=exact_match",
    ]
    assert main(["evaluate", *needed, "--models", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("python -m rollout evaluate: data.eval: null; ")
    assert {word: name for word, (name, _) in COMMANDS.items()} == {
        word: f"python -m rollout {word}" for word in ("evaluate", "reward", "teacher")
    }
    assert explain_failure(WeightsError("the probe differs", final=True), COMMANDS["reward"][0]) == 2
    assert capsys.readouterr().err == "python -m rollout reward: the probe differs\n"


async def test_events_are_set_once_the_first_policy_and_the_last_one_are_loaded():
    updates = PolicyUpdates(FakeWeights([0, 1, 2]), versions=2, beat=lambda: None)
    firsts: list[tuple[bool, bool]] = []

    class Engine(FakeEngine):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "version":
                firsts.append((updates.first.is_set(), updates.last.is_set()))

    engine = Engine(list)
    firsts.clear()
    following = asyncio.create_task(follow(updates, engine, fake_evaluator(engine)))
    await asyncio.wait_for(updates.last.wait(), 120)
    following.cancel()
    assert firsts == [(False, False), (True, False), (True, False)]


@pytest.mark.parametrize("which", ["the event", "the drain"])
async def test_a_wait_ends_with_the_event_or_with_the_drain(which: str):
    event, drain = asyncio.Event(), draining(parts()[1])
    waiting = asyncio.create_task(drain.wait(asyncio.ensure_future(event.wait())))
    await asyncio.sleep(0)
    assert not waiting.done()
    if which == "the event":
        event.set()
    else:
        drain.begin(signal.SIGTERM)
    await asyncio.wait_for(waiting, 120)


async def test_draining_finishes_what_is_in_flight_and_returns_what_still_comes():
    buffer = FakeBuffer([item(1)])
    engine, episodes = parts()
    engine.gate.clear()
    drain = draining(episodes)
    rolling = asyncio.create_task(roll(partial(drain.ask, buffer), buffer, episodes, Places(8, 2)))
    await settle()
    drain.begin(signal.SIGTERM)
    await settle()
    buffer.add(item(2))  # the answer to the request that was pending when the drain began
    await settle()
    assert (
        buffer.failures == {2: ("infrastructure", RETURNED.reason, False)}
        and buffer.returned == {2}
        and not rolling.done()
    )
    engine.gate.set()
    await asyncio.wait_for(rolling, 120)
    assert list(buffer.put_groups) == [1]
    assert await drain.ask(buffer, 1) is None


async def test_what_outlasts_the_drain_is_given_back():
    buffer = FakeBuffer([item(1)])
    engine, episodes = parts()
    engine.gate.clear()
    drain = draining(episodes, drain_s=0.05)
    rolling = asyncio.create_task(roll(partial(drain.ask, buffer), buffer, episodes, Places(2, 2)))
    await settle()
    drain.begin(signal.SIGTERM)
    await asyncio.wait_for(rolling, 120)
    assert buffer.failures == {1: ("infrastructure", RETURNED.reason, False)} and buffer.returned == {1}
    assert buffer.put_groups == {} and engine.aborted == 2


async def test_a_notice_shortens_the_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The keeper has said that the machine is gone in 10.05 s: 10 of them are for what comes after."""
    (tmp_path / "notice").write_text("10.05")
    monkeypatch.setenv(NOTICE, str(tmp_path / "notice"))
    buffer = FakeBuffer([item(1)])
    engine, episodes = parts()
    engine.gate.clear()
    drain = draining(episodes, drain_s=3600.0)
    rolling = asyncio.create_task(roll(partial(drain.ask, buffer), buffer, episodes, Places(2, 2)))
    await settle()
    drain.begin(signal.SIGTERM)
    await asyncio.wait_for(rolling, 120)
    assert buffer.returned == {1} and engine.aborted == 2


async def test_a_finished_buffer_ends_without_a_drain():
    buffer = FakeBuffer([item(1)])
    buffer.end()
    _, episodes = parts()
    drain = draining(episodes)
    await asyncio.wait_for(roll(partial(drain.ask, buffer), buffer, episodes, Places(2, 2)), 120)
    assert list(buffer.put_groups) == [1]
    assert isinstance(await episodes.run(item(2)), Group)


async def serve(trail: list[str], with_groups: bool) -> None:
    """A server that gets two signals: groups are in flight, or it still starts."""
    drain = draining(parts()[1]) if with_groups else Drain(30.0)
    with StopSignals(drain.begin, drain.force) as signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                trail.append(f"cancelled by signal {signals.count}")
            else:
                trail.append("still here")


async def test_the_first_signal_drains_and_the_second_forces():
    trail: list[str] = []
    await asyncio.wait_for(asyncio.create_task(serve(trail, with_groups=True)), 120)
    assert trail == ["still here", "cancelled by signal 2"]


async def test_the_first_signal_cancels_while_there_is_nothing_to_drain():
    trail: list[str] = []
    await asyncio.wait_for(asyncio.create_task(serve(trail, with_groups=False)), 120)
    assert trail == ["cancelled by signal 1", "cancelled by signal 2"]


async def test_an_interrupt_while_vllm_starts_is_no_failure_of_vllm() -> None:
    """The start blocks the event loop, and vLLM's process ends by Ctrl-C before this one handles it."""

    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("Engine core initialization failed")

    async def failed() -> None:
        raise RuntimeError("Engine core initialization failed")

    drain = Drain(30.0)
    with StopSignals(drain.begin, drain.force) as signals:
        with pytest.raises(RuntimeError):
            await unless_signalled(failed())
        with pytest.raises(asyncio.CancelledError):
            await unless_signalled(interrupted())
        assert signals.count == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is enough to get past the refusals."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 112, "hidden_size": 64}')
    return folder


@pytest.mark.parametrize(
    ("override", "words"),
    long_but(
        [
            ("--reward.function=nowhere.py:score", "reward.function: nowhere.py: no such file"),
            ("--reward.kwargs.format_scroe=0", "reward.kwargs.format_scroe: countdown takes no such argument"),
            ("--sampling.stop=[the end]", "sampling.stop: 'the end' is 7 tokens"),
            ("--rollout.taks=single_turn", "rollout.taks: no such key"),
        ],
        1,
        3,
    ),
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


@pytest.mark.long
def test_a_signal_while_it_waits_for_the_buffer_ends_all_its_processes(model: Path):
    """Ctrl-C of a terminal, which vLLM's process gets too while it imports."""
    line = [sys.executable, "-m", "rollout", str(RUN), f"--model.path={model}", "--buffer.address=tcp://127.0.0.1:9"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as server:
        assert server.stderr is not None
        waits = next((text for text in server.stderr if "rollout-0 waits for the buffer" in text), None)
        below = psutil.Process(server.pid).children(recursive=True)
        assert any("wait_for_task" in words(each) for each in below)
        os.killpg(server.pid, signal.SIGINT)
        rest = server.stderr.read()
        assert waits and "SIGINT: draining" in rest and "Traceback" not in rest
        assert server.wait(60) == 0
        assert not psutil.wait_procs(below, timeout=60)[1]


@pytest.mark.parametrize(("final", "code"), [(True, 2), (False, 1)])
def test_a_final_weights_error_ends_the_server_without_restart(
    final: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and the exit code after which keepers do not restart: a new process would end the same way."""
    error = ExceptionGroup("tasks", [WeightsError("version 0: the probe differs", final=final)])
    assert explain_failure(error) == code
    assert (capsys.readouterr().err == "python -m rollout: version 0: the probe differs\n") is final
