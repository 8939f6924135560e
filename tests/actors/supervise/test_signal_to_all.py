"""SIGTERM to all processes of a job at once, as Slurm and systemd send it: the run drains as after one SIGTERM to the
launcher. Guard, keepers, Ray and signal handlers are real; the processes' work is not."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

LAUNCHER = """
import os, sys
from pathlib import Path
from actors.__main__ import guarded
from actors.watch.display import Display
from actors.process import Process, Restarts
from actors.supervise.launch import keep
from buffer.keys import make_keys
from configs.schema import Config

def main():
    run = Path(sys.argv[1])
    make_keys(run / "keys")
    config = Config(run={"folder": run.parent, "name": run.name}, model={"path": "m"}, data={"train": "d"},
                    reward={"function": "r"}, buffer={"address": "tcp://127.0.0.1:9"},
                    learner={"device": "cpu"}, rollout={"device": "cpu"}, cluster={"address": sys.argv[2] or None})
    roles = {"buffer": "buffer", "learner": "learner", "rollout-0": "rollout"}
    processes = [
        Process(name, role, (sys.executable, str(run.parent / "worker.py"), role), run / "logs" / f"{name}.log",
                os.getcwd(), restarts=Restarts(first_s=0.1, most_s=0.2))
        for name, role in roles.items()
    ]
    return keep(processes, Display(config))

if __name__ == "__main__":
    sys.exit(main() if sys.argv[3:] else guarded([sys.executable, __file__, *sys.argv[1:], "inner"]))
"""
WORKER = """
import sys, time
from configs.entrypoint import StopSignals

role, stopped = sys.argv[1], []
with StopSignals(stopped.append, last=role == "buffer"):
    print("ready", flush=True)
    while not stopped:
        time.sleep(0.01)
    if role == "learner":
        time.sleep(0.7)  # for the rest of its version
        print("checkpoint", flush=True)
print("drained", flush=True)
"""
NAMES = ("buffer", "learner", "rollout-0")


def processes_of(mark: str) -> list[psutil.Process]:
    """List all processes with `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HEADRACE_TEST") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("address", ["", pytest.param("local", marks=pytest.mark.long)])
def test_all_processes_get_sigterm_and_the_run_drains_in_order(address: str, tmp_path: Path) -> None:
    run, mark = tmp_path / "run", uuid.uuid4().hex
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "worker.py").write_text(WORKER)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HEADRACE_TEST": mark, "TMPDIR": "/tmp"}

    def log(name: str) -> str:
        path = run / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    with (tmp_path / "terminal").open("wb") as sink:
        argv = [sys.executable, str(tmp_path / "launcher.py"), str(run), address]
        front = subprocess.Popen(argv, stdout=sink, stderr=sink, env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 150
        while not all("ready" in log(name) for name in NAMES):
            assert time.monotonic() < deadline and front.poll() is None, (tmp_path / "terminal").read_text()
            time.sleep(0.05)
        everything = processes_of(mark)
        assert any("raylet" in process.name() for process in everything) == (address == "local")
        for process in everything:
            for _ in range(1 if process.pid == front.pid else 2):  # a second one would force the front process
                process.terminate()
        assert front.wait(150) == 128 + signal.SIGTERM, (tmp_path / "terminal").read_text()
    finally:
        front.kill()
        left = psutil.wait_procs(processes_of(mark), timeout=150)[1]
    terminal = (tmp_path / "terminal").read_text()
    assert not left
    assert log("learner").splitlines()[-3:-1] == ["checkpoint", "drained"], terminal
    assert all(log(name).count("started") == 1 and "ended: exit code 0" in log(name) for name in NAMES), terminal
    assert re.search(r"\[learner\] drained.*\[buffer\] drained", terminal, re.DOTALL), terminal
