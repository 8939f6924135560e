"""Tests of `learner.ranks.start`. Small programs stand in for this node's ranks, so that none imports torch.
`test_main.py` tests that ranks of `python -m learner` behave like them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.schema import LearnerConfig
from learner import ranks
from tests.harness.launched import words

STAND_IN = """#!{python} -S
import os, signal, sys

how, rank, got = sys.argv[-1], os.environ["RANK"], []

def say(word):
    with open({said!r}, "a") as file:
        file.write(f"{{word}} {{rank}} {{os.getpid()}}\\n")

def on_signal(number, frame):
    got.append(number)
    say(f"signal{{len(got)}}")
    if how != "stubborn" or len(got) == 2:
        os._exit(3 if how == "ends" else 0 if len(got) == 1 else 128 + number)

for number in signal.SIGTERM, signal.SIGQUIT:  # the second one is passed on as SIGQUIT
    signal.signal(number, on_signal)
say("began")
assert sys.argv[1:3] == ["-m", "learner"] and os.environ["LOCAL_RANK"] == rank and os.environ["WORLD_SIZE"] == "2"
while True:
    signal.pause()
"""


class StandIns:
    """Two stand-in ranks and their output: lines with a word, a rank and its process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said, program = folder / "said", folder / "python"
        self._before = signal.getsignal(signal.SIGTERM)
        os.mkfifo(self.said)
        program.write_text(STAND_IN.format(python=sys.executable, said=str(self.said)))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        self._lines = os.fdopen(os.open(self.said, os.O_RDWR), "r")
        """This process may write to the pipe too, so the pipe does not end between two writers."""
        self.pids: dict[str, int] = {}
        """By rank."""

    def words(self, number: int) -> list[str]:
        """The next `number` lines, sorted, without their processes."""
        words = [self._lines.readline().split() for _ in range(number)]
        self.pids |= {rank: int(pid) for _, rank, pid in words}
        return sorted(f"{word} {rank}" for word, rank, _ in words)

    def signal_parent(self) -> None:
        """Send a signal as a user would, once the learner's handlers are set, soon after its ranks have started."""
        while signal.getsignal(signal.SIGTERM) is self._before:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        self._lines.close()

    def start(self, how: str, meanwhile: Callable[[], None]) -> int:
        """Run `ranks.start` and return its exit code; `meanwhile` runs in a thread."""
        thread = threading.Thread(target=meanwhile, daemon=True)
        thread.start()
        code = ranks.start([how], LearnerConfig(ranks=2), {})
        thread.join(60)
        assert not thread.is_alive()
        assert not any(map(psutil.pid_exists, self.pids.values())) and len(self.pids) == 2
        assert signal.getsignal(signal.SIGTERM) is self._before
        return code


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    made = StandIns(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_signal_reaches_every_rank_once(stand_ins: StandIns, capfd) -> None:
    got: list[list[str]] = []

    def meanwhile() -> None:
        got.append(stand_ins.words(2))
        stand_ins.signal_parent()
        got.append(stand_ins.words(2))

    assert stand_ins.start("drains", meanwhile) == 0
    assert got == [["began 0", "began 1"], ["signal1 0", "signal1 1"]]
    assert "failed first" not in capfd.readouterr().err


def test_a_second_signal_is_passed_on_too(stand_ins: StandIns) -> None:
    got: list[list[str]] = []

    def meanwhile() -> None:
        got.append(stand_ins.words(2))
        stand_ins.signal_parent()
        got.append(stand_ins.words(2))
        os.kill(os.getpid(), signal.SIGTERM)
        got.append(stand_ins.words(2))

    assert stand_ins.start("stubborn", meanwhile) == 128 + signal.SIGTERM
    assert got[1:] == [["signal1 0", "signal1 1"], ["signal2 0", "signal2 1"]]


def test_the_first_rank_that_fails_ends_all(stand_ins: StandIns, capfd) -> None:
    got: list[list[str]] = []

    def meanwhile() -> None:
        got.append(stand_ins.words(2))
        os.kill(stand_ins.pids["1"], signal.SIGKILL)
        got.append(stand_ins.words(1))

    assert stand_ins.start("fails", meanwhile) == 128 + signal.SIGKILL
    assert got == [["began 0", "began 1"], ["signal1 0"]]
    assert "learner: rank 1 failed first (exit code -9); all ranks have ended\n" in capfd.readouterr().err


def test_ranks_that_say_how_the_run_ended_have_not_failed(stand_ins: StandIns, capfd) -> None:
    def meanwhile() -> None:
        stand_ins.words(2)
        for pid in stand_ins.pids.values():
            os.kill(pid, signal.SIGTERM)

    assert stand_ins.start("ends", meanwhile) == 3
    assert "failed first" not in capfd.readouterr().err


def test_a_signal_while_the_ranks_are_being_started_reaches_them(stand_ins: StandIns, monkeypatch) -> None:
    """torch's own handler raised, and the ranks that were there stayed."""
    begun, starts = [False], subprocess.Popen

    def popen(*given: Any, **more: Any) -> Any:
        if not begun[0]:
            begun[0] = True
            os.kill(os.getpid(), signal.SIGTERM)
        return starts(*given, **more)

    monkeypatch.setattr("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen", popen)
    assert ranks.start(["drains"], LearnerConfig(ranks=2), {}) in (0, 128 + signal.SIGTERM)
    assert not any(words(process).endswith(" drains") for process in psutil.Process().children())
