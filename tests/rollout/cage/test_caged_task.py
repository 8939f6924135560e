"""Users' episodes in worker processes: each ends alone, and a worker that blocks or dies is replaced."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from configs.load import load
from examples.countdown.make_model import make_tokenizer
from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage, CallOnServer
from rollout.cage.user_task import UserTask, trajectory_of
from rollout.episodes.episode import Episodes, Failure
from rollout.errors import ChatRefused, EpisodeError
from rollout.tasks.trajectory import Completion, Problem
from tests.harness import fakes
from tests.harness.children import children
from tests.harness.fakes import FakePrompts, FakeRewards, fake_sampler
from tests.harness.lanes import long_but
from tests.harness.pace import paced
from tests.rollout.cage.test_cage import file_with_text

RUN = Path(__file__).parents[3] / "examples/countdown/quickstart.yaml"
LOADER = "tests.rollout.cage.user_rewards:load"


class Task(Cage):
    """A cage for episodes, with the arguments of an episode."""

    async def run(self, problem: Any, generate: Any) -> Any:
        return await self.call(problem, generate=generate)


def caged(name: str, workers: int = 1, **limits: Any) -> Task:
    options = {"timeout_s": 100.0, "prefix": "rollout.task_", "episodes": True} | limits
    return Task(CagedFunction(name, LOADER, [name], **options), workers)


class FakeEngine:
    """Answers with the options it was given; `hold` makes requests wait."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self.hold: asyncio.Event | None = None
        self.waiting = 0
        self.cancelled = asyncio.Event()
        self.all_wait: tuple[int, asyncio.Event] = (0, asyncio.Event())

    async def generate(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        self.requests.append((tokens, options))
        self.waiting += 1
        if self.waiting == self.all_wait[0]:
            self.all_wait[1].set()
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return {"tokens": [7, 2], "logprobs": [-0.5, -0.1], "versions": [3, 3], "finish": "stop"}


def problem(**row: Any) -> dict[str, Any]:
    return {"row": row, "prompt": [1, 2]}


async def error_of(episode: Awaitable[Any]) -> CagedError:
    with pytest.raises(CagedError) as caught:
        await asyncio.wait_for(episode, 120)
    return caught.value


async def test_episodes_and_their_options_reach_the_engine():
    engine = FakeEngine()
    async with caged("turns") as task:
        tokens = await task.run(problem(turns=2), engine.generate)
    assert tokens == [1, 2, 7, 2, 7, 2]
    assert engine.requests == [
        ([1, 2], {"max_tokens": 1, "stop": ["\n"]}),
        ([1, 2, 7, 2], {"max_tokens": 2, "stop": ["\n"]}),
    ]
    assert children(recursive=True) == []


async def test_many_episodes_run_at_the_same_time_in_one_worker():
    engine = FakeEngine()
    engine.hold, engine.all_wait = asyncio.Event(), (50, asyncio.Event())
    async with caged("single_turn") as task:
        episodes = [asyncio.create_task(task.run(problem(number=i), engine.generate)) for i in range(50)]
        await asyncio.wait_for(engine.all_wait[1].wait(), 120)
        engine.hold.set()
        results = await asyncio.gather(*episodes)
    assert [result["row"]["number"] for result in results] == list(range(50))


@pytest.mark.parametrize(
    ("how", "origin", "reason"),
    [
        ("raise", "KeyError", "misbehaves raised KeyError: 'target'"),
        ("raise strangely", "Strange", "misbehaves raised Strange: hidden"),
        ("exit", "SystemExit", "misbehaves called sys.exit(0)"),
        ("exit in a task", "SystemExit", "misbehaves called sys.exit(0)"),
        ("exit in a group", "SystemExit", "misbehaves called sys.exit(0)"),
        ("object", "unanswerable", "misbehaves returned a result of type Evil that cannot be sent"),
    ],
)
async def test_an_episode_ends_in_words_and_alone(how: str, origin: str, reason: str):
    engine = FakeEngine()
    engine.hold, engine.all_wait = asyncio.Event(), (2, asyncio.Event())
    async with caged("misbehaves") as task:
        other = asyncio.create_task(task.run(problem(how="fine"), engine.generate))
        failing = asyncio.create_task(task.run(problem(how=how), engine.generate))
        await asyncio.wait_for(engine.all_wait[1].wait(), 120)
        engine.hold.set()
        error = await error_of(failing)
        assert error.origin == origin and reason in str(error) and not error.permanent
        assert origin == "unanswerable" or "user_rewards.py" in error.detail
        assert await asyncio.wait_for(other, 120) == "fine"
        assert await task.run(problem(how="fine"), engine.generate) == "fine"


@pytest.mark.parametrize(
    ("how", "origin", "reason"),
    long_but(
        [
            ("quit", "died", "misbehaves ended its process (exit code 3)"),
            (
                "block",
                "timed_out",
                "longer than rollout.task_timeout_s ({:g} s); its process was killed",
            ),
            ("block in a task", "timed_out", "rollout.task_timeout_s"),
        ],
        0,
        2,
    ),
)
async def test_an_episode_that_ends_its_worker_is_named_and_the_others_are_bystanders(
    how: str, origin: str, reason: str
):
    engine = FakeEngine()
    stuck = FakeEngine()
    stuck.hold, stuck.all_wait = asyncio.Event(), (3, asyncio.Event())
    limit_s = paced(1.0)
    async with caged("misbehaves", timeout_s=limit_s) as task:
        others = [asyncio.create_task(task.run(problem(how="fine"), stuck.generate)) for _ in range(3)]
        await asyncio.wait_for(stuck.all_wait[1].wait(), 120)
        error = await error_of(task.run(problem(how=how), engine.generate))
        assert error.origin == origin and reason.format(limit_s) in str(error) and not error.returned
        for other in others:
            beside = await error_of(other)
            assert beside.returned and beside.origin == "died"
            assert str(beside).startswith("misbehaves: another episode ended the worker that both shared: ")
        assert await task.run(problem(how="fine"), engine.generate) == "fine"


@pytest.mark.parametrize("how", ["wait", "refuse to be cancelled"])
async def test_the_time_limit_of_an_episode_does_not_count_the_time_in_generate(how: str):
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    limit_s = paced(3.0)
    async with caged("misbehaves", timeout_s=limit_s) as task:
        patient = asyncio.create_task(task.run(problem(how="fine"), engine.generate))
        error = await error_of(task.run(problem(how=how), FakeEngine().generate))
        assert error.origin == "timed_out" and f"rollout.task_timeout_s ({limit_s:g} s)" in str(error)
        await asyncio.sleep(0.3)
        engine.hold.set()
        assert await asyncio.wait_for(patient, 120) == "fine"


async def test_what_generate_raises_reaches_the_episode_and_the_caller():
    async def refuse(tokens: list[int], **options: Any) -> None:
        raise LookupError("too many tokens")

    async with caged("single_turn") as task:
        with pytest.raises(LookupError, match=r"too many tokens"):
            await task.run(problem(), refuse)
    async with caged("survives_refusal") as task:
        assert await task.run(problem(), refuse) == "too many tokens"


async def test_a_refusal_after_a_long_time_is_not_the_episode_s_own():
    limit_s = paced(2.0)

    async def refuse(tokens: list[int], **options: Any) -> None:
        await asyncio.sleep(1.1 * limit_s)
        raise ChatRefused("out of time", "time_exceeded")

    async with caged("survives_refusal", timeout_s=limit_s) as task:
        assert await task.run(problem(), refuse) == "out of time"


async def test_an_error_may_be_permanent():
    async with caged("misbehaves") as task:
        assert (await error_of(task.run(problem(how="give up"), FakeEngine().generate))).permanent


async def test_a_cancelled_episode_stops_its_generation_and_nothing_else():
    engine = FakeEngine()
    engine.hold, engine.all_wait = asyncio.Event(), (2, asyncio.Event())
    async with caged("misbehaves") as task:
        first, second = (asyncio.create_task(task.run(problem(how="pid"), engine.generate)) for _ in range(2))
        await asyncio.wait_for(engine.all_wait[1].wait(), 120)
        first.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), 120)
        engine.hold.set()
        worker = await second
        assert await task.run(problem(how="pid"), FakeEngine().generate) == worker
    assert first.cancelled()


