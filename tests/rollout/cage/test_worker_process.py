"""The server's end of a worker that has ended."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import uvloop

from rollout.cage import CagedFunction, worker_process
from rollout.cage.frames import encode
from rollout.cage.worker_process import WorkerEnd, WorkerProcess

ANSWER = ["ended", 1, "value", "x" * 150_000, "", False, 0]
END = ["died", "ended its process (exit code 3)", 1, 0, "printed"]


class Ended:
    """Stands for `Popen`; its ends of the sockets are the test's."""

    def __init__(self, line: Sequence[str], pass_fds: Sequence[int], **options: object) -> None:
        self.ends = [socket.socket(fileno=os.dup(fd)) for fd in pass_fds]

    def kill(self) -> None:
        pass

    def wait(self) -> int:
        return 0


async def last_words() -> tuple[Any, str, WorkerEnd]:
    """Worker and warden end before the server reads what they sent, and it writes to both first."""
    worker = WorkerProcess(CagedFunction("function", "module:load", [], 60.0))
    await worker.start()
    receiving: asyncio.Future[Any] = asyncio.ensure_future(worker.receive())
    await asyncio.sleep(0)
    process: Any = worker._process
    for end, message in zip(process.ends, (ANSWER, END), strict=True):
        end.sendall(encode(message))
        end.close()
    worker.send(["call", 2, []])
    printed = await worker.last_output()
    return await receiving, printed, await worker.ended()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_last_words_of_a_worker_are_read_although_a_write_to_it_fails_first(
    run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process.subprocess, "Popen", Ended)
    assert run(last_words()) == (ANSWER, "printed", WorkerEnd(*END))
