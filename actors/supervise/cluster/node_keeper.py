"""The keeper of one process on a cluster's node, as a Ray actor: prepares the node, then keeps the process."""

import secrets
from typing import NamedTuple

from actors.process import SERVERS, Event, EventKind, Process
from actors.supervise.cluster.arrival import Delivery, UnfitNode, settle
from actors.supervise.keeper import Keeper


class Whereabouts(NamedTuple):
    """`life` differs for each keeper that Ray makes."""

    life: str
    node: str
    """Ray's id."""
    address: str
    shared: bool
    """The run's folder is the launcher's."""


class NodeKeeper:
    """Keeps `process` on this node. Without `delivery` it is the launcher's."""

    def __init__(self, process: Process, delivery: Delivery | None, node: str = "", address: str = "") -> None:
        node, address = (node, address) if node else here()
        self._keeper: Keeper | None = None
        self._unfit: list[Event] = []
        shared = True
        try:
            if delivery is not None:
                process, shared = settle(process, delivery, address)
            self._keeper = Keeper(process)
        except UnfitNode as error:
            kind: EventKind = "gave_up" if process.role in SERVERS else "refused"  # others may do
            self._unfit = [Event(1, kind, f"{address}: {error}")]
        self._place = Whereabouts(secrets.token_hex(8), node, address, shared)

    def place(self) -> Whereabouts:
        return self._place

    def events(self, life: str, after: int, timeout_s: float) -> tuple[Whereabouts, list[Event]]:
        """`after` is a number of the keeper `life`: all events of another keeper are new."""
        after = after if life == self._place.life else 0
        if self._keeper is None:
            return self._place, [event for event in self._unfit if event.number > after]
        return self._place, self._keeper.events(after, timeout_s)

    def drain(self, timeout_s: float) -> None:
        if self._keeper is not None:
            self._keeper.drain(timeout_s)

    def kill(self) -> None:
        if self._keeper is not None:
            self._keeper.kill()


def here() -> tuple[str, str]:
    """Id and address of this node in Ray."""
    import ray

    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
