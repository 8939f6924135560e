"""The launcher with fake commands: how a run ends, and in which order. As a whole: test_launch_here.py."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from actors.process import Event, Process, Restarts, Role
from actors.supervise.one_machine import GpuPool, OneMachine, PlainKeeper
from actors.supervise.supervisor import Supervisor
from configs.entrypoint import DATA_ENDED, GIVEN_UP

QUICK = Restarts(first_s=0.05, most_s=0.2, failures=2)
STAYS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
print("drained", flush=True)
"""
FAILS = "raise SystemExit(1)"
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)"
)


class Held(PlainKeeper):
    """Notes its release in `released`."""

    def __init__(self, process: Process, released: list[str]) -> None:
        super().__init__(process, GpuPool([]))
        self.released = released

    def release(self) -> None:
        self.released.append(self.process.name)


class Story:
    """A run with commands of the test, and what was shown of it."""

    def __init__(self, folder: Path, **codes: str) -> None:
        self.events: list[tuple[str, Event]] = []
        self.said: list[str] = []
        self.keepers: list[PlainKeeper] = []
        self.machine = OneMachine([])
        self.released: list[str] = []
        self.processes = [process(name, code, folder) for name, code in codes.items()]
        self.supervisor = Supervisor(self.processes, self.place, self.show_event, self.say)
        self.when: list[tuple[str, Callable[[], object]]] = []
        """What to do when a text is said or printed, in this order."""

    async def place_held(self, process: Process) -> PlainKeeper:
        """As `place`, with a keeper that notes its release."""
        self.keepers.append(Held(process, self.released))
        return self.keepers[-1]

    async def place(self, process: Process) -> PlainKeeper:
        self.keepers.append(await self.machine.place(process))
        return self.keepers[-1]

    def show_event(self, process: Process, event: Event) -> None:
        self.events.append((process.name, event))
        self.react(f"[{process.name}] {event.text}")

    def say(self, text: str) -> None:
        self.said.append(text)
        self.react(text)

    def react(self, text: str) -> None:
        if self.when and self.when[0][0] in text:
            self.when.pop(0)[1]()

    def go(self) -> int:
        return asyncio.run(asyncio.wait_for(self.supervisor.run(), 200))

    def lines(self, text: str) -> list[str]:
        """Who printed `text`, in order."""
        return [name for name, event in self.events if event.text == text]

    def last(self, name: str) -> Event:
        return [event for who, event in self.events if who == name][-1]


def process(name: str, code: str, folder: Path) -> Process:
    role: Role = name.partition("_")[0]  # type: ignore[assignment]
    return Process(
        name, role, (sys.executable, "-c", code), folder / "logs" / f"{name}.log", restarts=QUICK, drain_s=600.0
    )


def test_the_learners_end_is_the_runs_end(tmp_path: Path) -> None:
    learner = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)"
    story = Story(tmp_path, buffer=STAYS, learner=learner, rollout_0=STAYS, rollout_1=STAYS)
    story.when = [("] ready", lambda: None)] * 2 + [("] ready", (tmp_path / "go").touch)]
    assert story.go() == 0
    assert story.lines("drained")[-1] == "buffer" and sorted(story.lines("drained")) == [
        "buffer",
        "rollout_0",
        "rollout_1",
    ]
    assert all(story.last(process.name).kind == "ended" for process in story.processes)


