"""Rollout servers as processes that tests can kill, on CPUs or GPUs, and the learner's sender that serves them.

A `ServerProcess` is forked with everything imported and runs `weights_server.serve`, so it starts in milliseconds.
`Cluster` is the tests' side: it has the devices and the limit of each wait.
"""

import asyncio
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from configs.entrypoint import PARENT, die_with_parent
from learner.weights.sender.publish import Sender
from tests.harness.keys import server_keys
from tests.harness.weights_server import HEARTBEAT_S, SCALE, VersionedPolicy, config, serve, specs
from tests.harness.world import FORKS

START_S = 180.0
"""Longest wait from the fork of a server to its first line: it may have to initialise a GPU."""


class ServerProcess:
    """One rollout server, forked from the process that has imported everything; `words`: ADDRESS NAME MODE DEVICE
    STAGING."""

    def __init__(self, *words: str) -> None:
        ours, theirs = FORKS.Pipe(duplex=False)
        self._process: Any = FORKS.Process(target=run_server, args=([*words], theirs))
        self._process.start()
        theirs.close()
        self._lines: queue.Queue[str] = queue.Queue()
        self._listening = threading.Thread(target=self._listen, args=(ours,), daemon=True)
        self._listening.start()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def _listen(self, pipe: Any) -> None:
        with os.fdopen(os.dup(pipe.fileno())) as lines, pipe:
            for line in lines:
                self._lines.put(line.strip())

    def next_line(self, within_s: float) -> str:
        """Return the next printed line. Raises queue.Empty after `within_s`."""
        return self._lines.get(timeout=within_s)

    def expect(self, text: str, within_s: float) -> None:
        """Assert that its next line is `text`. If none comes, all threads of both processes are dumped to stderr."""
        try:
            assert self.next_line(within_s) == text
        except queue.Empty:
            faulthandler.dump_traceback(2, all_threads=True)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            time.sleep(1.0)  # until the other process has written
            raise

    def silent(self) -> bool:
        """Whether it has printed nothing that was not expected."""
        return self._lines.empty()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """With SIGKILL, if it still lives."""
        self._process.kill()
        self._process.join()
        self._listening.join()


class Cluster:
    """A learner on `device`, whose weights named `frozen` are never trained, and a server on each of the devices
    `servers`."""

    def __init__(self, device: str, servers: list[str], timeout_s: float, frozen: Sequence[str] = ()) -> None:
        self.device, self.servers, self.frozen = torch.device(device), servers, frozen
        self.timeout_s, self.scale = timeout_s, SCALE[self.device.type]
        self.specs = specs(self.scale)
        self._running: list[ServerProcess] = []
        self._numbers = iter(range(10**6))

    @contextmanager
    def sender(self, **keys: Any) -> Iterator[Sender]:
        """The learner's end. Servers that still run at the end of the block are killed."""
        folder = keys.pop("folder", None)
        given = config(bucket_mib=self.scale, timeout_s=self.timeout_s, **keys)
        self._sender = Sender(
            *(self.specs, given, 0, self.device),
            heartbeat_s=HEARTBEAT_S,
            folder=folder,
            frozen=self.frozen,
            keys=server_keys("learner"),
        )
        try:
            yield self._sender
        finally:
            self._sender.close()
            for server in self._running:
                server.kill()

    def start(self, device: int, mode: str = "none", staging: str = "auto") -> ServerProcess:
        """Start a server on device number `device` and wait until it is a member."""
        name = f"rollout-{next(self._numbers)}-{time.monotonic_ns()}"
        server = ServerProcess(self._sender.address, name, mode, self.servers[device], staging)
        self._running.append(server)
        self.until(lambda: name in {member.name for member in self._sender._distributor.members}, START_S)
        return server

    def start_all(self, mode: str = "none") -> list[ServerProcess]:
        """One on each device, the first in `mode`."""
        return [self.start(device, "none" if device else mode) for device in range(len(self.servers))]

    def publish(self, version: int) -> None:
        """As the learner does after a step, which must not wait for servers."""
        started = time.monotonic()
        self._sender.publish(VersionedPolicy(version, self.specs, frozen=self.frozen), version)
        assert time.monotonic() - started < self.timeout_s

    def kill(self, server: ServerProcess) -> None:
        """Kill `server` and wait until the learner has noticed."""
        before = len(list(self._sender._distributor.members))
        server.kill()
        self._running.remove(server)
        self.until(lambda: len(list(self._sender._distributor.members)) < before, self.timeout_s + 5)

    def until(self, true: Any, within_s: float) -> None:
        """Wait for the sender's thread."""
        end = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < end, "the learner does not notice"
            time.sleep(0.02)


def run_server(words: list[str], pipe: Any) -> None:
    """The forked process: serve, and print into `pipe`."""
    os.environ[PARENT] = str(os.getppid())
    die_with_parent()
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.dup2(pipe.fileno(), 1)
    pipe.close()
    code = 1
    try:
        if words[3].startswith("cuda"):
            torch.cuda.set_device(words[3])
        asyncio.run(serve(*words))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)
