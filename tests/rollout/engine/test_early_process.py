"""The process that imports before its task is known: what it receives and how it ends. Small modules stand for vLLM."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pickle import PicklingError

import psutil
import pytest

from configs.entrypoint import PARENT
from configs.load import ConfigError
from rollout.engine.door.leant_on import LOGGER
from rollout.engine.early_process import EarlyProcess, expects_cpu
from rollout.engine.start_failure import final_failures
from rollout.errors import EngineDead

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 120


def tell(pipe: Connection, code: int) -> None:
    """Stands for vLLM's engine."""
    of_parent = multiprocessing.parent_process()
    assert of_parent is not None
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    quiet = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    pipe.send((os.getpid(), of_parent.pid, dict(os.environ), "json.tool" in sys.modules, blocked, quiet))
    sys.exit(code)


def fail() -> None:
    """Fail as vLLM's engine process does for a model that it cannot serve."""
    try:
        raise NotImplementedError("gated experts only")
    except NotImplementedError:
        logging.getLogger(f"{LOGGER}.v1.engine.core").exception("EngineCore failed to start.")


def last() -> None:
    wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]


@pytest.fixture
def early() -> Iterator[EarlyProcess]:
    with EarlyProcess(True, "tell", ["json.tool"]) as process:
        yield process


def test_the_engine_process_is_the_one_that_was_started_early(early: EarlyProcess, monkeypatch) -> None:
    """It has imported, and then has the environment, pipes, name and signals of a process that starts now."""
    monkeypatch.setenv("HEADRACE_LATE", "set after the start")
    monkeypatch.delenv("PATH")
    ours, theirs = SPAWN.Pipe()
    with early.given_to_vllm(True):
        other = SPAWN.Process(target=len, args=((),))  # anything else is spawned
        process = SPAWN.Process(target=tell, args=(theirs, 7), name="EngineCore")
        other.start()
        process.start()
    theirs.close()
    assert ours.poll(WAIT_S)
    pid, of_parent, environ, imported, blocked, quiet = ours.recv()
    assert (pid, process.pid, of_parent, imported) == (early.child.pid, pid, os.getpid(), True)
    assert other.pid != pid
    assert environ["HEADRACE_LATE"] == "set after the start" and "PATH" not in environ
    assert environ["OMP_NUM_THREADS"] and environ[PARENT] == str(pid)
    assert signal.SIGTERM in blocked and signal.SIGINT not in blocked and quiet
    assert wait([process.sentinel], WAIT_S) == [process.sentinel]
    process.join(WAIT_S)
    other.join(WAIT_S)
    assert (process.exitcode, other.exitcode) == (7, 0)


def test_a_second_process_is_spawned_as_ever(early: EarlyProcess) -> None:
    ours, theirs = SPAWN.Pipe()
    with early.given_to_vllm(True):
        processes = [SPAWN.Process(target=tell, args=(theirs, 0)) for _ in range(2)]
        for process in processes:
            process.start()
    for process in processes:
        process.join(WAIT_S)
    assert {ours.recv()[0] for _ in range(2)} == {process.pid for process in processes}
    assert processes[0].pid == early.child.pid != processes[1].pid


def test_it_ends_if_it_is_not_needed_or_was_started_for_another_device(early: EarlyProcess) -> None:
    with early.given_to_vllm(False):
        assert early.child.returncode == -signal.SIGKILL


def test_it_ends_if_vllm_starts_no_process(early: EarlyProcess) -> None:
    with early.given_to_vllm(True):
        assert early.child.poll() is None
    assert early.child.returncode == -signal.SIGKILL


def test_it_ends_if_its_task_cannot_be_sent(early: EarlyProcess) -> None:
    with early.given_to_vllm(True), pytest.raises((AttributeError, PicklingError), match="lambda"):
        SPAWN.Process(target=tell, args=(lambda: None, 0)).start()
    assert early.child.returncode == -signal.SIGKILL


def test_it_leaves_an_interrupt_to_the_server(early: EarlyProcess) -> None:
    early.child.send_signal(signal.SIGINT)
    ours, theirs = SPAWN.Pipe()
    with early.given_to_vllm(True):
        process = SPAWN.Process(target=tell, args=(theirs, 0))
        process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0 and ours.recv()[0] == early.child.pid


def test_its_death_before_its_task_is_one_line(early: EarlyProcess) -> None:
    early.child.kill()
    early.child.wait()
    line = r"vLLM's engine process ended with exit code -9 before it had work; its last log lines are above"
    with early.given_to_vllm(True), pytest.raises(EngineDead, match=line):
        SPAWN.Process(target=tell, args=(1, 0)).start()


def test_the_final_reason_of_its_failure_arrives() -> None:
    with (
        EarlyProcess(True, "fail", ["rollout.engine.start_failure"]) as early,
        early.given_to_vllm(True),
        pytest.raises(ConfigError, match=r"NotImplementedError: gated experts only"),
        final_failures(),
    ):
        process = SPAWN.Process(target=fail)
        process.start()
        process.join(WAIT_S)
        raise RuntimeError("Engine core initialization failed. See root cause above.")


def test_what_cannot_be_imported_early_is_left_to_vllm(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = SPAWN.Pipe()
    with EarlyProcess(True, "tell", ["no_such_module", "json.tool"]) as early, early.given_to_vllm(True):
        process = SPAWN.Process(target=tell, args=(theirs, 0))
        process.start()
        process.join(WAIT_S)
    assert ours.recv()[0] == early.child.pid
    line = "no_such_module cannot be imported early: ModuleNotFoundError: No module named 'no_such_module'\n"
    assert line in capfd.readouterr().err


@pytest.mark.parametrize(
    ("device", "variables", "cpu"),
    [("cpu", {}, True), ("cuda", {}, False), ("auto", {"CUDA_VISIBLE_DEVICES": ""}, True)],
)
def test_the_device_is_expected_without_torch(device: str, variables: dict[str, str], cpu: bool) -> None:
    assert expects_cpu(device, variables) is cpu


SERVER = """
import multiprocessing, os, time
from configs.entrypoint import tie_children
from rollout.engine.early_process import EarlyProcess
from tests.rollout.engine.test_early_process import last

if __name__ == "__main__":
    tie_children()
    early = EarlyProcess(True, "last", ["json"])
    if {handed}:
        with early.given_to_vllm(True):
            multiprocessing.get_context("spawn").Process(target=last).start()
    print(early.child.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("handed", [False, True])
def test_it_dies_with_a_killed_server(tmp_path: Path, handed: bool) -> None:
    (tmp_path / "server.py").write_text(SERVER.format(handed=handed))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, str(tmp_path / "server.py")], stdout=subprocess.PIPE, env=env) as server:
        assert server.stdout is not None
        early = psutil.Process(int(server.stdout.readline()))
        server.kill()
        server.wait()
        assert not psutil.wait_procs([early], timeout=WAIT_S)[1]