@pytest.mark.parametrize("how", ["refuse to be cancelled", "refuse without output"])
async def test_an_episode_that_does_not_end_ends_its_worker_and_others_are_bystanders(how: str, tmp_path: Path):
    engine = FakeEngine()
    engine.hold, engine.all_wait = asyncio.Event(), (1, asyncio.Event())
    async with caged("misbehaves", grace_s=0.5, cancel_again_s=0.2) as task:
        worker = await task.run(problem(how="pid"), FakeEngine().generate)
        refusing = problem(how=how, ready=str(tmp_path / "ready"))
        stubborn = asyncio.create_task(task.run(refusing, FakeEngine().generate))
        beside = asyncio.create_task(task.run(problem(how="fine"), engine.generate))
        await asyncio.wait_for(engine.all_wait[1].wait(), 120)
        await file_with_text(tmp_path / "ready")
        stubborn.cancel()
        error = await error_of(beside)
        assert error.returned and "another episode ended the worker that both shared" in str(error)
        assert await task.run(problem(how="pid"), FakeEngine().generate) != worker


async def test_an_episode_that_swallows_its_end_once_is_told_again(tmp_path: Path):
    async with caged("misbehaves", grace_s=1.5, cancel_again_s=0.2) as task:
        worker = await task.run(problem(how="pid"), FakeEngine().generate)
        swallowing = problem(how="swallow once", ready=str(tmp_path / "ready"))
        stubborn = asyncio.create_task(task.run(swallowing, FakeEngine().generate))
        await file_with_text(tmp_path / "ready")
        stubborn.cancel()
        await asyncio.sleep(1.8)
        assert await task.run(problem(how="pid"), FakeEngine().generate) == worker


