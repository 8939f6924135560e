"""The ranks of a learner that publish their own rows, as threads of one process: real stores, groups and threads of the
wire; only the training is missing."""

import os
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from configs.entrypoint import PARENT, die_with_parent
from learner.weights.channel import Channel
from learner.weights.plan import Spec
from learner.weights.protocol import SendRows
from learner.weights.rows import rows_of
from learner.weights.sender.mailbox import SendingRanks
from learner.weights.sender.publish import Sender
from learner.weights.sender.row_rank import RowRank
from tests.harness.keys import server_keys
from tests.harness.weights_server import HEARTBEAT_S, SPECS, VersionedPolicy, config
from tests.harness.world import FORKS

CPU = torch.device("cpu")


class RowPolicy(VersionedPolicy):
    """What `rank` of `ranks` has of a `VersionedPolicy`."""

    def __init__(self, version: int, rank: int, ranks: int, whole: Collection[str] = (), **keys: Any) -> None:
        super().__init__(version, **keys)
        self.rank, self.ranks, self.whole = rank, ranks, whole

    def local_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.full_weights(without):
            own = rows_of(len(tensor), self.ranks, self.rank)
            yield name, tensor if name in self.whole else tensor[own.start : own.stop]


class Agreement:
    """Stands for the ranks' collective: what rank 0 says, in the store."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._number = store.clone(), rank, 0

    def __call__(self, number: int) -> int:
        self._number += 1
        key = f"agreed/{self._number}"
        if self._rank == 0:
            self._store.set(key, str(number))
        return int(self._store.get(key))


def sending_ranks(store: Any, rank: int, ranks: int, whole: Collection[str] = ()) -> SendingRanks:
    return SendingRanks(rank, ranks, PrefixStore("rows", store), Agreement(store, rank), frozenset(whole))


class StoppingRank(RowRank):
    """Prints `mode` and sends nothing more at that moment of the round of `version`. `go`: before it enters the group;
    `half`: after two parts; `sums`: its rows are sent, their sums are not; `wire`: it does not stop."""

    def __init__(self, mode: str, version: int, *args: Any, **keys: Any) -> None:
        self.mode, self.version = mode, version
        super().__init__(*args, **keys)

    def _send(self, order: SendRows, channel: Channel) -> None:
        if order.version != self.version or self.mode not in ("go", "half"):
            return super()._send(order, channel)
        if self.mode == "half":
            channel.connect()
            with self._holding(order) as weights:
                for _ in channel.broadcast(weights.messages()[:2]):
                    pass
        self._stop()

    def _sum(self, order: SendRows) -> None:
        if order.version == self.version and self.mode == "sums":
            self._stop()
        super()._sum(order)

    def _stop(self) -> None:
        print(self.mode, flush=True)
        time.sleep(600)


class RowLearner:
    """`ranks` ranks, all in this process. `store`: the one in which they have met."""

    def __init__(
        self,
        ranks: int,
        specs: Sequence[Spec] = SPECS,
        whole: Collection[str] = (),
        frozen: Collection[str] = (),
        here: int | None = None,
        **keys: Any,
    ) -> None:
        """`here`: so many of them; the others are started elsewhere."""
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.specs, self.whole, self.frozen, self.number = list(specs), whole, frozen, ranks
        sending = [sending_ranks(self.store, rank, ranks, whole) for rank in range(ranks)]
        given = config(**keys)
        self.others = [RowRank(self.specs, given, 0, CPU, each, frozen=frozen) for each in sending[1:here]]
        self.sender = Sender(
            *(self.specs, given, 0, CPU),
            heartbeat_s=HEARTBEAT_S,
            frozen=frozen,
            ranks=sending[0],
            keys=server_keys("learner"),
        )
        self.address = self.sender.address
        self._pool = ThreadPoolExecutor(max(1, ranks))

    def policies(self, version: int) -> list[RowPolicy]:
        keys: dict[str, Any] = {"whole": self.whole, "specs": self.specs, "frozen": self.frozen}
        return [RowPolicy(version, rank, self.number, **keys) for rank in range(self.number)]

    def publish(self, version: int) -> None:
        """On every rank at once, as their loops do."""
        policies = self.policies(version)
        wires = [self.sender, *self.others]
        for done in [self._pool.submit(w.publish, p, version) for w, p in zip(wires, policies, strict=False)]:
            done.result(60)

    def close(self) -> None:
        self.sender.close()
        for other in self.others:
            other.close()
        self._pool.shutdown()


def run_rank(port: int, rank: int, ranks: int, mode: str, version: int, pipe: Any) -> None:
    """A rank as a process of its own, which publishes as many versions as there are; prints into `pipe`."""
    os.environ[PARENT] = str(os.getppid())
    die_with_parent()
    torch.set_num_threads(1)
    os.dup2(pipe.fileno(), 1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    wire = StoppingRank(mode, version, SPECS, config(), 0, CPU, sending_ranks(store, rank, ranks))
    for number in range(100):
        wire.publish(RowPolicy(number, rank, ranks), number)


def run_learner(ranks: int, mode: str, version: int, pipe: Any) -> None:
    """A learner as a process, whose rank 1 stops at `mode` in the round of `version`; prints its address first."""
    os.environ[PARENT] = str(os.getppid())
    die_with_parent()
    torch.set_num_threads(1)
    os.dup2(pipe.fileno(), 1)
    learner = RowLearner(ranks, here=1)
    keys = SPECS, config(), 0, CPU
    learner.others = [
        StoppingRank(mode if rank == 1 else "wire", version, *keys, sending_ranks(learner.store, rank, ranks))
        for rank in range(1, ranks)
    ]
    print(learner.address, flush=True)
    for number in range(version + 1):
        learner.publish(number)
        while number < version and learner.sender.stats().get("weights/version") != number:
            time.sleep(0.02)
    time.sleep(600)


class ForkedRank:
    """A process that runs `target`, which is killed at the end of the block."""

    def __init__(self, target: Any, *args: Any) -> None:
        ours, theirs = FORKS.Pipe(duplex=False)
        self._process: Any = FORKS.Process(target=target, args=(*args, theirs))
        self._process.start()
        theirs.close()
        self._lines = os.fdopen(os.dup(ours.fileno()))
        ours.close()

    def __enter__(self) -> "ForkedRank":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._lines.close()

    def line(self) -> str:
        """The next line that it prints."""
        return self._lines.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def row_learner(ranks: int, *args: Any, **keys: Any) -> Iterator[RowLearner]:
    learner = RowLearner(ranks, *args, **keys)
    try:
        yield learner
    finally:
        learner.close()
        assert not any(other._thread.is_alive() for other in learner.others)
