"""One node's share of the learner, as Ray runs it: starts the node's ranks when asked to, once for each generation.

`gang.py` decides when a generation starts and ends; this only reports. The first member also holds the store in which
all ranks meet, so no port is lost between two binds. Made a Ray actor by `ray_cluster.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from actors.process import Event, Process, Restarts
from actors.supervise.cluster.arrival import Delivery, UnfitNode, settle
from actors.supervise.cluster.node_keeper import Whereabouts, here
from actors.supervise.keeper import Keeper

ONCE = Restarts(failures=1)
"""Its keeper starts nothing again: that is for the gang to decide."""


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
        """The place of this node, and why the learner cannot run here, empty if it can."""
        return Whereabouts("", self._node, self._address, self._shared), self._unfit

    def host(self) -> int:
        """Open a store for the next generation; its port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # slow, and needed on one node

        timeout = timedelta(seconds=60)
        self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return int(self._store.port)

    def start(self, env: Mapping[str, str], flags: Sequence[str]) -> None:
        """Start the process anew, with `env` and `flags` besides its own."""
        given = self._process
        env, argv = {**given.env, **env}, (*given.argv, *flags)
        self._keeper = Keeper(replace(given, env=env, argv=argv, restarts=ONCE))

    def events(self, after: int, timeout_s: float) -> tuple[list[Event], list[str], bool] | None:
        """As `Keeper.events`, of this generation, with what `Keeper.last` says; None: another member started it."""
        if self._keeper is None:
            return None
        return self._keeper.events(after, timeout_s), *self._keeper.last()

    def drain(self, timeout_s: float) -> None:
        """As `Keeper.drain`."""
        if self._keeper is not None:
            self._keeper.drain(timeout_s)

    def kill(self) -> None:
        """As `Keeper.kill`."""
        if self._keeper is not None:
            self._keeper.kill()
