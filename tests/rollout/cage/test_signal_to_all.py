"""A scheduler sends SIGTERM to a server's workers and wardens: calls continue during the server's drain."""

import asyncio
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil

from rollout.cage import CagedFunction
from rollout.cage.cage import Cage
from tests.harness.children import children
from tests.rollout.cage.test_cage import file_with_text

LOADER = f"{__name__}:load"


def load(name: str):
    """The loader: a function of this file."""
    return globals()[name]


def sleeps(ready: str) -> str:
    """Write the process id, then sleep for a moment."""
    Path(ready).write_text(str(os.getpid()))
    time.sleep(0.5)
    return "awake"


def ends_a_child() -> int:
    """Fork a process, as users' code does, and end it."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(60)
    return child.exitcode or 0


async def test_a_call_outlives_the_signal(tmp_path: Path):
    ready = tmp_path / "ready"
    async with Cage(CagedFunction("sleeps", LOADER, ["sleeps"], timeout_s=100.0), 1) as pool:
        call = asyncio.ensure_future(pool.call(str(ready)))
        worker = psutil.Process(int(await file_with_text(ready)))
        warden = worker.parent()
        assert warden in children(recursive=True)
        for process in (worker, warden):
            process.terminate()
        assert await call == "awake"
        ready.unlink()
        assert await pool.call(str(ready)) == "awake" and int(ready.read_text()) == worker.pid


async def test_users_code_can_end_its_children_by_sigterm():
    async with Cage(CagedFunction("ends_a_child", LOADER, ["ends_a_child"], timeout_s=100.0), 1) as pool:
        assert await pool.call() == -signal.SIGTERM
