"""The order of the loop's calls, and the ends of a run: versions used up, problems used up, a signal."""

import ast
import inspect
import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from configs.entrypoint import StopSignals
from learner import loop
from learner.drain import Stopping
from learner.train import collectives
from tests.harness.world import FORKS, ROOT
from tests.system import chaos_learner, scaled_learner
from tests.system.failures import stand_ins
from tests.system.nemesis import learner as nemesis_learner

POLICY = object()


class Parts:
    """All the loop's parts at once; records its calls."""

    def __init__(self, restored: int = 0, batches: int = 100) -> None:
        self.restored, self.batches, self.calls = restored, batches, []

    def restore(self, policy) -> int:
        assert policy is POLICY
        return self.restored

    def rewind(self, version: int) -> None:
        self.calls.append(f"rewind {version}")

    def take(self, version: int):
        if "stop" in self.calls:
            return None
        self.calls.append(f"take {version}")
        return f"part {version}" if version < self.batches else None

    def step(self, policy, part) -> dict[str, float]:
        self.calls.append(f"step {part}")
        return {"loss": 1.0, "reward/mean": 0.5}

    def publish(self, policy, version: int) -> None:
        self.calls.append(f"publish {version}")

    def stats(self) -> dict[str, float]:
        return {"weights/servers": 2.0}

    def save(self, policy, version: int, reward: float | None) -> int:
        self.calls.append(f"save {version}, reward {reward}")
        return version - 1

    def trained(self, version: int, oldest_kept: int) -> None:
        self.calls.append(f"trained {version}, kept {oldest_kept}")

    def span(self, name: str):
        return nullcontext()

    def log(self, version: int, stats) -> None:
        self.calls.append(f"log {version} {sorted(stats)}")

    def evaluations(self, version: int | None = None) -> list[str]:
        """With `version`, the evaluations that the metrics have up to it; without, those that the buffer has sent."""
        return ["recorded"] if version is not None else []

    def warm_up(self, policy) -> None:
        assert self.calls[-1].startswith("publish")

    def follow_evaluations(self, known: list[str]) -> None:
        self.calls.append(f"follow evaluations but {known}")

    def last_evaluations(self) -> list[str]:
        return self.evaluations() if "stop" in self.calls else ["last"]

    def log_evaluations(self, version: int, results: list[str]) -> None:
        self.calls += [f"log {version}: {results}"] if results else []

    def stop(self) -> None:
        if "stop" not in self.calls:
            self.calls.append("stop")

    def finish(self, policy, version: int) -> None:
        self.calls.append(f"finish {version}")

    def run(self, versions: int) -> list[str]:
        stopping = Stopping(self)
        with StopSignals(stopping.begin):
            loop.run(POLICY, self, self, stopping, self, self, self, versions)
        return self.calls


STAND_INS = {
    "algorithm": [chaos_learner.Journal, scaled_learner.SharedJournal, nemesis_learner.Algorithm],
    "checkpoints": [chaos_learner.Checkpoints, scaled_learner.Reader, nemesis_learner.Checkpoints],
    "metrics": [chaos_learner.Metrics, stand_ins.EvaluationLog],
    "stopping": [chaos_learner.Unstoppable],
    "weights": [chaos_learner.Weights, scaled_learner.Follower],
}
"""The parts that whole runs of the long lane give the loop in place of the real ones."""


@pytest.mark.parametrize(("part", "stand_in"), [(part, one) for part, some in STAND_INS.items() for one in some])
def test_a_stand_in_takes_the_calls_of_the_loop(part: str, stand_in: type) -> None:
    """The fast lane runs no loop with these parts: a call that the loop got and a stand-in did not is found here."""
    names = inspect.signature(loop.run).parameters
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(loop.run))) if isinstance(node, ast.Call)]
    named = [
        node for node in calls if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == part
    ]
    assert part in names and named
    for node in named:
        given = [object()] * (1 + len(node.args))
        inspect.signature(getattr(stand_in, node.func.attr)).bind(*given, **dict.fromkeys(k.arg for k in node.keywords))


def test_a_version(mesh) -> None:
    assert Parts(restored=4).run(5) == [
        "rewind 4",
        "follow evaluations but ['recorded']",
        "publish 4",
        "take 4",
        "step part 4",
        "publish 5",
        "save 5, reward 0.5",
        "trained 4, kept 4",
        "log 5 ['loss', 'reward/mean', 'weights/servers']",
        "finish 5",
        "log 5: ['last']",
    ]


def test_versions_end(mesh) -> None:
    calls = Parts().run(3)
    assert [call for call in calls if call.startswith("step")] == ["step part 0", "step part 1", "step part 2"]