def test_a_killed_learner_comes_back_and_finishes(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    learner = (
        f"import os, pathlib; mark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists():\n    mark.touch(); os.kill(os.getpid(), 9)\n"
    )
    story = Story(tmp_path, buffer=STAYS, learner=learner)
    assert story.go() == 0
    assert [event.code for _, event in story.events if event.kind == "failed"] == [137]


def test_bad_input_of_one_stops_the_run_with_its_message(tmp_path: Path) -> None:
    story = Story(tmp_path, buffer=STAYS, learner=STAYS, rollout_0="print('no model there'); raise SystemExit(2)")
    assert story.go() == 2
    assert any("rollout_0 refused its input:\nno model there" in said for said in story.said)


@pytest.mark.parametrize(("code", "launch"), [(DATA_ENDED, 3), (GIVEN_UP, 1)])
def test_a_learner_that_ends_the_run_is_not_started_again_and_says_why_last(
    tmp_path: Path, code: int, launch: int
) -> None:
    learner = f"print('a log line\\npython -m learner: the data ended\\n  row 3'); raise SystemExit({code})"
    story = Story(tmp_path, buffer=STAYS, learner=learner, rollout_0=STAYS)
    assert story.go() == launch
    assert story.said[-1] == "python -m learner: the data ended\n  row 3"
    assert [event.kind for who, event in story.events if who == "learner" and event.kind != "line"] == [
        "started",
        "ended",
    ]


def test_a_learner_that_cannot_be_kept_stops_the_run(tmp_path: Path) -> None:
    story = Story(tmp_path, buffer=STAYS, learner="print('out of memory'); raise SystemExit(1)", rollout_0=STAYS)
    assert story.go() == 1
    assert any("learner could not be kept" in said and "out of memory" in said for said in story.said)


def test_the_run_goes_on_while_a_server_is_left(tmp_path: Path) -> None:
    learner = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)"
    story = Story(tmp_path, buffer=STAYS, learner=learner, rollout_0=STAYS, rollout_1=FAILS)
    story.when = [("the run goes on", (tmp_path / "go").touch)]
    story.supervisor = Supervisor(story.processes, story.place_held, story.show_event, story.say)
    assert story.go() == 0
    assert story.last("rollout_1").kind == "gave_up"
    assert story.released == ["rollout_1"], "else a new keeper of Ray's would start it again"


def test_the_run_stops_without_any_server(tmp_path: Path) -> None:
    story = Story(tmp_path, buffer=STAYS, learner=STAYS, rollout_0=FAILS, rollout_1=FAILS)
    assert story.go() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_the_learner_first(tmp_path: Path, number: int) -> None:
    story = Story(tmp_path, buffer=STAYS, rollout_0=STAYS, learner=STAYS)
    others = [("] ready", lambda: None)] * 2
    story.when = [*others, ("] ready", lambda: os.kill(os.getpid(), number))]
    assert story.go() == 128 + number
    assert story.lines("drained")[0] == "learner" and story.lines("drained")[-1] == "buffer"
    assert any("again to force quit" in said for said in story.said)


def test_the_second_signal_kills(tmp_path: Path) -> None:
    story = Story(tmp_path, buffer=STAYS, learner=STUBBORN)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    story.when = [("[learner] ready", interrupt), ("draining learner", interrupt)]
    assert story.go() == 130  # its drain would take longer than `go` waits
    assert story.last("learner").code == 137


def test_reward_servers_are_drained_after_the_servers_that_ask_them(tmp_path: Path) -> None:
    learner = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)"
    story = Story(tmp_path, buffer=STAYS, learner=learner, rollout_0=STAYS, reward_0=STAYS, reward_1=STAYS)
    story.when = [("] ready", lambda: None)] * 3 + [("] ready", (tmp_path / "go").touch)]
    assert story.go() == 0
    drained = story.lines("drained")
    assert (drained[0], drained[-1]) == ("rollout_0", "buffer") and sorted(drained[1:3]) == ["reward_0", "reward_1"]


