"""Rollout servers as processes that can be killed, on CPUs or GPUs, and the learner's sender they serve.

`python -m tests.harness.lives` is the nursery: it imports everything, reads `ADDRESS NAME MODE DEVICE STAGING` lines
and forks a server (`wire.serve`) for each, so that a life begins in milliseconds. What a server says it hands on under
the server's name. `Field` is the tests' side: which devices there are, what waits how long.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from learner.ranks import PARENT, die_with_parent
from learner.weights.sender.publish import Sender
from tests.harness.weights_server import HEARTBEAT_S, TIMES, VersionedPolicy, config, serve, specs

BORN_S = 60.0
"""The longest from a birth to a life's first word: a GPU is to be set up."""


class Nursery:
    """The nursery's process, and what its children say. `born` asks for one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.lives"],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # who counts GPUs the usual way may not fork
            stdin=-1,
            stdout=-1,
            text=True,
        )
        self._said: dict[str, queue.Queue[str]] = {}
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def born(self, *words: str) -> "Life":
        """`words`: ADDRESS NAME MODE DEVICE STAGING."""
        assert self._process.stdin
        said = self._said[words[1]] = queue.Queue[str]()  # before anything can be said
        print(*words, file=self._process.stdin, flush=True)
        return Life(int(said.get(timeout=BORN_S)), said)

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            name, _, text = line.strip().partition(" ")
            self._said[name].put(text)

    def close(self) -> None:
        """No more births; who still lives dies too."""
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        self._listening.join()
        self._process.stdin.close()
        self._process.stdout.close()


class Life:
    """A server."""

    def __init__(self, process: int, said: "queue.Queue[str]") -> None:
        self.process, self._said = process, said

    def says(self, text: str, within_s: float) -> None:
        """Its next word. If none comes, where all threads here and there are goes to stderr."""
        try:
            assert self._said.get(timeout=within_s) == text
        except queue.Empty:
            faulthandler.dump_traceback(2, all_threads=True)
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGUSR1)
            time.sleep(1.0)  # it writes
            raise

    def kill(self) -> None:
        """With SIGKILL."""
        os.kill(self.process, signal.SIGKILL)


class Field:
    """A learner on `device`, and a server on each of `servers`."""

    def __init__(self, nursery: Nursery, device: str, servers: list[str], timeout_s: float) -> None:
        self._nursery, self.device, self.servers, self.timeout_s = nursery, torch.device(device), servers, timeout_s
        self.times = TIMES[self.device.type]
        self.specs = specs(self.times)
        self._lives: list[Life] = []
        self._numbers = iter(range(10**6))

    @contextmanager
    def sender(self, **keys: Any) -> Iterator[Sender]:
        """The learner's end; whoever lives at the end of the test is killed."""
        folder = keys.pop("folder", None)
        given = config(bucket_mib=self.times, timeout_s=self.timeout_s, **keys)
        self._sender = Sender(self.specs, given, 0, self.device, heartbeat_s=HEARTBEAT_S, folder=folder)
        try:
            yield self._sender
        finally:
            self._sender.close()
            for life in self._lives:
                life.kill()

    def born(self, place: int, mode: str = "none", staging: str = "auto") -> Life:
        """A server on device number `place`, a member when this returns."""
        name = f"rollout-{next(self._numbers)}-{time.monotonic_ns()}"
        life = self._nursery.born(self._sender.address, name, mode, self.servers[place], staging)
        self._lives.append(life)
        self.until(lambda: name in {member.name for member in self._sender._distributor.members}, BORN_S)
        return life

    def everywhere(self, mode: str = "none") -> list[Life]:
        """One on each device, the first in `mode`."""
        return [self.born(place, "none" if place else mode) for place in range(len(self.servers))]

    def publish(self, version: int) -> None:
        """As the learner does after a step, which must not wait for servers."""
        started = time.monotonic()
        self._sender.publish(VersionedPolicy(version, self.specs), version)
        assert time.monotonic() - started < 3

    def kill(self, life: Life) -> None:
        """And wait until the learner has noticed."""
        life.kill()
        self._lives.remove(life)
        before = len(list(self._sender._distributor.members))
        self.until(lambda: len(list(self._sender._distributor.members)) < before, self.timeout_s + 5)

    def until(self, true: Any, within_s: float) -> None:
        """Wait for the sender's thread."""
        deadline = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline, "the learner does not notice"
            time.sleep(0.02)


def main() -> None:
    torch.set_num_threads(1)
    os.environ[PARENT] = str(os.getpid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need no burial
    for line in sys.stdin:
        words = line.split()
        if os.fork() == 0:
            live(words)


def live(words: list[str]) -> None:
    """A server's life, in a process of its own. What it prints goes out under its name."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    name, out = words[1], os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)

    def hand_on() -> None:
        with os.fdopen(read) as said:
            for text in said:
                os.write(out, f"{name} {text}".encode())

    threading.Thread(target=hand_on, daemon=True).start()
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