def test_problems_end(mesh) -> None:
    assert Parts(batches=1).run(3)[-3:] == ["take 1", "finish 1", "log 1: ['last']"]


def test_a_finished_run_only_publishes(mesh) -> None:
    assert Parts(restored=3).run(3) == [
        "rewind 3",
        "follow evaluations but ['recorded']",
        "publish 3",
        "finish 3",
        "log 3: ['last']",
    ]


def test_a_signal_in_a_step_lets_it_finish(mesh) -> None:
    class Signalled(Parts):
        def step(self, policy, part):
            if part == "part 1":
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(policy, part)

    parts = Signalled()
    parts.run(9)
    assert parts.calls[-3:] == ["trained 1, kept 1", "log 2 ['loss', 'reward/mean', 'weights/servers']", "finish 2"]


class Waiting(Parts):
    """Its waits end once it is stopped, by a signal that comes 0.1 s after they began."""

    def __init__(self, restored: int = 0) -> None:
        super().__init__(restored)
        self.stopped = threading.Event()

    def stop(self) -> None:
        super().stop()
        self.stopped.set()

    def wait(self) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert self.stopped.wait(120), "nothing woke it"

    def take(self, version: int):
        self.wait()

    def last_evaluations(self) -> list[str]:
        if not self.stopped.is_set():
            self.wait()
        return []


def test_a_signal_ends_the_wait_for_a_batch(mesh) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert Waiting().run(9)[-2:] == ["stop", "finish 0"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_ends_the_wait_for_the_last_evaluation(mesh) -> None:
    assert Waiting(restored=3).run(3)[-2:] == ["finish 3", "stop"]


def test_a_signal_of_another_rank_stops_this_one(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has taken its part, which the other rank has not, and does not wait for evaluations that the other leaves."""
    parts = Parts()
    monkeypatch.setattr(collectives, "all_reduce_max", lambda *numbers: [float("take 0" in parts.calls)])
    assert parts.run(9)[-3:] == ["take 0", "stop", "finish 0"]


def test_a_signal_while_the_ranks_agree_is_not_forgotten(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that they agreed to train is trained; the next one is not begun."""

    def agree(*numbers: float) -> list[float]:
        if len(parts.calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return list(numbers)

    parts = Parts()
    monkeypatch.setattr(collectives, "all_reduce_max", agree)
    parts.run(3)
    assert [call for call in parts.calls if call[:4] in ("take", "step", "stop", "fini")] == [
        "take 0",
        "stop",
        "step part 0",
        "finish 1",
    ]


def get_two_signals(log: Path) -> None:
    """A process that gets two signals. Its stderr goes to the file `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    with StopSignals(Stopping(Parts()).begin):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(120)


@pytest.mark.xdist_group("ranks")
def test_the_second_signal_forces(tmp_path: Path) -> None:
    process = FORKS.Process(target=get_two_signals, args=(tmp_path / "log",))
    process.start()
    process.join(120)
    assert process.exitcode == 128 + signal.SIGTERM
    says = "SIGTERM: finishing this version and its checkpoint; once more ends at once"
    assert says in (tmp_path / "log").read_text()


def test_the_loop_is_one_screen() -> None:
    lines = (ROOT / "learner" / "loop.py").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def run"))
    assert len(lines) - start <= 40 and not any("if config" in line for line in lines)


def test_an_evaluation_that_has_come_is_logged_though_a_signal_ends_the_run(mesh) -> None:
    """It came while the last checkpoint was written: no later run would ask for it."""

    class Late(Parts):
        def finish(self, policy, version: int) -> None:
            super().finish(policy, version)
            os.kill(os.getpid(), signal.SIGTERM)

        def evaluations(self, version: int | None = None) -> list[str]:
            return ["came"] if "finish 1" in self.calls else []

    parts = Late()
    parts.run(1)
    assert parts.calls[-3:] == ["finish 1", "stop", "log 1: ['came']"]


def test_no_rank_takes_a_batch_before_all_have_rewound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of another replica than the first publishes nothing, so nothing else would hold it back: its Take would
    come before another rank's Rewind, which then counts the next version as undone."""
    parts = Parts(batches=0)

    def agree(*numbers: float) -> list[float]:
        parts.calls.append("all")
        return list(numbers)

    monkeypatch.setattr(collectives, "all_reduce_max", agree)
    calls = [call for call in parts.run(1) if call in ("rewind 0", "all", "take 0")]
    assert calls == ["rewind 0", "all", "take 0", "all"]
