"""The launcher as it is: a guard, Ray, keepers, and processes with fake commands. Nothing may be left of any of it."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import os, sys
from pathlib import Path
from actors.__main__ import guarded
from actors.watch.display import Display
from actors.process import Process, Restarts
from actors.supervise.launch import keep
from configs.schema import Config

CODE = '''
import os, signal, subprocess, sys
far = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", os.getpid(), far.pid, os.environ.get("OMP_NUM_THREADS"), flush=True)
signal.sigwait({signal.SIGTERM})
print("drained", flush=True)
'''

def main():
    run = Path(sys.argv[1])
    config = Config(run={"folder": run.parent, "name": run.name}, model={"path": "m"}, data={"train": "d"},
                    reward={"function": "r"}, buffer={"address": "tcp://127.0.0.1:9"},
                    learner={"device": "cpu"}, rollout={"device": "cpu"})
    quick = Restarts(first_s=0.1, most_s=0.2)
    roles = {"buffer": "buffer", "learner": "learner", "rollout-0": "rollout"}
    processes = [
        Process(name, role, (sys.executable, "-c", CODE), run / "logs" / f"{name}.log", os.getcwd(), restarts=quick)
        for name, role in roles.items()
    ]
    return keep(processes, Display(config))

if __name__ == "__main__":
    sys.exit(main() if sys.argv[2:] else guarded([sys.executable, __file__, sys.argv[1], "inner"]))
"""
NAMES = ("buffer", "learner", "rollout-0")


class Launched:
    """A launcher in a process group of its own, as a shell starts it."""

    def __init__(self, folder: Path) -> None:
        self.run, self.mark = folder / "run", uuid.uuid4().hex
        (folder / "script.py").write_text(SCRIPT)
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HEADRACE_TEST": self.mark, "TMPDIR": "/tmp"}
        self.terminal = folder / "terminal"
        argv = [sys.executable, str(folder / "script.py"), str(self.run)]
        with self.terminal.open("wb") as sink:
            self.front = subprocess.Popen(argv, stdout=sink, stderr=sink, env=env, process_group=0)

    def log(self, name: str) -> str:
        path = self.run / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def ready(self, name: str) -> list[tuple[int, int]]:
        """Pid and child's pid of each start of a process, as it printed them."""
        return [(int(pid), int(far)) for pid, far in re.findall(r"^ready (\d+) (\d+)", self.log(name), re.MULTILINE)]

    def all(self) -> list[psutil.Process]:
        """Every process that descends from the launcher or its guard, Ray's included."""
        marked = [process for process in psutil.process_iter() if self._is_marked(process)]
        return list({*marked, *(child for process in marked for child in _children(process))})

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("HEADRACE_TEST") == self.mark
        except psutil.Error:
            return False


def words(process: psutil.Process) -> str:
    """Its command line."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    started = Launched(tmp_path)
    yield started
    started.front.kill()
    started.front.wait()
    psutil.wait_procs(started.all(), timeout=120)


def until(happened: Callable[[], object], launched: Launched, limit_s: float = 150.0) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline and launched.front.poll() is None, launched.terminal.read_text()
        time.sleep(0.05)


def test_killed_processes_and_keepers_come_back_and_ctrl_c_drains(launched: Launched) -> None:
    until(lambda: all(launched.ready(name) for name in NAMES), launched)
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
    terminal = launched.terminal.read_text()
    for name in NAMES:
        assert launched.log(name).count("drained") == 1
        assert f"[{name}] ready" in terminal
    assert "force quit" in terminal
    assert re.search(r"^ready \d+ \d+ None", launched.log("learner"), re.MULTILINE), (
        "Ray's OMP_NUM_THREADS came through"
    )
    assert not psutil.wait_procs(everything, timeout=120)[1]


def test_nothing_outlives_a_launcher_that_is_killed(launched: Launched) -> None:
    until(lambda: all(launched.ready(name) for name in NAMES), launched)
    everything = launched.all()
    pids = {process.pid for process in everything}
    assert all({*launched.ready(name)[0]} <= pids for name in NAMES)
    launched.front.kill()
    launched.front.wait()
    assert not psutil.wait_procs(everything, timeout=120)[1]
