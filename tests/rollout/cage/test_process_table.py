"""Processes that are stopped to be counted: none is born meanwhile, those of others go on, and all go on afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollout.cage.process_table import below, children_of_all, kill_below, state_and_parent, stopped

FORKS = """
import os, time
print("ready", flush=True)
while True:
    if (child := os.fork()) == 0:
        time.sleep(0.05)
        os._exit(0)
    os.waitpid(child, 0)
"""
SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


@contextmanager
def running(code: str) -> Iterator[int]:
    """A process below this one, once it runs; nothing is left below it at the end."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            kill_below(process.pid, children_of_all())


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


TREE = f"""
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-c", code], stdout=-1) for code in ({FORKS!r}, {SLEEPS!r})]
for child in children:
    child.stdout.readline()
print("ready", flush=True)
children[0].wait()
"""


def sleeper_of(root: int) -> int:
    """The process of TREE that sleeps. The other one has no children either, between two forks."""
    return next(pid for pid in children_of_all()[root] if b"sleep(600)" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_what_is_below_a_process_stands_still_and_nothing_else() -> None:
    with running(TREE) as root, running(SLEEPS) as other:
        sleeper = sleeper_of(root)
        forker = next(pid for pid in children_of_all()[root] if pid != sleeper)
        with stopped(root) as found:
            assert {forker, sleeper} <= {*found}
            until(lambda: all(state_and_parent(pid)[0] in ("T", "Z", "") for pid in found))
            assert {forker, sleeper} <= {*below(root, children_of_all())} <= {*found}, "none is born"
            assert state_and_parent(root)[0] != "T" and state_and_parent(other)[0] != "T"
        assert all(state_and_parent(pid)[0] != "T" for pid in (forker, sleeper))
        before = {*children_of_all().get(forker, [])}
        until(lambda: {*children_of_all().get(forker, [])} - before)


def test_what_was_stopped_before_stays_so() -> None:
    with running(TREE) as root:
        mine = sleeper_of(root)
        os.kill(mine, signal.SIGSTOP)
        until(lambda: state_and_parent(mine)[0] == "T")
        with stopped(root):
            pass
        assert state_and_parent(mine)[0] == "T"


def test_a_process_that_may_not_be_signalled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    with running(TREE) as root:
        with monkeypatch.context() as patched:
            patched.setattr(signal, "pidfd_send_signal", refused)
            patched.setattr(os, "kill", refused)
            with stopped(root) as found:
                assert found
            kill_below(root, children_of_all())
        assert state_and_parent(root)[0]


def test_a_process_that_has_got_the_number_of_one_that_ended_is_not_killed() -> None:
    """The table is read for milliseconds. In a container numbers come back after 32,768 processes."""
    with running(SLEEPS) as mine, running(TREE) as other:
        stranger = sleeper_of(other)
        kill_below(mine, {mine: [stranger]})
        until(lambda: state_and_parent(mine)[0] == "Z")
        time.sleep(0.1)
        assert state_and_parent(stranger)[0] not in "Z"