async def test_an_episode_that_stops_waiting_stops_its_generation():
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    async with caged("stops_waiting") as task:
        assert await task.run(problem(), engine.generate) == "stopped"
        if engine.requests:  # where both messages arrive at once, the engine is never asked
            await asyncio.wait_for(engine.cancelled.wait(), 120)


async def test_a_generation_that_is_stopped_before_it_begins_is_forgotten():
    engine = FakeEngine()
    call = CallOnServer(1, b"", engine.generate, bool)
    call.worker = Mock()
    assert call.on_message("generate", 5, [1, 2], {})
    assert call.on_message("stop", 5)
    await asyncio.sleep(0.01)
    assert not call.requests and not engine.requests and not call.worker.send.called


async def test_workers_are_recycled_between_episodes():
    async with caged("misbehaves", max_calls=3) as task:
        pids = [await task.run(problem(how="pid"), FakeEngine().generate) for _ in range(7)]
    assert len(set(pids)) == 3


async def test_a_worker_killed_while_it_has_no_episode_fails_none():
    async with caged("misbehaves") as task:
        first = await task.run(problem(how="pid"), FakeEngine().generate)
        os.kill(first, signal.SIGKILL)
        assert await asyncio.wait_for(task.run(problem(how="pid"), FakeEngine().generate), 120) != first


async def test_closing_ends_episodes_as_bystanders():
    engine = FakeEngine()
    engine.hold, engine.all_wait = asyncio.Event(), (1, asyncio.Event())
    async with caged("misbehaves") as task:
        episode = asyncio.create_task(task.run(problem(how="fine"), engine.generate))
        await asyncio.wait_for(engine.all_wait[1].wait(), 120)
    assert (await error_of(episode)).returned
    assert (await error_of(task.run(problem(how="fine"), engine.generate))).origin == "died"


async def test_an_unloadable_task():
    assert (await error_of(caged("absent").__aenter__())).origin == "unloadable"


def problem_of(row: dict[str, Any], prompt: list[int]) -> Problem:
    return Problem(row, prompt, FakePrompts(), max_tokens=40)  # type: ignore[arg-type]


