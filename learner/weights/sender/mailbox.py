"""Messages between the ranks that send rows, over the store of all ranks. The store asks for no key: whoever reaches it
can break the training anyway."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from buffer.wire.message import Message
from learner.weights.protocol import pack, unpack

KEPT = 1000
ORDERS, ANSWERS = "weights/orders", "weights/answers"


class SendingRanks(NamedTuple):
    """The ranks that share a copy of the model."""

    rank: int
    number: int
    store: Any
    agree: Callable[[int], int]
    """A collective that returns rank 0's argument."""
    replicated: frozenset[str] = frozenset()
    """Weights that each rank holds whole, by name."""


class Mailbox:
    """The numbered messages `name` of `store`. Numbers are never reused: each start of the learner needs a store, or a
    prefix, of its own, which torch provides."""

    def __init__(self, store: Any, name: str, kinds: dict[str, type[Message]]) -> None:
        self._store, self._name, self._kinds = store.clone(), name, kinds
        self._lock = threading.Lock()

    def post(self, message: Message) -> None:
        with self._lock:
            number = self._store.add(f"{self._name}/posted", 1)
            self._store.set(f"{self._name}/{number}", pack(message))
            self._store.delete_key(f"{self._name}/{number - KEPT}")

    def read(self) -> Iterator[Message]:
        """Each message from the first on, until the store is gone."""
        store, number = self._store.clone(), 1  # a connection of its own: a wait blocks it
        store.set_timeout(timedelta(days=1))
        while True:
            try:
                data = store.get(f"{self._name}/{number}")
            except dist.DistNetworkError:
                return
            except dist.DistStoreError:  # nothing was posted for as long as a call may take
                continue
            number += 1
            yield unpack(data, self._kinds)
