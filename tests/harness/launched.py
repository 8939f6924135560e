"""The launcher as it is: a guard, keepers, with or without Ray, and processes with fake commands."""

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

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
                    learner={"device": "cpu"}, rollout={"device": "cpu"}, cluster={"address": sys.argv[2] or None})
    quick = Restarts(first_s=0.1, most_s=0.2)
    roles = {"buffer": "buffer", "learner": "learner", "rollout-0": "rollout"}
    processes = [
        Process(name, role, (sys.executable, "-c", CODE), run / "logs" / f"{name}.log", os.getcwd(), restarts=quick)
        for name, role in roles.items()
    ]
    code = keep(processes, Display(config))
    print("imported Ray:", "ray" in sys.modules, flush=True)
    return code

if __name__ == "__main__":
    sys.exit(main() if sys.argv[3:] else guarded([sys.executable, __file__, *sys.argv[1:], "inner"]))
"""
NAMES = ("buffer", "learner", "rollout-0")


class Launched:
    """A launcher in a process group of its own, as a shell starts it; `address`: `cluster.address`."""

    def __init__(self, folder: Path, address: str) -> None:
        self.run, self.mark = folder / "run", uuid.uuid4().hex
        (folder / "script.py").write_text(SCRIPT)
        env = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "RAY_ADDRESS")}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HEADRACE_TEST": self.mark, "TMPDIR": "/tmp"}
        self.terminal = folder / "terminal"
        argv = [sys.executable, str(folder / "script.py"), str(self.run), address]
        with self.terminal.open("wb") as sink:
            self.front = subprocess.Popen(argv, stdout=sink, stderr=sink, env=env, process_group=0)

    def log(self, name: str) -> str:
        path = self.run / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def ready(self, name: str) -> list[tuple[int, int]]:
        """Pid and child's pid of each start of a process, as it printed them."""
        return [(int(pid), int(far)) for pid, far in re.findall(r"^ready (\d+) (\d+)", self.log(name), re.MULTILINE)]

    def all(self) -> list[psutil.Process]:
        """Every process that descends from the launcher or its guard, also Ray's."""
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


@contextmanager
def launching(folder: Path, address: str = "") -> Iterator[Launched]:
    """A launcher whose processes are all ready; at the end it is killed, and nothing of it is left."""
    started = Launched(folder, address)
    try:
        until(lambda: all(started.ready(name) for name in NAMES), started)
        yield started
    finally:
        started.front.kill()
        started.front.wait()
        psutil.wait_procs(started.all(), timeout=120)


def until(happened: Callable[[], object], launched: Launched, limit_s: float = 150.0) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline and launched.front.poll() is None, launched.terminal.read_text()
        time.sleep(0.05)
