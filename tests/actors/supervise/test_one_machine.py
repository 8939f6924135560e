"""One machine without Ray: which process gets which GPUs, what waits for some, and calls that block no other call."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actors.doctor.host import gpu_names
from actors.process import Event, Process, Restarts, Role
from actors.supervise import one_machine
from actors.supervise.one_machine import GpuPool, OneMachine, PlainKeeper, raise_open_files
from actors.supervise.supervisor import Supervisor
from tests.harness.fakes import until

STAYS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
signal.sigwait({signal.SIGTERM})
"""


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Process]:
    def make(name: str, gpus: int = 0, code: str = STAYS) -> Process:
        role: Role = name.partition("-")[0]  # type: ignore[assignment]
        argv, quick = (sys.executable, "-c", code), Restarts(first_s=0.05, most_s=0.1)
        return Process(name, role, argv, tmp_path / "logs" / f"{name}.log", gpus=gpus, restarts=quick)

    return make


def test_a_drained_servers_gpu_is_the_next_ones_and_one_that_waits_can_be_taken_back(
    made: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,3,1")  # of the launcher
    machine, seen = OneMachine(["GPU-a", "3", "1"]), list[tuple[str, Event]]()

    def lines(name: str) -> list[str]:
        return [event.text for who, event in seen if who == name and event.kind == "line"]

    async def story() -> None:
        first = [made("buffer"), made("learner", 2), made("rollout-0", 1)]
        show = lambda process, event: seen.append((process.name, event))  # noqa: E731
        supervisor = Supervisor(first, machine.place, show, lambda text: None)
        running = asyncio.create_task(supervisor.run())
        await until(lambda: all(map(lines, ("buffer", "learner", "rollout-0"))))
        assert lines("learner") == ["GPUs GPU-a,3"] and lines("rollout-0") == ["GPUs 1"]
        assert lines("buffer") == ["GPUs GPU-a,3,1"]
        assert (machine.gpus, machine.room(1), machine.room(0)) == ([3], 0, None)
        supervisor.add(made("rollout-1", 1))
        supervisor.add(made("rollout-2", 1))
        await until(lambda: lines("rollout-1") and lines("rollout-2"))
        assert lines("rollout-1") == lines("rollout-2") == ["waits for 1 free GPU"]
        await supervisor.drain_server("rollout-1", 60.0)  # it waits for a GPU, and is not wanted any more
        assert supervisor.servers() == {"rollout-0": "started", "rollout-2": "placing"}
        await supervisor.drain_server("rollout-0", 60.0)
        await until(lambda: len(lines("rollout-2")) == 2)
        assert lines("rollout-2")[1] == "GPUs 1" and lines("rollout-1") == ["waits for 1 free GPU"]
        await supervisor.drain_server("rollout-2", 60.0)
        assert machine.room(1) == 1 and supervisor.left == ["rollout-1", "rollout-0", "rollout-2"]
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == 130

    asyncio.run(asyncio.wait_for(story(), 120))


class Notes:
    """Stands for a `PlainKeeper`: notes the GPUs that it is given."""

    def __init__(self, process: Process) -> None:
        self.process, self.given = process, list[list[str]]()

    def begin(self, gpus: list[str]) -> None:
        self.given.append(gpus)


def test_gpus_are_handed_out_whole_once_each_and_in_their_order(made: Callable[..., Process]) -> None:
    pool = GpuPool(["7", "5", "6"])
    asks = lambda gpus: Notes(made("rollout-0", gpus))  # noqa: E731
    two, more, one, none = asks(2), asks(3), asks(1), asks(0)
    for keeper in (two, more, one, none):
        pool.ask(keeper)  # type: ignore[arg-type]
    assert (two.given, more.given, one.given, none.given) == ([["7", "5"]], [], [["6"]], [[]])
    assert pool.free == 0
    pool.give_back(["6"])
    pool.give_back(["7", "5"])
    assert more.given == [["7", "5", "6"]]
    assert not pool.withdraw(more)  # type: ignore[arg-type]
    pool.ask(late := asks(1))  # type: ignore[arg-type]
    assert pool.withdraw(late)  # type: ignore[arg-type]
    pool.give_back(["5", "7"])
    assert late.given == [] and pool.free == 2


def test_gpus_that_are_given_back_twice_are_there_once(made: Callable[..., Process]) -> None:
    async def story() -> None:
        pool = GpuPool(["0"])
        keeper = PlainKeeper(made("rollout-0", 1, code=""), pool)
        await keeper.kill()
        keeper.release()
        keeper.release()
        assert pool.free == 1

    asyncio.run(story())


def test_no_call_of_a_keeper_waits_for_another_keepers(
    made: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's own threads are 6 on a machine of two cores: the drain of a seventh server would begin minutes late."""
    monkeypatch.setattr(one_machine, "EVENTS_S", 600.0)

    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        keepers = [PlainKeeper(made(f"rollout-{number}"), GpuPool([])) for number in range(2)]
        last = [0, 0]
        for at, keeper in enumerate(keepers):
            while not last[at]:
                last[at] = next((event.number for event in await keeper.events(0) if event.kind == "line"), 0)
        waiting = [asyncio.create_task(keeper.events(number)) for keeper, number in zip(keepers, last, strict=True)]
        await asyncio.gather(*(keeper.drain(60.0) for keeper in keepers))
        assert [(await task)[-1].kind for task in waiting] == ["ended", "ended"]

    asyncio.run(asyncio.wait_for(story(), 120))


def test_a_process_that_cannot_be_kept_is_given_up_in_words(made: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "logs").touch()

    async def story() -> list[Event]:
        keeper = PlainKeeper(made("rollout-0"), GpuPool([]))
        await keeper.drain(1.0)
        await keeper.kill()
        return await keeper.events(0)

    (event,) = asyncio.run(story())
    assert event.kind == "gave_up" and event.text.startswith("the launcher cannot keep it: ") and "logs" in event.text


UUIDS = ("GPU-aa", "GPU-ab", "GPU-b")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ["0", "1", "2"]),
        ("2, 0", ["2", "0"]),
        ("GPU-b,GPU-aa", ["GPU-b", "GPU-aa"]),
        ("GPU-a", []),
        ("0,-1,1", ["0"]),
        ("-1", []),
        ("", []),
        ("1,1", []),
        ("0,7,1", ["0"]),
        ("MIG-x,MIG-y", ["MIG-x", "MIG-y"]),
    ],
)
def test_gpus_are_named_as_the_launchers_own_variable_names_them(
    value: str | None, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"echo '{uuid}, H100, 80000, 0'\n" for uuid in UUIDS)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpu_names() == names


def test_a_machine_without_gpus_has_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-x")
    assert gpu_names() == []


def test_processes_of_a_launch_may_open_many_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65536, before[1]), before[1])
        raise_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
