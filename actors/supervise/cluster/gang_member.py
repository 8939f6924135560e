"""One node's share of the learner: starts the node's ranks when `gang.py` asks, once for each generation.

The first member holds the store in which all ranks meet, so no port is lost between two binds.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from actors.process import Event, Process, Restarts
from actors.supervise.cluster.arrival import Delivery, UnfitNode, settle
from actors.supervise.cluster.node_keeper import Whereabouts, here
from actors.supervise.keeper import Keeper

ONCE = Restarts(failures=1)
"""Restarts are for the gang to decide."""
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


class GangMember:
    """Keeps the learner's process of one node through each generation."""

    def __init__(self, process: Process, delivery: Delivery | None, node: str = "", address: str = "") -> None:
        self._node, self._address = (node, address) if node else here()
        self._keeper: Keeper | None = None
        self._store: Any = None
        self._shared, self._unfit = True, ""
        try:
            if delivery is not None:
                process, self._shared = settle(process, delivery, self._address)
        except UnfitNode as error:
            self._unfit = f"{self._address}: {error}"
        self._process = process

    def place(self) -> tuple[Whereabouts, str]:
        """The place of this node, and why it is unfit."""
        return Whereabouts("", self._node, self._address, self._shared), self._unfit

    def host(self) -> int:
        """Returns the store's port. It listens at this node's address only."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # slow, and needed on one node

        listener = socket.create_server((self._address, 0), family=FAMILIES[ip_address(self._address).version])
        listener.setblocking(False)
        port, timeout = int(listener.getsockname()[1]), timedelta(seconds=60)
        self._store = TCPStore(
            self._address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    def start(self, env: Mapping[str, str], flags: Sequence[str]) -> None:
        given = self._process
        env, argv = {**given.env, **env}, (*given.argv, *flags)
        self._keeper = Keeper(replace(given, env=env, argv=argv, restarts=ONCE))

    def events(self, after: int, timeout_s: float) -> tuple[list[Event], list[str], bool] | None:
        """`Keeper.events` and `Keeper.last` of this generation; None: another member started it."""
        if self._keeper is None:
            return None
        return self._keeper.events(after, timeout_s), *self._keeper.last()

    def drain(self, timeout_s: float) -> None:
        if self._keeper is not None:
            self._keeper.drain(timeout_s)

    def kill(self) -> None:
        if self._keeper is not None:
            self._keeper.kill()
