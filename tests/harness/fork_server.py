"""Rollout servers as processes that tests can kill, on CPUs or GPUs, and the learner's sender that serves them.

`python -m tests.harness.fork_server` imports everything once, reads lines `ADDRESS NAME MODE DEVICE STAGING` and forks
a server (`weights_server.serve`) for each, so that a server starts in milliseconds. It forwards what a server prints
under the server's name. `Cluster` is the tests' side: which devices there are, and how long each wait may take.
"""

import asyncio
import faulthandler
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from configs.entrypoint import PARENT, die_with_parent
from learner.weights.sender.publish import Sender
from tests.harness.weights_server import HEARTBEAT_S, SCALE, VersionedPolicy, config, serve, specs

START_S = 180.0
"""Longest wait from the fork of a server to its first line: it may have to initialise a GPU."""


class ForkServer:
    """The forking process, and what its children print. `fork` asks it for one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.fork_server"],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # counting GPUs the usual way forbids a fork
            stdin=-1,
            stdout=-1,
            text=True,
        )
        self._lines: dict[str, queue.Queue[str]] = {}
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def fork(self, *words: str) -> "ServerProcess":
        """`words`: ADDRESS NAME MODE DEVICE STAGING."""
        assert self._process.stdin
        lines = self._lines[words[1]] = queue.Queue[str]()  # before the child can print
        print(*words, file=self._process.stdin, flush=True)
        return ServerProcess(int(lines.get(timeout=START_S)), lines)

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            name, _, text = line.strip().partition(" ")
            self._lines[name].put(text)

    def close(self) -> None:
        """Kill the process; its children die with it."""
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        self._listening.join()
        self._process.stdin.close()
        self._process.stdout.close()


class ServerProcess:
    """One rollout server."""

    def __init__(self, pid: int, lines: "queue.Queue[str]") -> None:
        self.pid, self._lines = pid, lines

    def expect(self, text: str, within_s: float) -> None:
        """Assert that its next line is `text`. If none comes, all threads of both processes are dumped to stderr."""
        try:
            assert self._lines.get(timeout=within_s) == text
        except queue.Empty:
            faulthandler.dump_traceback(2, all_threads=True)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            time.sleep(1.0)  # until the other process has written
            raise

    def silent(self) -> bool:
        """Whether it has printed nothing that was not expected."""
        return self._lines.empty()

    def kill(self) -> None:
        """With SIGKILL, if it still lives."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Cluster:
    """A learner on `device`, whose weights named `frozen` are never trained, and a server on each of the devices
    `servers`."""

    def __init__(
        self, fork_server: ForkServer, device: str, servers: list[str], timeout_s: float, frozen: Sequence[str] = ()
    ) -> None:
        self._fork_server, self.device, self.servers, self.frozen = fork_server, torch.device(device), servers, frozen
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
            self.specs, given, 0, self.device, heartbeat_s=HEARTBEAT_S, folder=folder, frozen=self.frozen
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
        server = self._fork_server.fork(self._sender.address, name, mode, self.servers[device], staging)
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
        assert time.monotonic() - started < 3

    def kill(self, server: ServerProcess) -> None:
        """Kill `server` and wait until the learner has noticed."""
        server.kill()
        self._running.remove(server)
        before = len(list(self._sender._distributor.members))
        self.until(lambda: len(list(self._sender._distributor.members)) < before, self.timeout_s + 5)

    def until(self, true: Any, within_s: float) -> None:
        """Wait for the sender's thread."""
        end = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < end, "the learner does not notice"
            time.sleep(0.02)


def main() -> None:
    torch.set_num_threads(1)
    os.environ[PARENT] = str(os.getpid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:
        words = line.split()
        if os.fork() == 0:
            run_server(words)


def run_server(words: list[str]) -> None:
    """The forked process: serve, and print everything under the server's name."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    name, out = words[1], os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)

    def forward() -> None:
        with os.fdopen(read) as lines:
            for text in lines:
                os.write(out, f"{name} {text}".encode())

    threading.Thread(target=forward, daemon=True).start()
    os.write(out, f"{name} {os.getpid()}\n".encode())
    code = 1
    try:
        if words[3].startswith("cuda"):
            torch.cuda.set_device(words[3])
        asyncio.run(serve(*words))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