@pytest.mark.parametrize(("pools", "code"), [(("", ""), 0), (("math", "code"), 1)])
def test_only_a_server_of_the_same_teacher_replaces_a_teacher_server(
    pools: tuple[str, str], code: int, tmp_path: Path
) -> None:
    """Rows of the other teacher would wait for ever."""
    learner = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)"
    story = Story(tmp_path, buffer=STAYS, learner=learner, rollout_0=STAYS, teacher_0=FAILS, teacher_1=STAYS)
    of_pool = zip(story.processes[3:], pools, strict=True)
    story.processes[3:] = [replace(each, pool=pool) for each, pool in of_pool]
    story.supervisor.processes[:] = story.processes
    story.when = [("goes on with the other servers", (tmp_path / "go").touch)]
    assert story.go() == code
    (gave_up,) = [said for said in story.said if "teacher_0 could not be kept" in said]
    assert ("the run goes on with the other servers" in gave_up) is (code == 0)


def test_the_last_reward_server_that_cannot_be_kept_stops_the_run(tmp_path: Path) -> None:
    """Also one that ends with exit code 0: the run needs it."""
    story = Story(tmp_path, buffer=STAYS, learner=STAYS, rollout_0=STAYS, reward_0=FAILS, reward_1="")
    assert story.go() == 1
    gave_up = [said for said in story.said if "could not be kept" in said]
    assert len(gave_up) == 2 and "it failed 2 times in a row and never scored an answer" in gave_up[0]
    assert gave_up[0].endswith("the run goes on with the other servers")
    assert [event.code for who, event in story.events if who == "reward_1" and event.kind == "failed"] == [0]


SLOW_END = """
import time
signal.sigwait({signal.SIGTERM})
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
time.sleep(1)
"""
WAITS_FOR_GO = "import pathlib, sys, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.02)"


def test_servers_are_added_and_drained_while_the_run_goes_on(tmp_path: Path) -> None:
    """A drained one does not come back, and is not missed."""
    story = Story(tmp_path, buffer=STAYS, learner=WAITS_FOR_GO.format(str(tmp_path / "go")), rollout_0=STAYS)
    supervisor, lives = story.supervisor, []

    def drain() -> None:
        lives.append(supervisor.servers())
        tasks.append(asyncio.get_running_loop().create_task(supervisor.drain_server("rollout_0", 60.0)))
        tasks[0].add_done_callback(lambda _: (tmp_path / "go").touch())

    tasks: list[asyncio.Task[None]] = []
    story.when = [("[rollout_0] ready", lambda: supervisor.add(process("rollout_1", STAYS, tmp_path)))]
    story.when += [("[rollout_1] ready", drain)]
    assert story.go() == 0
    assert lives == [{"rollout_0": "started", "rollout_1": "started"}]
    assert supervisor.left == ["rollout_0"] and list(supervisor.servers()) == ["rollout_1"]
    assert story.lines("drained")[:2] == ["rollout_0", "rollout_1"]
    assert [event.kind for who, event in story.events if who == "rollout_0" and event.kind != "line"] == [
        "started",
        "ended",
    ]


def test_a_server_that_does_not_end_is_killed_when_its_time_is_up(tmp_path: Path) -> None:
    story = Story(tmp_path, buffer=STAYS, learner=STAYS, rollout_0=STAYS, rollout_1=STUBBORN)
    tasks: list[asyncio.Task[None]] = []

    def drain() -> None:
        tasks.append(asyncio.get_running_loop().create_task(story.supervisor.drain_server("rollout_1", 0.3)))
        tasks[0].add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGINT))

    story.when = [("[rollout_1] ready", drain)]
    assert story.go() == 130  # its sleep takes longer than `go` waits
    assert story.last("rollout_1").code == 137 and story.supervisor.left == ["rollout_1"]


def test_the_end_of_the_run_waits_for_a_drain_and_signals_it_once(tmp_path: Path) -> None:
    """A second SIGTERM would force it."""
    slow = STAYS.replace("signal.sigwait({signal.SIGTERM})", SLOW_END)
    story = Story(tmp_path, buffer=STAYS, learner=STAYS, rollout_0=STAYS, rollout_1=slow)
    tasks: list[asyncio.Task[None]] = []

    def drain() -> None:
        tasks.append(asyncio.get_running_loop().create_task(story.supervisor.drain_server("rollout_1", 60.0)))

    story.when = [("[rollout_1] ready", drain), ("draining rollout_1", lambda: os.kill(os.getpid(), signal.SIGINT))]
    assert story.go() == 130
    assert story.last("rollout_1").code == 0 and "rollout_1" in story.lines("drained")
    assert story.lines("drained")[-1] == "buffer"
    assert not [said for said in story.said if said.startswith("draining") and said.count("rollout_1") and "," in said]


