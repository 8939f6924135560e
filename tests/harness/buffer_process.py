"""What tests of the samples wire share: samples and problems, a buffer in this process or as a process of its own."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from buffer.keys import Role, ServerKeys
from buffer.ledger.rules import Ledger
from buffer.store.sqlite import Store
from buffer.wire.client import Connection, RolloutClient
from buffer.wire.handlers import Handlers
from buffer.wire.limits import Limits
from buffer.wire.message import Array
from buffer.wire.requests import PendingRequests
from buffer.wire.sample import Sample
from buffer.wire.server import BufferServer
from tests.harness.keys import client_keys, give_keys, server_keys
from tests.harness.ports import free_port

PROBLEMS = [{"prompt": f"problem {row}", "answer": str(row)} for row in range(1000)]


def sample(reward: float = 1.0, tokens: int = 4, version: int = 0, mark: int = 7) -> Sample:
    """A sample of `tokens` tokens, the first half of them prompt; `mark` is its last token, to know it again."""
    given = max(1, tokens // 2)
    sampled = np.arange(tokens) >= given
    ids = np.arange(tokens, dtype=np.int32)
    ids[-1] = mark
    return Sample(
        tokens=Array.of(ids),
        sampled=Array.of(sampled.astype(np.uint8)),
        behaviour_logprobs=Array.of(np.where(sampled, -0.5, 0.0).astype(np.float32)),
        versions=Array.of(np.where(sampled, version, -1).astype(np.int32)),
        reward=reward,
        finish="stop",
        answer=f"answer {mark}",
    )


def group(item: int, version: int = 0, samples: int = 2, tokens: int = 4) -> list[Sample]:
    """A group whose item is the last token of each sample."""
    return [sample(float(index % 2), tokens + index, version, mark=item) for index in range(samples)]


def make_limits(**changes: Any) -> Limits:
    fields = dict(run="test", fingerprint="f" * 16, samples=2, max_bytes=2**30, max_message=2**20, keep="checkpoints")
    return Limits(**fields | changes)


def make_requests(
    path: Path | None = None,
    max_staleness: int = 2,
    groups: int = 2,
    store: Store | None = None,
    problems: Sequence[dict[str, Any]] = PROBLEMS,
    **changes: Any,
) -> PendingRequests:
    """Pending requests over a new or reopened store; further keywords go to Ledger or Limits."""
    names = Limits.__dataclass_fields__
    ledger_changes = {name: value for name, value in changes.items() if name not in names}
    store = store or Store(path, fsync=False)
    ledger = Ledger(len(problems), groups, max_staleness, shuffle=False, recall=store.closed, **ledger_changes)
    ledger.restore(store.load(), time.monotonic())
    limits = make_limits(**{name: value for name, value in changes.items() if name in names})
    return PendingRequests(Handlers(ledger, store, problems, limits), limits.max_message)


def samples_of(store: Store, item: int) -> list[bytes]:
    """The packed samples of a group."""
    return store.group(item)


def committed(requests: PendingRequests) -> None:
    """Write what changed."""
    if transaction := requests.handlers.changes():
        requests.handlers.store.commit(transaction)


@dataclass
class Buffer:
    """A buffer in this process."""

    address: str
    requests: PendingRequests
    serving: asyncio.Task[None]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def call(self, act: Callable[[], Any]) -> Any:
        """Run `act` in the buffer's thread, from another one; returns its result. SQLite's connections are a
        thread's own."""

        async def acted() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(acted(), self.loop).result(60)


@asynccontextmanager
async def buffer(
    requests: PendingRequests | None = None, address: str = "tcp://127.0.0.1:*", keys: ServerKeys | None = None
) -> AsyncIterator[Buffer]:
    requests = requests or make_requests()
    async with BufferServer(address, requests.max_message, keys or server_keys()) as server:
        serving = asyncio.create_task(server.serve(requests))
        try:
            yield Buffer(server.address, requests, serving)
        finally:
            if serving.done():
                serving.result()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            requests.handlers.store.close()


def client(address: str, name: str = "rollout-0", role: Role = "rollout", **changes: Any) -> Connection:
    fields: dict[str, Any] = {"fingerprint": "f" * 16, "retry_s": 0.2, "keys": client_keys(role)} | changes
    return Connection(address, name, role, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def rollout(
    address: str, name: str = "rollout-0", version: int = 0, **changes: Any
) -> AsyncIterator[RolloutClient]:
    async with client(address, name, **changes) as connection:
        yield RolloutClient(connection, lambda: version)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own; one that hangs fails after four minutes."""

    @functools.wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **keywords), 240))

    return run


@dataclass
class Process:
    """`python -m buffer` as a process of its own."""

    folder: Path
    port: int = field(default_factory=free_port)
    overrides: dict[str, Any] = field(default_factory=dict)
    running: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "test"

    def config(self) -> Path:
        """Write data and config; returns the config's path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self.folder / "train.jsonl"
        data.write_text(
            "".join(json.dumps({"problem": row["prompt"], "answer": row["answer"]}) + "\n" for row in PROBLEMS)
        )
        sections = {
            "run": {"name": "test", "folder": str(self.folder / "runs")},
            "model": {"path": "none"},
            "data": {"train": str(data), "shuffle": False},
            "reward": {"function": "math"},
            "batch": {"groups": 4, "samples": 2, "max_staleness": 2},
            "buffer": {"address": self.address, "fsync": False},
        }
        path = self.folder / "run.yaml"
        path.write_text(json.dumps(sections))  # JSON is YAML
        return path

    def arguments(self, *first: str) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self.overrides.items()]
        return [sys.executable, "-m", "buffer", *first, str(self.config()), *settings]

    def start(self) -> "Process":
        give_keys(self.run)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.running = subprocess.Popen(self.arguments(), env=environment, stderr=subprocess.PIPE, text=True)
        return self

    def kill(self, number: int = signal.SIGKILL) -> tuple[int, str]:
        """Signal it and wait for its end; returns (exit code, stderr)."""
        assert self.running
        self.running.send_signal(number)
        errors = self.running.communicate(timeout=120)[1]
        code, self.running = self.running.returncode, None
        return code, errors


@contextmanager
def process(folder: Path, **overrides: Any) -> Iterator[Process]:
    it = Process(folder, overrides=overrides).start()
    try:
        yield it
    finally:
        if it.running:
            it.kill()
