"""Signals of a process below another one: the upper process forwards signals, and a scheduler sends them to both."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from configs.entrypoint import ABOVE, FORCING, NOTICE, StopSignals, blocked
from configs.variables import TORCHRUN


def received(given: dict[str, str], *numbers: int, last: bool = False) -> list[str]:
    """Return what a process with the variables `given` does at each signal."""
    did: list[str] = []
    with StopSignals(lambda n: did.append("drain"), lambda n: did.append("force"), last=last, given=given):
        for number in numbers:
            signal.raise_signal(number)
    return did


@pytest.mark.parametrize("above", [ABOVE, TORCHRUN])
def test_a_signal_that_comes_twice_is_one(above: str) -> None:
    """The duplicate, sent to all processes of a job, once ended a rank before its checkpoint."""
    assert received({above: "1"}, signal.SIGTERM, signal.SIGTERM, signal.SIGINT) == ["drain"]
    assert received({above: "1"}, signal.SIGTERM, FORCING, FORCING) == ["drain", "force", "force"]
    assert received({above: "1"}, FORCING) == ["force"]


def test_without_a_launcher_the_second_signal_forces() -> None:
    assert received({}, signal.SIGTERM, signal.SIGTERM) == ["drain", "force"]


def test_the_process_that_ends_last_waits_for_its_keeper(tmp_path: Path) -> None:
    """The buffer is needed until the learner has written its last version: the keeper leaves a notice, then signals."""
    notice = tmp_path / "buffer.notice"
    kept = {ABOVE: "1", NOTICE: str(notice)}
    assert received(kept, signal.SIGTERM, signal.SIGTERM, last=True) == []
    assert received(kept, signal.SIGTERM, FORCING, last=True) == ["force"]
    notice.touch()
    assert received(kept, signal.SIGTERM, last=True) == ["drain"]
    assert received({}, signal.SIGTERM, last=True) == ["drain"]  # started by hand


def test_children_block_the_signals_for_their_whole_life() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with blocked(signal.SIGTERM):
        child = os.posix_spawn("/bin/sleep", ["sleep", "60"], dict(os.environ))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    os.kill(child, signal.SIGTERM)
    mask = next(line.split()[1] for line in Path(f"/proc/{child}/status").read_text().splitlines() if "SigBlk" in line)
    assert int(mask, 16) & 1 << (signal.SIGTERM - 1)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


SPAWNED = """
import multiprocessing, os, signal, time
from configs.entrypoint import blocked
if __name__ == "__main__":
    with blocked(signal.SIGTERM):
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        child.start()
    child.terminate()
    child.join(0.3)
    print(child.exitcode)
    child.kill()
"""


def test_the_first_spawned_process_blocks_the_signals(tmp_path: Path) -> None:
    """Python's resource tracker starts with the first process and unblocks SIGTERM, so SIGTERM ended vLLM's process."""
    (tmp_path / "spawned.py").write_text(SPAWNED)
    root = Path(__file__).parents[2]
    line, env = [sys.executable, str(tmp_path / "spawned.py")], os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n", done.stderr
