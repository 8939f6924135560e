"""The launcher with a Ray of its own on this machine, and fake commands. Nothing may be left of any of it."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.harness.launched import NAMES, launching, until, words


def test_killed_processes_and_keepers_come_back_and_ctrl_c_drains(tmp_path: Path) -> None:
    with launching(tmp_path, "local") as launched:
        everything = launched.all()
        assert any("raylet" in words(process) for process in everything)

        first = launched.ready("rollout-0")[0]
        os.kill(first[0], signal.SIGKILL)
        until(lambda: len(launched.ready("rollout-0")) == 2, launched)
        assert not any(psutil.pid_exists(pid) for pid in first)

        starts = {name: launched.ready(name) for name in NAMES}
        next(process for process in launched.all() if "ray::NodeKeeper" in words(process)).kill()
        until(lambda: {name: launched.ready(name) for name in NAMES} != starts, launched)
        again = next(name for name in NAMES if launched.ready(name) != starts[name])
        assert not any(psutil.pid_exists(pid) for pid in starts[again][-1])

        everything = list({*everything, *launched.all()})
        os.killpg(launched.front.pid, signal.SIGINT)
        assert launched.front.wait(120) == 130, launched.terminal.read_text()
    for name in NAMES:
        assert launched.log(name).count("drained") == 1
    assert re.search(r"^ready \d+ \d+ None", launched.log("learner"), re.MULTILINE), (
        "Ray's OMP_NUM_THREADS came through"
    )
    assert not psutil.wait_procs(everything, timeout=120)[1]


@pytest.mark.long
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launching(tmp_path, "local") as launched:
        everything = launched.all()
        launched.front.kill()
        launched.front.wait()
        assert not psutil.wait_procs(everything, timeout=120)[1]
