"""`python -m tests.system.chaos_learner RUN`: the learner of the chaos test. Its loop and `LearnerClient` are the real
ones.

It trains a chain of digests: the policy after a version is a hash of the policy before and of every byte of the
batch. So a batch that is lost, repeated or changed anywhere makes a different policy. Each batch is written to the
journal, with fsync, before it counts; a checkpoint is an atomically written file. Killed at any moment by `chaos.py`.
"""

import __future__

import ast
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from buffer.curve import client_keys_for
from buffer.wire.client import LearnerClient
from buffer.wire.protocol import EvaluationResult, Part
from configs.inner_command import inner_words
from configs.resume import fingerprint
from configs.schema import Config
from tests.harness.toy import ROOT
from tests.system.chaos_run import Run

KEEP = 2


def real_loop() -> Callable[..., None]:
    """`learner.loop.run` itself, without the imports beside it: they are there for its annotations, and bring torch and
    transformers, 5 s at each of the many starts."""
    file = ROOT / "learner" / "loop.py"
    body = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    found: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(body, []), str(file), "exec", flags, dont_inherit=True), found)
    run: Callable[..., None] = found["run"]
    return run


def digest_of(samples: Iterable[tuple[int, int, bytes]]) -> str:
    """The digest of (item, index, packed sample), in any order."""
    whole = hashlib.sha256()
    for item, index, data in sorted(samples):
        whole.update(f"{item} {index} {len(data)} ".encode() + data)
    return whole.hexdigest()


def following(policy: str, digest: str) -> str:
    """The policy after training `policy` on a batch of this digest."""
    return hashlib.sha256(f"{policy}{digest}".encode()).hexdigest()


@dataclass
class Policy:
    """A stand-in for the weights."""

    state: str = ""


@dataclass(frozen=True)
class Journal:
    """Stands for `learner.step.Algorithm`: trains the policy, and appends what on."""

    path: Path

    def warm_up(self, policy: Policy) -> None:
        pass

    def step(self, policy: Policy, part: Part) -> dict[str, float]:
        self.train(policy, part.version, placed(part))
        return {}

    def train(self, policy: Policy, version: int, samples: Sequence[tuple[int, int, bytes]]) -> None:
        """On all samples of batch `version`, once no file `hold` is there; until then `held` is."""
        while (self.path.parent / "hold").exists():
            (self.path.parent / "held").touch()
            time.sleep(0.05)
        digest = digest_of(samples)
        policy.state = following(policy.state, digest)
        items = sorted({item for item, _, _ in samples})
        line = json.dumps({"version": version, "items": items, "digest": digest, "policy": policy.state})
        with self.path.open("a+b") as file:
            torn = file.tell() and not _ends_line(file.fileno(), file.tell())
            file.write(b"\n" * bool(torn) + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def placed(part: Part) -> list[tuple[int, int, bytes]]:
    """The samples of a part: (item, index, packed sample)."""
    item, positions = part.rows.item.numpy().tolist(), part.positions.numpy().tolist()
    return [(item[at], at - item.index(item[at]), data) for at, data in zip(positions, part.samples, strict=True)]


def _ends_line(file: int, size: int) -> bool:
    return os.pread(file, 1, size - 1) == b"\n"


@dataclass(frozen=True)
class Checkpoints:
    """Stands for `learner.checkpoint.Checkpoints`: one small file each."""

    folder: Path
    every: int

    def versions(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.json"))

    def restore(self, policy: Policy) -> int:
        if not (versions := self.versions()):
            return 0
        policy.state = json.loads((self.folder / f"{versions[-1]}.json").read_text())
        return versions[-1]

    def save(self, policy: Policy, version: int, reward: float | None = None) -> int:
        if version % self.every == 0:
            self.finish(policy, version)
        return (self.versions() or [0])[0] if len(self.versions()) == KEEP else 0

    def finish(self, policy: Policy, version: int) -> None:
        draft = self.folder / "draft"
        with draft.open("w") as file:
            file.write(json.dumps(policy.state))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.folder / f"{version}.json")
        for old in self.versions()[:-KEEP]:
            (self.folder / f"{old}.json").unlink()


class Weights:
    """Stands for `learner.weights.sender.Sender`: sends the newest version to whoever comes, from its own address."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.wire = self.context.socket(zmq.XPUB)
        self.wire.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.address = f"tcp://127.0.0.1:{self.wire.bind_to_random_port('tcp://127.0.0.1')}"
        self.news = self.context.socket(zmq.PUSH)
        self.news.bind("inproc://news")
        threading.Thread(target=self._serve, daemon=True).start()

    def publish(self, policy: Policy, version: int) -> None:
        self.news.send_string(str(version))

    def stats(self) -> dict[str, float]:
        return {}

    def _serve(self) -> None:
        news = self.context.socket(zmq.PULL)
        news.connect("inproc://news")
        poller, latest = zmq.Poller(), b""
        for socket in (news, self.wire):
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                heard = socket.recv()
                latest = heard if socket is news else latest
            if latest:  # news for all, or a newcomer for whom the latest is
                self.wire.send(latest)


class Metrics:
    """Stands for `learner.record.metrics.Metrics`: the journal says it all."""

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def log(self, version: int, stats: Mapping[str, float]) -> None:
        pass

    def evaluations(self, version: int) -> list[int]:
        return []

    def log_evaluations(self, version: int, results: Sequence[EvaluationResult]) -> None:
        assert not results


class Unstoppable:
    """Stands for `learner.drain.Stopping`: no signal ends the run but one that ends the process."""

    def agreed(self) -> bool:
        return False


def main(run: Run) -> None:
    """Train until the problems or the versions are used up."""
    config, weights = run.config(), Weights()
    checkpoints = Checkpoints(run.checkpoints, config.learner.checkpoint_every)
    with connected(config, 0, 1, weights.address) as batches:
        parts = Policy(), Journal(run.journal), batches, Unstoppable(), weights, checkpoints, Metrics()
        real_loop()(*parts, config.run.versions)


def connected(config: Config, rank: int, world: int, serves: str | None) -> LearnerClient:
    """Connection of a rank to the buffer; `serves`: where the servers get its policies."""
    address, name = config.buffer.address, f"learner-{rank}"
    keys = client_keys_for(address, config.run.path, "learner")
    return LearnerClient(address, name, fingerprint(config), rank, world, serves, keys=keys)


if __name__ == "__main__":
    inner_words("RUN")
    main(Run(Path(sys.argv[1])))