def test_an_added_server_that_refuses_its_input_does_not_end_the_run(tmp_path: Path) -> None:
    """Its machine may lack what the first ones have."""
    story = Story(tmp_path, buffer=STAYS, learner=WAITS_FOR_GO.format(str(tmp_path / "go")), rollout_0=STAYS)
    refuses = process("rollout_1", "print('no model there'); raise SystemExit(2)", tmp_path)
    story.when = [("[rollout_0] ready", lambda: story.supervisor.add(refuses))]
    story.when += [("the run goes on", (tmp_path / "go").touch)]
    assert story.go() == 0
    assert story.supervisor.servers()["rollout_1"] == "refused"


def test_an_error_of_the_launcher_itself_drains_the_run_and_names_itself(tmp_path: Path) -> None:
    """The learner writes a checkpoint then, for which it has its whole time."""
    story = Story(tmp_path, buffer=STAYS, learner=STAYS, rollout_0=STAYS)

    async def broken() -> None:
        raise RuntimeError("no such thing")

    def begin() -> None:
        task = asyncio.get_running_loop().create_task(broken())
        task.add_done_callback(story.supervisor.notice_failure)

    story.when = [("] ready", lambda: None), ("] ready", lambda: None), ("] ready", begin)]
    assert story.go() == 1
    (why,) = [said for said in story.said if "the launcher failed" in said]
    assert "test_launch.py:" in why and why.endswith(": RuntimeError: no such thing; draining")
    assert story.lines("drained") == ["learner", "rollout_0", "buffer"]


class Homeless(Story):
    """A run whose learner finds no place."""

    gave_back = False

    async def place(self, process: Process) -> PlainKeeper:
        if process.name != "learner":
            return await super().place(process)
        try:
            await asyncio.Event().wait()
        finally:
            self.gave_back = True
        raise AssertionError


@pytest.mark.parametrize(("code", "last"), [(STAYS, 0), (STUBBORN, 137)])
def test_ctrl_c_is_heard_while_processes_are_placed(tmp_path: Path, code: str, last: int) -> None:
    story = Homeless(tmp_path, buffer=code, learner=STAYS, rollout_0=STAYS)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    story.when = [("[buffer] ready", interrupt)] + [("draining buffer", interrupt)] * bool(last)
    assert story.go() == 130 and story.gave_back
    assert story.last("buffer").code == last and len(story.keepers) == 1


def test_a_server_may_be_unwanted_before_it_is_placed(tmp_path: Path) -> None:
    """The launcher places one after the other, and the buffer, the first, may bring the news meanwhile."""
    story = Story(
        tmp_path, buffer=STAYS, learner=WAITS_FOR_GO.format(str(tmp_path / "go")), rollout_0=STAYS, rollout_1=STAYS
    )
    tasks: list[asyncio.Task[None]] = []
    place = story.place

    async def slowly(process: Process) -> PlainKeeper:
        if process.name == "rollout_0":
            tasks.append(asyncio.get_running_loop().create_task(story.supervisor.drain_server("rollout_1", 60.0)))
            tasks[0].add_done_callback(lambda _: (tmp_path / "go").touch())
            await asyncio.sleep(0)
        return await place(process)

    story.supervisor = Supervisor(story.processes, slowly, story.show_event, story.say)
    assert story.go() == 0
    assert story.supervisor.left == ["rollout_1"] and list(story.supervisor.servers()) == ["rollout_0"]
