"""`python -m tests.system.scaled_learner RUN`: the chaos test's learner with its ranks on several nodes.

A gang starts it on each node, with NODE_RANK and the address of a store. Its ranks, processes of its own, run the real
loop, each with its own part of a batch. They meet in the store, where rank 0 gathers the parts, trains on all of them
and publishes the policy. The node's process ends them together, here and, by `learner.ranks.Node`, on the other node.
"""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgpack
from torch.distributed import TCPStore

from buffer.wire.protocol import Part
from configs.entrypoint import tie_children
from configs.inner_command import inner_words
from learner.ranks import Node
from tests.system.chaos_learner import (
    Checkpoints,
    Journal,
    Metrics,
    Policy,
    Unstoppable,
    Weights,
    connected,
    placed,
    real_loop,
)
from tests.system.chaos_run import Run


class SharedJournal:
    """Stands for `Algorithm` on one of `world` ranks."""

    def __init__(self, journal: Journal, store: TCPStore, rank: int, world: int) -> None:
        self.journal, self.store, self.rank, self.world = journal, store, rank, world

    def warm_up(self, policy: Policy) -> None:
        pass

    def step(self, policy: Policy, part: Part) -> dict[str, float]:
        version = part.version
        self.store.set(f"part/{version}/{self.rank}", msgpack.packb(placed(part)))
        if self.rank == 0:
            parts = [msgpack.unpackb(self.store.get(f"part/{version}/{rank}")) for rank in range(self.world)]
            self.journal.train(policy, version, [(item, index, data) for part in parts for item, index, data in part])
            self.store.set(f"policy/{version}", policy.state)
        policy.state = self.store.get(f"policy/{version}").decode()
        return {}


class Follower:
    """Stands for `Follower` of publish.py: rank 0 serves the policies."""

    address = None

    def publish(self, policy: Policy, version: int) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}


class Reader(Checkpoints):
    """Checkpoints of ranks that restore what rank 0 has saved."""

    def finish(self, policy: Policy, version: int) -> None:
        pass


def train(run: Run, rank: int) -> None:
    """Rank `rank`, from the last checkpoint to the end."""
    config = run.config()
    world, first = config.learner.ranks, rank == 0
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timedelta(minutes=10))
    weights = Weights() if first else Follower()
    checkpoints = (Checkpoints if first else Reader)(run.checkpoints, config.learner.checkpoint_every)
    journal = SharedJournal(Journal(run.journal), store, rank, world)
    with connected(config, rank, world, weights.address) as batches:
        parts = Policy(), journal, batches, Unstoppable(), weights, checkpoints, Metrics()
        real_loop()(*parts, config.run.versions)


def forked(work: Callable[[], None]) -> int:
    """The pid of a process that does `work` and ends."""
    if pid := os.fork():
        return pid
    work()
    sys.stdout.flush()
    os._exit(0)


def main(run: Run) -> int:
    """Exit code of the first rank that failed, on any node, else 0."""
    learner = run.config().learner
    local = learner.ranks // learner.nodes
    tie_children()
    first = int(os.environ["NODE_RANK"]) * local
    pids = {forked(lambda rank=first + at: train(run, rank)): first + at for at in range(local)}  # type: ignore[misc]
    node = Node(learner, os.environ)  # has threads, so the ranks are forked before
    node.follow(lambda number: [os.kill(pid, number) for pid in pids])
    code = 0
    while pids:
        pid, status = os.wait()
        rank, ended = pids.pop(pid), os.waitstatus_to_exitcode(status)
        if ended and not code:
            code = ended if ended > 0 else 128 - ended
            node.tell("failed", code, rank)
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return node.leave(code)


if __name__ == "__main__":
    inner_words("RUN")
    sys.exit(main(Run(Path(sys.argv[1]))))