def real(task: str, model: Path | None = None) -> UserTask:
    return UserTask(load([str(RUN), f"--rollout.task={task}", *([f"--model.path={model}"] if model else [])]), None)


async def test_a_users_task_with_the_real_classes(tmp_path: Path):
    (tmp_path / "tools.py").write_text("REPLY = [5, 6]\n")
    (tmp_path / "mine.py").write_text(
        "import sys, tools\n"
        "from rollout.tasks import EpisodeError, Trajectory\n"
        "async def two_turns(problem, generate):\n"
        "    if not problem.row: raise EpisodeError('no row', permanent=True)\n"
        "    trajectory = Trajectory(problem.prompt)\n"
        "    trajectory.take(await generate(trajectory.tokens))\n"
        "    trajectory.give(tools.REPLY)\n"
        "    trajectory.take(await generate(trajectory.tokens))\n"
        "    trajectory.metrics['turns'] = 2\n"
        "    trajectory.turn_rewards = [0.5, 1]\n"
        "    return trajectory\n"
        "async def nothing(problem, generate): return None\n"
    )

    async def generate(tokens: list[int], max_tokens: int | None = None, stop: list[str] | None = None) -> Completion:
        return Completion([9], [-0.5], [4], "length")

    async with real(f"{tmp_path}/mine.py:two_turns") as task:
        trajectory = await task(problem_of({"a": 1}, [1, 2]), generate)
        assert trajectory.tokens == [1, 2, 9, 5, 6, 9] and trajectory.sampled == [0, 0, 1, 0, 0, 1]
        assert list(trajectory.versions) == [-1, -1, 4, -1, -1, 4] and trajectory.start == 2
        assert trajectory.finish == "length" and trajectory.metrics == {"turns": 2}
        assert (trajectory.starts, trajectory.turn_rewards) == ([0], [0.5, 1])
        error = await error_of(task(problem_of({}, [1, 2]), generate))
        assert str(error) == "no row" and error.permanent and error.origin == "EpisodeError"
    async with real(f"{tmp_path}/mine.py:nothing") as task:
        error = await error_of(task(problem_of({"a": 1}, [1, 2]), generate))
        assert "raised TypeError: NoneType returned instead of a Trajectory" in str(error)


@pytest.mark.long
async def test_a_problem_s_tokenizer_is_loaded_in_the_worker_when_it_is_asked_for(tmp_path: Path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 112, "hidden_size": 64}')
    (tmp_path / "mine.py").write_text(
        "import sys\n"
        "from rollout.tasks import Trajectory\n"
        "async def play(problem, generate):\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "    trajectory = Trajectory(problem.prompt)\n"
        "    trajectory.give(problem.tokenizer.encode('12', add_special_tokens=False))\n"
        "    return trajectory\n"
    )
    async with real(f"{tmp_path}/mine.py:play", tmp_path) as task:
        trajectory = await task(problem_of({}, [1]), FakeEngine().generate)
        assert trajectory.tokens == [1, *make_tokenizer().encode("12", add_special_tokens=False)]


async def test_a_task_that_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path):
    (tmp_path / "mine.py").write_text("raise SystemExit('no GPU')\n")
    with pytest.raises(ValueError, match=r"rollout.task: .*/mine.py cannot be imported: SystemExit: no GPU") as caught:
        await real(f"{tmp_path}/mine.py:play").__aenter__()
    assert "\n" not in str(caught.value)


async def test_bystanders_fail_without_an_attempt_and_the_guilty_episode_with_one(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import asyncio, os\n"
        "async def play(problem, generate):\n"
        "    if problem.row['problem'] == 'guilty': os._exit(3)\n"
        f"    open({str(tmp_path / 'ready')!r}, 'w').write('ready')\n"
        "    await asyncio.sleep(600)\n"
    )
    config = load([str(RUN), f"--rollout.task={tmp_path}/mine.py:play", "--rollout.task_workers=1"])
    async with UserTask(config, None) as task:
        played = Episodes(FakePrompts(), task, fake_sampler(fakes.FakeEngine(FakePrompts().encode)), FakeRewards(), 1)
        beside = asyncio.create_task(played.attempt({"problem": "beside"}))
        await file_with_text(tmp_path / "ready")
        guilty = await asyncio.wait_for(played.attempt({"problem": "guilty"}), 120)
        returned = await asyncio.wait_for(beside, 120)
    assert isinstance(guilty, Failure) and guilty.kind == "task" and not guilty.returned
    assert guilty.reason.endswith("mine.py:play ended its process (exit code 3)")
    assert isinstance(returned, Failure) and returned.returned and "another episode ended" in returned.reason


