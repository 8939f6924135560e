"""The launcher on one machine: a guard, plain keepers, and processes with fake commands. Nothing may be left of it."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.harness.lanes import long_but
from tests.harness.launched import NAMES, Launched, launching, until, words


def launcher_of(launched: Launched) -> psutil.Process:
    """The process that keeps the run, below front process and guard."""
    (found,) = [process for process in launched.all() if words(process).endswith(f"{launched.run}  inner")]
    return found


def guard_of(launched: Launched, name: str) -> psutil.Process:
    (found,) = [process for process in launched.all() if words(process).endswith(f"guard.py {name}")]
    return found


def test_killed_processes_and_guards_come_back_and_ctrl_c_drains(tmp_path: Path) -> None:
    with launching(tmp_path) as launched:
        everything = launched.all()
        assert [
            process for process in everything for each in process.net_connections() if each.status == "LISTEN"
        ] == []
        first = launched.ready("rollout-0")[0]
        os.kill(first[0], signal.SIGKILL)
        until(lambda: len(launched.ready("rollout-0")) == 2, launched)
        assert not any(psutil.pid_exists(pid) for pid in first)

        guard_of(launched, "learner").kill()
        until(lambda: len(launched.ready("learner")) == 2, launched)
        assert not psutil.pid_exists(launched.ready("learner")[0][0])

        everything = list({*everything, *launched.all()})
        os.killpg(launched.front.pid, signal.SIGINT)
        assert launched.front.wait(150) == 130, launched.terminal.read_text()
    terminal = launched.terminal.read_text()
    for name in NAMES:
        assert launched.log(name).count("drained") == 1
        assert f"[{name}] ready" in terminal
    assert "force quit" in terminal and terminal.endswith("imported Ray: False\n")
    assert re.search(r"^ready \d+ \d+ None", launched.log("learner"), re.MULTILINE)
    assert not psutil.wait_procs(everything, timeout=150)[1]


def test_a_lost_terminal_drains_however_often_it_is_said(tmp_path: Path) -> None:
    """Shell and kernel both send SIGHUP. Before, it killed the launcher and with it all processes."""
    with launching(tmp_path) as launched:
        everything = launched.all()
        os.killpg(launched.front.pid, signal.SIGHUP)
        until(lambda: "drained" in launched.log("learner"), launched)
        with suppress(ProcessLookupError):
            os.killpg(launched.front.pid, signal.SIGHUP)
        assert launched.front.wait(150) == 128 + signal.SIGHUP, launched.terminal.read_text()
    assert all(launched.log(name).count("drained") == 1 for name in NAMES)
    assert not psutil.wait_procs(everything, timeout=150)[1]


@pytest.mark.parametrize("whom", long_but(["front process", "launcher", "guard of the launcher"], 1))
def test_nothing_outlives_what_is_killed_of_a_launch(whom: str, tmp_path: Path) -> None:
    with launching(tmp_path) as launched:
        everything = launched.all()
        assert all({*launched.ready(name)[0]} <= {process.pid for process in everything} for name in NAMES)
        victims = {
            "front process": lambda: psutil.Process(launched.front.pid),
            "launcher": lambda: launcher_of(launched),
            "guard of the launcher": lambda: guard_of(launched, "launcher"),
        }
        victims[whom]().kill()
        launched.front.wait(150)
        assert not psutil.wait_procs(everything, timeout=150)[1]