@pytest.mark.parametrize(
    ("code", "reason"),
    long_but(
        [
            (
                "calls += 1\n    if calls == 4: os._exit(3)\n    await asyncio.sleep(600)",
                "ended its process (exit code 3)",
            ),
            ("await generate('a text')", "generate: tokens must be a list of token ids"),
            ("await generate(None)", "generate: tokens must be a list of token ids"),
        ],
        0,
    ),
)
async def test_a_group_fails_for_what_its_guilty_sample_did(tmp_path: Path, code: str, reason: str):
    source = f"import asyncio, os\ncalls = 0\nasync def play(problem, generate):\n    global calls\n    {code}\n"
    (tmp_path / "mine.py").write_text(source)
    config = load([str(RUN), f"--rollout.task={tmp_path}/mine.py:play", "--rollout.task_workers=1"])
    async with UserTask(config, None) as task:
        played = Episodes(FakePrompts(), task, fake_sampler(fakes.FakeEngine(FakePrompts().encode)), FakeRewards(), 8)
        failure = await asyncio.wait_for(played.attempt({"problem": "1+1="}), 120)
    assert isinstance(failure, Failure) and not failure.returned and reason in failure.reason


GOOD: dict[str, Any] = {
    "tokens": [1, 2],
    "start": 1,
    "sampled": [0, 1],
    "logprobs": [0.0, -0.5],
    "versions": [-1, 3],
    "finish": "stop",
    "metrics": {"turns": 1.0},
    "images": [],
    "starts": [0],
    "turn_rewards": [],
    "score": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [1, "2"]},
        {"tokens": [1, -2]},
        {"tokens": None},
        {"sampled": [0]},
        {"sampled": [0, 2]},
        {"logprobs": [0.0, float("nan")]},
        {"logprobs": [0.0, 1e300]},
        {"versions": [-1, 2**40]},
        {"versions": [-1, "x"]},
        {"start": 3},
        {"start": "x"},
        {"finish": "abort"},
        {"metrics": {"turns": float("inf")}},
        {"metrics": [1]},
        {"turn_rewards": [1.0, 1.0]},
        {"turn_rewards": [None]},
        {"turn_rewards": 1},
        {"starts": []},
        {"starts": [0, 0]},
        {"starts": [0, 1]},
        {"starts": [1]},
        {"starts": None},
        {"score": "good"},
    ],
)
def test_values_of_an_impossible_trajectory_are_an_error_of_the_task(change: dict[str, Any]):
    sampler = fake_sampler(fakes.FakeEngine(FakePrompts().encode))
    problem = problem_of({}, [1])
    checked = vars(sampler.check(problem, trajectory_of("mine", dict(GOOD))).trajectory)
    assert {name: checked[name] for name in GOOD} == GOOD
    with pytest.raises(EpisodeError, match=r"cannot be trained on|the task scored an episode 'good'"):
        sampler.check(problem, trajectory_of("mine", GOOD | change))


@pytest.mark.parametrize("values", long_but([None, [], {"tokens": [1]}, GOOD | {"more": 1}], 0, 1, 2))
def test_values_that_are_no_trajectory_are_refused(values: Any):
    with pytest.raises(CagedError) as caught:
        trajectory_of("mine", values)
    assert caught.value.origin == "unanswerable"


def test_a_worker_of_agents_and_chats_starts_without_slow_imports():
    """A worker starts in a tenth of a second; with these packages it takes half a second."""
    slow = "{'numpy', 'pydantic', 'torch', 'transformers', 'vllm'}"
    code = f"import sys, rollout.cage.worker_process, rollout.cage.worker_task\nprint({slow} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
